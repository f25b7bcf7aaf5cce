"""Benchmarks: ``python -m benchmarks --out DIR``; see benchmarks/runner.py."""
