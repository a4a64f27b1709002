"""Measuring attention, dense and condensed: error of keys and values, what Recall opens, patterns of sparse prefill."""
