"""What results are held to: the definitions as loops, the error budget, and the methods that both are used on.

The tests and the gate before a benchmark's clock use these. Nothing here calls the library's own attention or pooling.
"""
