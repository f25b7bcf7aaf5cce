"""What was measured on what."""

from __future__ import annotations

import ctypes
from datetime import datetime, timezone

import torch

from tk import capi
from tk._packs import packs


def record(problem: capi.Problem | None = None) -> dict[str, str]:
    """GPU, driver, compiler of the kernels that run a problem (by default products), and today's date."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "compiler": pack_compiler(problem=problem),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def driver_version() -> str:
    """The version of the NVIDIA driver, "580.159.04"; "unknown" where NVML does not say."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return "unknown"
    text = ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(text, len(text)):
        return "unknown"
    return text.value.decode()


def pack_compiler(device: int = 0, problem: capi.Problem | None = None) -> str:
    """What compiled the kernels that this device runs, of products or of a problem, "triton 3.9.0, ptxas 12.9"."""
    if problem is None:
        square = capi.Matrix(torch.bfloat16, (4096, 4096), (4096, 1))
        problem = capi.Problem("mm", (square, square, None, square), (0, 0), (1.0, 1.0), 0, device)
    path = capi.choose(problem).pack_path
    return next(pack.compiler for pack in packs() if pack.path == path)
