"""Tensors in the layouts that all backends share: a number per row, right-aligned columns, biases, codes, samples."""
