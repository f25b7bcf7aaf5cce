"""Holds what auditwheel says of a wheel against the wheel's tag: torch's library alone may keep it from the tag.

auditwheel show --json torch_tk-….whl | python tools/check_audit.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

TORCH = {"libtorch_cpu.so"}  # which tk requires, so it is there before tk


def problem(audit: Mapping[str, Any]) -> str:
    """What keeps the wheel from its tag; "" when nothing does."""
    platform = audit["wheel"].removesuffix(".whl").rpartition("-")[2]
    if audit["overall_tag"] == platform:
        return ""
    upgrade = audit["policy_upgrades"].get(platform)
    if upgrade is None:
        return f"its symbols keep it from {platform}: auditwheel would call it {audit['sym_tag']}"
    more = set(upgrade["libs_to_eliminate"]) - TORCH
    return f"{platform} has no {', '.join(sorted(more))}" if more else ""


if __name__ == "__main__":
    sys.exit(problem(json.load(sys.stdin)) or 0)
