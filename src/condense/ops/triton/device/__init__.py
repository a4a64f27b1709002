"""What runs inside Triton kernels: who sees what, and rows of any width."""
