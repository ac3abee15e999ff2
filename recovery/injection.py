"""Errors that wait for their operation, and the count of operations that they wait by."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import apsw

from holdfast.recovery.trace import Role

__all__ = ["ErrorName", "Fault", "FaultKind", "Injector"]

FaultKind = Literal["open", "read", "write", "truncate", "sync", "delete"]
ErrorName = Literal["eio", "full", "short", "edquot", "efbig"]

# What the unix VFS makes of each error: SQLite's code, and the errno behind a code that has one.
# A file that is too big and a quota that is used up are no SQLITE_FULL there.
_CODES: dict[tuple[str, str], tuple[int, int]] = {
    ("open", "eio"): (apsw.SQLITE_CANTOPEN, errno.EIO),
    ("open", "full"): (apsw.SQLITE_FULL, 0),
    ("read", "eio"): (apsw.SQLITE_IOERR_READ, errno.EIO),
    ("read", "short"): (apsw.SQLITE_IOERR_SHORT_READ, 0),
    ("write", "eio"): (apsw.SQLITE_IOERR_WRITE, errno.EIO),
    ("write", "full"): (apsw.SQLITE_FULL, 0),
    ("write", "short"): (apsw.SQLITE_FULL, 0),
    ("write", "edquot"): (apsw.SQLITE_IOERR_WRITE, errno.EDQUOT),
    ("write", "efbig"): (apsw.SQLITE_IOERR_WRITE, errno.EFBIG),
    ("truncate", "eio"): (apsw.SQLITE_IOERR_TRUNCATE, errno.EIO),
    ("sync", "eio"): (apsw.SQLITE_IOERR_FSYNC, errno.EIO),
    ("sync", "full"): (apsw.SQLITE_FULL, 0),
    ("delete", "eio"): (apsw.SQLITE_IOERR_DELETE, errno.EIO),
}


@dataclass(slots=True, eq=False)
class Fault:
    """An error that waits for its operation. `fired` says how often it has struck."""

    kind: FaultKind
    error: ErrorName
    file: Role | None
    wait: int  # operations that still pass
    left: int | None  # strikes that are left; None: without end
    lose_pages: bool
    fired: int = 0

    def exception(self) -> Exception:
        """The APSW exception with the extended code that SQLite's unix VFS would give."""
        return apsw.exception_for(_CODES[self.kind, self.error][0])


class Injector:
    """Counts operations and says which of them fail. Threads may share one."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()  # tried, by kind and file
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._errno = threading.local()

    def add(self, fault: Fault) -> None:
        """Arm a fault, after checking that there is such a thing."""
        if (fault.kind, fault.error) not in _CODES:
            raise ValueError(f"a {fault.kind} cannot fail with {fault.error!r}")
        if fault.wait < 0 or (fault.left is not None and fault.left < 1):
            raise ValueError(
                f"nth is {fault.wait + 1} and times is {fault.left}, expected 1 or more"
            )
        if fault.lose_pages and fault.kind != "sync":
            raise ValueError(f"a {fault.kind} loses no pages, only a sync does")
        with self._lock:
            self._faults.append(fault)

    def clear(self) -> None:
        """Take back every fault."""
        with self._lock:
            self._faults.clear()

    def count(self, kind: FaultKind, file: Role | None) -> int:
        """How many operations of a kind were tried, on one kind of file or on all (None)."""
        with self._lock:
            return sum(n for key, n in self.counts.items() if _fits(key, kind, file))

    def strike(self, kind: FaultKind, file: Role) -> Fault | None:
        """Count an operation; the fault that hits it, if any."""
        with self._lock:
            self.counts[kind, file] += 1
            hit = None
            for fault in list(self._faults):
                if not _fits((kind, file), fault.kind, fault.file):
                    continue
                if fault.wait:
                    fault.wait -= 1
                elif hit is None:
                    hit = fault
                    fault.fired += 1
                    if fault.left is not None:
                        fault.left -= 1
                        if not fault.left:
                            self._faults.remove(fault)
            if hit is not None:
                self._errno.code = _CODES[kind, hit.error][1]
            return hit

    def take_errno(self) -> int:
        """The errno of this thread's last injected error, once; 0 for none."""
        code: int = getattr(self._errno, "code", 0)
        self._errno.code = 0
        return code


def _fits(key: tuple[str, str], kind: str, file: str | None) -> bool:
    return key[0] == kind and file in (None, key[1])
