"""The `triton` backend: kernels for CUDA, forward and backward, deterministic; interpreted on a CPU for tests."""
