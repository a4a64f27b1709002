"""Functions and records that Triton kernels share: spans, rows of any width, online softmax, entries of a chunk."""
