"""Evaluating a model under several attention methods, on the same questions and texts."""
