"""The write-ahead log of a store: how long it may get, and when its bytes may be trusted.

INVARIANT  Nothing is written behind a part of the log that a failed sync has left in doubt.

A failed sync may drop pages that the kernel goes on to show and calls clean; frames behind such a
hole are lost with the power, acknowledged or not.  So a failed write leaves the log in doubt, and
before the next one all of it is written again in place and synced (`heal_log`).  The same is done
when a store is opened that somebody did not close.

SQLite never checkpoints by itself here: it would stall an append and swallow the errors.  The end
of a step empties a log that has grown; within a step only the cap does.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import apsw

from holdfast.journal.locations import Location
from holdfast.journal.observers import Observer, StoreEvent

if TYPE_CHECKING:
    from holdfast.journal.engine.connection import Patience

log = logging.getLogger("holdfast")

# In units of roughly one page: past the first, the end of a step empties the log; the second is
# how often an append looks whether an endless step has reached the cap.
LOG_TIDY_PAGES = 1000
LOG_LOOK_PAGES = 4000
LOG_CAP_PAGES = 30_000  # some 32 MB
HEAL_BYTES = 1 << 16  # copied at a time; SQLite's unix layer fails to write 128 KB or more at once


class Log:
    """The log of one open store, as its writing connection sees it."""

    location: Location | None
    lock: threading.RLock
    observer: Observer | None
    patience: Patience
    _db: apsw.Connection
    _vfs: str | None

    def __init__(self) -> None:
        self.in_doubt = False  # The next write makes the log sound first, which takes a while.
        self._pages = 0  # since the log was last emptied; appends estimate, writes count
        self._written_before = 0
        # Whether SQLite syncs each commit now; None: to be set before the next write.
        self._full: bool | None = None

    @property
    def name(self) -> str:
        """How messages call this store."""
        return ":memory:" if self.location is None else str(self.location.path)

    # --- doubt ----------------------------------------------------------------------------------

    def _doubt_log(self) -> None:
        """A write failed. The next one goes through `_level`, appends included, and heals first."""
        self.in_doubt = self.location is not None
        self._full = None

    def heal_log(self) -> None:
        """Make the log sound again, on this store's own connection."""
        if self.location is not None:
            heal(self._db, self.location, self._vfs)
        self.in_doubt = False

    # --- length ---------------------------------------------------------------------------------

    def _count_pages(self, since: int = 0) -> None:
        """Set how many pages count as written since the log was last emptied."""
        self._written_before = self._written() - since
        self._pages = since

    def _written(self) -> int:
        return self._db.status(apsw.SQLITE_DBSTATUS_CACHE_WRITE)[0]

    def tidy_log(self) -> None:
        """A step has ended: empty the log if it has grown. Never waits for readers or writers."""
        if self._pages >= LOG_TIDY_PAGES:
            self.checkpoint()

    def bound_log(self) -> None:
        """Many pages went by within a step: empty the log only if it has reached the cap."""
        with self.lock:
            self._count_pages(LOG_TIDY_PAGES)
            if self.location is None:
                return
            try:
                pages = self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)[0]
            except apsw.Error:
                return
            if pages < LOG_CAP_PAGES:
                return
            if self.patience.waits:
                self.checkpoint()
            else:
                self.patience.postpone(self.checkpoint)

    def checkpoint(self, mode: int = apsw.SQLITE_CHECKPOINT_PASSIVE) -> bool:
        """Move the log into the database; False if someone is in the way or the disk fails.

        Loses nothing if it fails: the log still has everything.
        """
        if self.location is None:
            return True
        with self.lock:
            self._count_pages()
            for _ in range(2):
                try:
                    if self.in_doubt:
                        self.heal_log()
                    logged, moved = self._db.wal_checkpoint(mode=mode)
                except (apsw.BusyError, apsw.LockedError):
                    return False
                except apsw.Error as error:
                    # What failed may have been the sync of the log itself.
                    log.warning("%s: checkpoint failed: %s", self.name, error)
                    self._doubt_log()
                    continue
                if self.observer is not None:
                    self.observer(StoreEvent("checkpoint", pages=moved))
                return logged == moved
            return False


def heal(db: apsw.Connection, location: Location, vfs: str | None) -> None:
    """Write the whole log again in place and sync it, while nobody else can write.

    The same bytes written again are dirty again, and this sync tells the truth about them.
    """
    if not location.wal.exists():
        return
    if db.in_transaction:
        db.execute("ROLLBACK")
    try:
        db.execute("BEGIN IMMEDIATE")
        _rewrite(location, vfs)
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")


def _rewrite(location: Location, vfs: str | None) -> None:
    flags = [apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_READWRITE, 0]
    file = apsw.VFSFile(vfs or "", str(location.wal), flags)
    try:
        size = file.xFileSize()
        for offset in range(0, size, HEAL_BYTES):
            file.xWrite(file.xRead(min(HEAL_BYTES, size - offset), offset), offset)
        file.xSync(apsw.SQLITE_SYNC_FULL)
    finally:
        file.xClose()
