"""PTX for sm_80 on the GPU that is here, by the driver's compiler: what a GPU newer than every cubin runs.

No cubin is in the way, since the functions' only pack has PTX. The package's own kernels as PTX run in
``make gpu-test LOCAL_ARCH=ptx80 GRID=full ARGS='-k verify'``, whose wheel has no pack for sm_80 or sm_90.

Built here where Triton is; TK_TEST_PACKS names a folder with ptx.tkpack built elsewhere
(``tk build examples/my_ops.py --sample --arch ptx80 -o ptx.tkpack``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .device import DEVICE, build, environment

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="about kernels")

# In a process of its own: other tests load packs of these functions' names with cubins.
CALL_ALL = """
import json, sys
import torch, tk
tk.load_pack(sys.argv[1])
sys.path += sys.argv[2:]
import declared_calls, my_ops

def moved(args, device):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.detach().to(device, copy=True), args)

told = {}  # sizes are multiples of 16, as the sample wants them
tk.config.set_default_modes(strict=True)  # what no kernel takes is an error, and not ATen's
for name, args in declared_calls.calls(my_ops, 64, (4, 16)):
    here, there = moved(args, "cuda"), moved(args, "cpu")
    try:
        found = getattr(torch.ops.tk, name)(*here)
    except RuntimeError as error:  # the sample has one kernel of an op, which may not be for these views
        if "[tk:VariantNotFound]" not in str(error):
            raise
        continue
    torch.testing.assert_close([moved([found], "cpu"), moved(here, "cpu")], [[getattr(my_ops, name)(*there)], there],
                               rtol=1e-4, atol=1e-4, msg=lambda text: f"{name}: {text}")
    told[name] = [row.arch for row in tk.coverage().only(op=name)]
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if given := os.environ.get("TK_TEST_PACKS"):
        return Path(given) / "ptx.tkpack"
    pytest.importorskip("triton")
    path = tmp_path_factory.mktemp("packs") / "ptx.tkpack"
    return build(ROOT / "examples" / "my_ops.py", path, "--sample", "--arch", "ptx80")  # the later --arch counts


@pytest.mark.slow
def test_the_driver_compiles_functions_and_their_results_are_right(pack: Path) -> None:
    command = [sys.executable, "-c", CALL_ALL, str(pack), str(ROOT / "examples"), str(ROOT / "tests")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    told = json.loads(done.stdout)
    assert len(told) >= 15, sorted(told)
    assert {arch for archs in told.values() for arch in archs} == {"ptx80"}, told
