"""Makes of a mod its graph, in one spelling, and values. Nothing here knows of kernels.

trace.py      a score_mod and a mask_mod -> graphs, captures and a fingerprint; begin here
reads.py      a copy of a mod that notes what it reads of its surroundings
watched.py    what stands for its objects, classes and modules; states.py: for the states of torch
record.py     the ATen ops that it does, without a value to do them on; numbers.py: the same of numbers
canonical.py  one spelling of a graph, and its text; normal.py: of sums, comparisons and what is made of numbers
evaluate.py   a graph's values for many scores at once
"""
