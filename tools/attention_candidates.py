"""Builds a pack of attention with more settings than ship, to find which should.

    python tools/attention_candidates.py -o build/candidates.tkpack            # needs no GPU
    python -m benchmarks.attention_configs decode --pack build/candidates.tkpack --out decode.json
    python -m benchmarks.attention_configs backward --pack build/candidates.tkpack --out backward.json

The ops are the package's own without a mask and with a causal one, for bf16 on sm_90, under names of their own
(benchmarks.attention_configs.candidate_name).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for benchmarks/

from benchmarks.attention_configs import candidate_name
from tk.aot.cache import open_cache
from tk.aot.compile import Target
from tk.build.packs import build, plan_pack
from tk.flex import mods, own_ops
from tk.flex.codegen import family
from tk.flex.codegen.family import Wanted
from tk.flex.tracing import trace
from tk.kernels.attention import decode, hopper_backward_plans

DECODE = (
    decode.config(16, 64, 3, 4, dependent=True),
    decode.config(16, 64, 3, 4, per_sm=3),
    decode.config(16, 64, 3, 4, per_sm=3, dependent=True),
    decode.config(16, 64, 2, 4, per_sm=4, dependent=True),
    decode.config(16, 64, 4, 4, dependent=True),
    decode.config(16, 64, 3, 8, dependent=True),
    decode.config(16, 32, 4, 4, per_sm=3, dependent=True),
    decode.config(16, 32, 5, 2, per_sm=4, dependent=True),
    decode.config(16, 128, 2, 4, dependent=True),
    decode.config(16, 128, 3, 8, per_sm=1, dependent=True),
)
BACKWARD = {  # by head size
    64: tuple(hopper_backward_plans.config(step, stages, 240, 24) for step, stages in ((64, 4), (64, 6), (128, 4))),
    128: (hopper_backward_plans.config(64, 2, 240, 24),),
}
WANTED = Wanted(dtypes=("bf16",), exact=((64, 64), (128, 128)), rounded=((128, 128),))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("-j", "--jobs", type=int, default=2)
    args = parser.parse_args()
    decode.CANDIDATES, hopper_backward_plans.CANDIDATES = DECODE, BACKWARD
    own_ops.op_name = candidate_name
    found = [f for mask in (None, mods.causal) for f in family.families(trace.pair(None, mask).traced, WANTED)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with open_cache(print) as cache:
        build([plan_pack(found, Target(90), args.out)], cache, args.jobs)


if __name__ == "__main__":
    main()
