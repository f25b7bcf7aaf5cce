"""A file per family: the wrappers, the fakes, the autograd formulas, side by side."""
