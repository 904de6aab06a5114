"""Benchmarks: each measures us, a stated rival and the physical limit in the same run, and prints the ratios."""
