"""The library on one GPU: `python -m tests.benchmarks.gpu`, see `__main__`."""
