"""The version, in one place without imports."""

__version__ = "0.1.0"
