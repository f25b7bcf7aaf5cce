"""What the plans of all products share: the problem as a product (problem.py), and its predicted time (cost.py)."""
