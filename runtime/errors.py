"""The one exception family of the package: every message says what, where and what to do."""

from __future__ import annotations


class ReplayError(Exception):
    """Base of every error raised on purpose by this package."""


class SpecError(ReplayError, ValueError):
    """A kernel specification or shape that no kernel can serve."""


class ArgumentError(ReplayError, ValueError):
    """A tensor or scalar handed to an op does not fit the op's contract."""


class TableError(ReplayError, ValueError):
    """A dispatch table that cannot be read: unknown schema, malformed row, missing provenance."""


class DispatchError(ReplayError, LookupError):
    """No kernel can be served for a call (strict mode, or a slim package without the shape)."""


class CompileError(ReplayError, RuntimeError):
    """A kernel failed to compile or exceeds the resources of its target."""
