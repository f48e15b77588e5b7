"""The one exception family of the package: every message says what, where and what to do."""

from __future__ import annotations

import datetime


class ReplayError(Exception):
    """Base of every error raised on purpose by this package.

    Args:
        what: What is wrong, with the offending values.
        where: The option, file or tensor it was found in; may be empty.
        hint: What to do about it; may be empty where ``what`` says so already.
    """

    def __init__(self, what: str = "", *, where: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        advice = f"; {self.hint}" if self.hint else ""
        return f"{self.what}{place}{advice}"


class SpecError(ReplayError, ValueError):
    """A kernel specification or shape that no kernel can serve."""


class ArgumentError(ReplayError, ValueError):
    """A tensor or scalar handed to an op does not fit the op's contract."""


class TableError(ReplayError, ValueError):
    """A dispatch table that cannot be read: unknown schema, malformed row, missing provenance."""


def require(condition: bool, message: str) -> None:
    """Refuse a record of a table.

    Raises:
        TableError: The condition does not hold.
    """
    if not condition:
        raise TableError(message)


def require_date(text: str) -> None:
    """Refuse a record of a table whose ``text`` is no ISO date.

    Raises:
        TableError: It is none.
    """
    try:
        datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError as error:
        raise TableError(f"provenance is missing: date '{text}' is not an ISO date") from error


class DispatchError(ReplayError, LookupError):
    """No kernel can be served for a call (strict mode, or a slim package without the shape)."""


class CompileError(ReplayError, RuntimeError):
    """A kernel failed to compile or exceeds the resources of its target."""


class ToolchainError(ReplayError, RuntimeError):
    """Triton, torch or the C compiler is missing or does not work."""
