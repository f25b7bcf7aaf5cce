"""The family `conv_input_grad`: its kernel, and what tests compile of it."""

from tk.aot.spec import Kernel, Point
from tk.kernels.conv.input_grad.op import OP
from tk.kernels.conv.input_grad.tma_plans import KERNELS
from tk.kernels.sampled import sampled_family

_SAMPLED = {"input_grad_tma": ("128x128x64_s6_coop", "64x128x64_s8_pingpong")}


def _usual(kernel: Kernel, point: Point) -> dict[str, object]:
    """bf16, two dimensions and a stride."""
    return {"dtype": "bf16", "spatial": 2, "store": "channels_last"}


FAMILY = sampled_family(OP, KERNELS, _SAMPLED, _usual)
