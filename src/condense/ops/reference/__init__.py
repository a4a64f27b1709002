"""The definition of every operation: plain PyTorch, any device, made for float64 on the CPU."""
