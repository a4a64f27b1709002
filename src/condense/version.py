"""The version, importable from a source tree without installing the package."""

__version__ = "0.2.0"
