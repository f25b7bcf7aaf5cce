"""Measured choices of this machine.

``tk tune`` times every config that fits a product, on weights that rotate through more memory than L2 holds. Then the
fewest configs are kept with which every problem stays within a stated slowdown of its best, and each problem is pinned
to the fastest of those. The pins go to a file in the user's cache directory, which tk reads when a GPU is first used,
or with ``--write`` all timings go to a file of ``kernels/tuned/``, from which tools/fit_cost.py makes the table that
ships.

``tk tune OP`` does so for a hand-written op beside them, at sizes drawn at random or given ones.

``tk tune softmax 32768x4096`` walks the configs of a generated op, the package's or a user's (TK_PACK_PATH): from the
one that is predicted to be the fastest along one parameter at a time, as long as that gains. The fastest is pinned
likewise.

Timing happens here and nowhere else: never inside a call.
"""

from tk.tune.pins import load_user_pins, user_file

__all__ = ["load_user_pins", "user_file"]
