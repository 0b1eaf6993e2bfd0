"""Benchmarks of te_mx against what people use today: `python -m benchmarks --help`."""
