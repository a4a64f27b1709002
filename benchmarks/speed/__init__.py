"""Speed and memory of kernels and whole models beside named baselines; results are checked before they are timed."""
