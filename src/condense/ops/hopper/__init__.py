"""The `hopper` backend: warp-specialised kernels for compute capability 9.0."""
