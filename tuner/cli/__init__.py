"""The command line: one file per verb; each parses, calls the tuner, and shows the result."""

from .main import main

__all__ = ["main"]
