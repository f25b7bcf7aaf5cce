"""The hand-written ops. Each family has a file with its Python wrappers, its fakes and its autograd formulas."""
