"""The version, where every module can import it."""

__version__ = "0.2.0"
