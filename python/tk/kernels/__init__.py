"""The kernels that ship.

In a wheel they are the files of this folder. In a checkout they live in ``kernels/`` at the top, for everyone to see,
and are found from here; nothing else has to know.
"""

from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[3] / "kernels"
if _CHECKOUT.is_dir():
    __path__.append(str(_CHECKOUT))
