"""tk in torch's registry of flash attention: ``torch.nn.attention.activate_flash_attention_impl("tk")``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import attention  # which torch itself imports

if TYPE_CHECKING:
    from tk.dropin.flash import Activated


def install() -> None:
    """Makes the name known. Nothing more is imported until somebody activates it."""
    attention.register_flash_attention_impl("tk", register_fn=_activate)


def _activate() -> Activated:
    from tk.dropin import flash

    return flash.Activated()
