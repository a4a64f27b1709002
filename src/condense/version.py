"""The version, readable from a source tree that nobody installed."""

__version__ = "0.1.0"
