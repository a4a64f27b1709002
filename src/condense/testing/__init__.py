"""Test oracles: the methods' definitions as loops, the error budget, and the cases to check.

Used by the tests and by the checks of the benchmarks. Nothing here calls the library's own attention or pooling.
"""
