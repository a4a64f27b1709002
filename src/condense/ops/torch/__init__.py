"""The `torch` backend: PyTorch's fused attention, block by block, on any device, differentiable."""
