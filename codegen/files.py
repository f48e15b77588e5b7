"""Writing generated files: whole or not at all, and only where something changed."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path
from typing import Final

from ..runtime.errors import ReplayError

DISK_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
"""What the system says where a disk is full, read-only or forbidden."""


class EmitError(ReplayError, RuntimeError):
    """A generated file cannot be written: a full disk, a read-only or forbidden folder."""


def emit_error(path: Path, error: OSError) -> EmitError:
    """``error``, met while writing or removing ``path``, in words."""
    return EmitError(
        f"cannot write: {error.strerror or error}",
        where=str(path),
        hint="make room there, or choose another folder",
    )


def write(path: Path, text: str) -> bool:
    """Make ``path`` hold ``text``; readers see the old file or the new one, never a part.

    Missing folders are made. A file that holds ``text`` already is left alone.

    Returns:
        Whether the file was written.

    Raises:
        EmitError: The file cannot be written; an old one is intact.
    """
    data = text.encode()
    # Hidden and of another ending, so that a left-over of a crash is taken for nothing.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        if path.is_file() and path.read_bytes() == data:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise emit_error(path, error) from error
    return True
