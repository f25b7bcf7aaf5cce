"""examples/parallel.py, as torchrun starts it."""

from __future__ import annotations

import re
import subprocess
import sys

from examples import FOLDER


def test_two_ranks_train_as_one() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, str(FOLDER / "parallel.py"), "--steps", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.search(r"2 ranks, (gloo|nccl): differs from one process by (\S+)", done.stdout)
    assert told and 0 < float(told[2]) < 1e-4, done.stdout
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]
    assert len(losses) == 5 and losses[-1] < 0.7 * losses[0], losses
