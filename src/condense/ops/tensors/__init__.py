"""Functions on tensors that all backends share: a number per row, right-aligned columns, codes, samples."""
