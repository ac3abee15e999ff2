"""Write a file whole or not at all, for real: after a power cut too.

The text goes into a file of its own name in the same folder, is synced, takes the target's name,
and the folder is synced.  A crash leaves the old file or the new one, and at worst a file named
`.<target>.<random>.part` beside it.  A failure leaves the old file as it was and removes that one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from holdfast.journal.errors import ExportFailed, HoldfastError, InvalidArgument
from holdfast.journal.locations import sync_folder

# The name may be as long as the file system takes, and ours is longer.
NAME_BYTES_MAX = 200


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """A text file that takes the place of `path` when the block ends, and never if it raises.

    Links are followed.  A new file is for its owner alone (0600), as the store is; one that stood
    there before hands on its mode.
    """
    target = Path(os.path.realpath(path))
    stem = target.name.encode()[:NAME_BYTES_MAX].decode(errors="ignore")
    part = target.with_name(f".{stem}.{secrets.token_hex(6)}.part")
    try:
        with _create(part, _mode_of(target)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except BaseException as error:
        with suppress(OSError):
            part.unlink()
        if isinstance(error, OSError) and not isinstance(error, HoldfastError):
            raise ExportFailed(
                target,
                f"cannot be written: {error}; what stood there before is as it was:"
                " make room or check the folder, then export again",
            ) from error
        raise
    try:
        sync_folder(target.parent)
    except OSError as error:
        raise ExportFailed(
            target, f"written, but its folder cannot be synced: {error}; a power cut may undo it"
        ) from error


def refuse_store_files(path: str | os.PathLike[str]) -> None:
    """Raise if `path` is a store or a file beside one; nothing is opened to find out.

    To replace such a file would end the store, and to open and close it would drop the locks that
    SQLite holds on it in this process.
    """
    target = Path(os.path.realpath(path))
    for suffix in ("", "-wal", "-shm", "-journal", "-lock"):
        base = target.name.removesuffix(suffix)
        # Of os.path: a name that is too long for the file system is no file either.
        lock = os.path.join(target.parent, f"{base}-lock")  # noqa: PTH118
        if target.name.endswith(suffix) and os.path.exists(lock):  # noqa: PTH110
            raise InvalidArgument(
                f"{target} is a file of a store; nothing was read or written: choose another"
            )


def _create(path: Path, mode: int) -> TextIO:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    return os.fdopen(descriptor, "w", encoding="utf-8", newline="\n")


def _mode_of(target: Path) -> int:
    try:
        return target.stat().st_mode & 0o777
    except OSError:
        return 0o600
