"""The version, where every module can import it."""

__version__ = "0.1.0"
