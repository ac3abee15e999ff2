"""What SQLite and the system say when something fails, in words and types a user can act on."""

from __future__ import annotations

import apsw

from holdfast.journal.errors import (
    HoldfastError,
    InvalidMessage,
    StoreBusy,
    StoreCorrupt,
    StoreFailed,
    StoreFull,
    StoreNotWritable,
)
from holdfast.journal.locations import NO_ROOM

# What SQLite or APSW raise when the bytes make no sense; text that is no UTF-8 is no apsw.Error.
DAMAGE = (apsw.CorruptError, apsw.NotADBError, apsw.FormatError, UnicodeDecodeError)

READ_FAILED = frozenset(
    {
        apsw.SQLITE_IOERR_READ,
        apsw.SQLITE_IOERR_SHORT_READ,
        apsw.SQLITE_IOERR_FSTAT,
        apsw.SQLITE_IOERR_ACCESS,
        apsw.SQLITE_IOERR_CORRUPTFS,
    }
)


def is_no_room(error: BaseException, system_errno: int) -> bool:
    """Whether the disk, the quota or the limit of file sizes is used up.

    A file that may not grow and a quota are no SQLITE_FULL, but an errno; shared memory that cannot
    be had has neither.
    """
    if isinstance(error, apsw.FullError):
        return True
    if not isinstance(error, apsw.IOError | apsw.CantOpenError | OSError):
        return False
    return system_errno in NO_ROOM or extended(error) == apsw.SQLITE_IOERR_SHMSIZE


def is_read_failure(error: apsw.Error) -> bool:
    """Whether the disk failed to read: that says nothing about what is written."""
    return extended(error) in READ_FAILED


def extended(error: BaseException) -> int:
    """SQLite's extended code."""
    return int(getattr(error, "extendedresult", 0))


def no_room(name: str) -> StoreFull:
    """Nothing more fits."""
    return StoreFull(
        name,
        "no room on the disk; this write is not on record, everything before it is: free some"
        " space and repeat the call",
    )


def translate(name: str, error: BaseException, system_errno: int) -> HoldfastError:
    """Turn what SQLite says into what a user can act on."""
    if is_no_room(error, system_errno):
        return no_room(name)
    match error:
        case apsw.BusyError() | apsw.LockedError():
            return StoreBusy(
                name,
                "someone else holds the write lock longer than we wait; nothing was written:"
                " try again",
            )
        case apsw.TooBigError():
            return InvalidMessage("larger than SQLite can hold (1 GB); nothing was written")
        case apsw.CorruptError() | apsw.NotADBError() | apsw.FormatError():
            return StoreCorrupt(
                name,
                f"the file is damaged ({error}); it was not changed: run doctor, then salvage"
                " into a new store",
            )
        case UnicodeDecodeError():
            return StoreCorrupt(
                name,
                "a text in it is no UTF-8; it was not changed: run doctor, then salvage into a"
                " new store",
            )
        case apsw.ReadOnlyError() | apsw.CantOpenError() | apsw.PermissionsError():
            return StoreNotWritable(
                name,
                f"cannot be opened or written ({error}); nothing was changed: check the"
                " permissions of the file and of its folder, or open with read_only=True",
            )
        case apsw.IOError() | OSError():
            return StoreFailed(
                name, f"input/output error ({error}); nothing was written: see to the disk"
            )
        case _:
            return StoreCorrupt(name, f"unexpected answer of SQLite: {error!r}")
