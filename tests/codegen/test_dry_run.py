"""What a build says of a generated op before it makes it."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path

import ops

from tk.aot.cache import Cache
from tk.aot.compile import Target
from tk.build.packs import dry_run, plan_pack
from tk.codegen.family import generate


def test_classes_are_listed_and_counted(tmp_path: Path) -> None:
    declared = ops.maybe_scaled
    family = generate(declared.fn, declared.signature, "maybe_scaled").family
    planned = plan_pack([family], Target(90), tmp_path / "x.tkpack")
    out = io.StringIO()
    dry_run([planned], Cache(tmp_path / "cache"), jobs=1, out=out)
    (line,) = (x for x in out.getvalue().splitlines() if "classes of calls" in x)
    wanted = Counter((p.variant.point.graph, p.variant.point.layout) for p in planned.ops[0].variants)
    assert len(wanted) == 10 and line.startswith("    10 classes of calls, with their variants: ")
    for (graph, layout), count in wanted.items():
        assert f"{graph} {layout} ({count})" in line
