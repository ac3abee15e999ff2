"""The engine's ground: one writing connection, one transaction at a time, and what a failure means.

INVARIANT  Every operation is exactly one transaction.  When it returns, it is on record at the
           level asked for; when it raises an error of ours, it is not visible to anyone, except
           for StoreFailed, where nobody can tell and every later write is refused.

A commit that failed is unknown, not undone: the frames may stand in the log, and a process that
dies now would find them there.  So after an error we look (was it rolled back?) before we write
again.  An exception that a signal handler raises may come before a commit or behind it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import apsw

from holdfast.journal import owners
from holdfast.journal.durability import Durability
from holdfast.journal.engine import connection as connections
from holdfast.journal.engine import failures
from holdfast.journal.engine.log import LOG_LOOK_PAGES, Log, log
from holdfast.journal.errors import (
    ForkedStore,
    HoldfastError,
    ReadOnlyStore,
    StoreClosed,
    StoreFailed,
)
from holdfast.journal.locations import Location, sync_folder
from holdfast.journal.observers import Observer, StoreEvent

T = TypeVar("T")

PAUSE_S = 1.0  # How long a fork waits for the other threads to finish their transactions.


def undo_interrupted(db: apsw.Connection) -> None:
    """End a transaction whose own end was cut short by a signal handler that raised."""
    if db.in_transaction:
        db.execute("ROLLBACK")


class _Rollbacks:
    """Counts rollbacks. An object of its own: a hook must not keep its engine alive."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


class Core(Log):
    """Connections, transactions, levels and errors."""

    def __init__(
        self,
        location: Location | None,
        db: apsw.Connection,
        *,
        durability: Durability,
        vfs: str | None = None,
        lock_file: owners.LockFile | None = None,
        read_only: bool = False,
        observer: Observer | None = None,
    ) -> None:
        super().__init__()
        self.location = location
        self.durability = durability
        self.read_only = read_only
        self.owner_id = 0
        self.observer = observer
        # Why nothing may be written any more; None while all is well. One test on the hot path.
        self.refusal: Callable[[], HoldfastError] | None = self._read_only if read_only else None
        self.patience = connections.wait_when_busy(db)
        self._db = db
        self._vfs = vfs
        self._lock_file = lock_file
        self._execute = db.cursor().execute
        self._deltas_full = durability.deltas_sync
        self._rollbacks = _Rollbacks()
        self._reader: apsw.Connection | None = None
        self._make_locks()
        db.set_rollback_hook(self._rollbacks)
        owners.watch_forks(self)

    def _make_locks(self) -> None:
        self.lock = threading.RLock()
        # A reader of its own is never held up by a writer; one connection has one lock.
        alone = self.location is None or self.read_only
        self._reader_lock = self.lock if alone else threading.RLock()

    # --- transactions ---------------------------------------------------------------------------

    def write(self, work: Callable[[apsw.Cursor], T], *, barrier: bool = True) -> T:
        """Run `work` in one transaction, durable on return at the level of a barrier or a delta.

        `work` may run twice.  Whatever it raises undoes the transaction.
        """
        with self.lock:
            self.admit()
            full = self.durability.barriers_sync if barrier else self._deltas_full
            self._level(full)
            try:
                result = self._transact(work)
            except apsw.Error as error:
                self._prepare_retry(error)
                self._level(full)
                try:
                    result = self._transact(work)
                except apsw.Error as again:
                    raise self._give_up(again) from again
            except UnicodeDecodeError as error:
                raise self.translate(error) from error
            self._pages = self._written() - self._written_before
            if self._pages > LOG_LOOK_PAGES:
                self.bound_log()
            if full and self.observer is not None:
                self.observer(StoreEvent("sync"))
            return result

    def _transact(self, work: Callable[[apsw.Cursor], T]) -> T:
        cursor = self._db.cursor()
        rollbacks = self._rollbacks.count
        # Unknown until this has ended: a signal handler may raise anywhere, also in the ROLLBACK
        # below, and then `_level` cleans up before anything else is written.
        level, self._full = self._full, None
        try:
            cursor.execute("BEGIN IMMEDIATE")  # Take the write lock now, not midway.
            result = work(cursor)
            try:
                cursor.execute("COMMIT")
            except apsw.Error:
                # Look: an error that SQLite itself got over leaves the commit standing.
                if self._db.in_transaction or self._rollbacks.count != rollbacks:
                    raise
                self._doubt_log()
            else:
                self._full = level
            return result
        except BaseException:
            if self._db.in_transaction:
                with suppress(apsw.Error):
                    cursor.execute("ROLLBACK")
            raise

    def read(self, work: Callable[[apsw.Cursor], T]) -> T:
        """Run `work` on a snapshot that no writer can hold up."""
        with self._reader_lock:
            if self.refusal not in (None, self._failed, self._read_only):
                self.admit()
            try:
                db = self._reading()
                undo_interrupted(db)
                cursor = db.cursor()
                try:
                    cursor.execute("BEGIN")
                    return work(cursor)
                finally:
                    cursor.close()
                    if db.in_transaction:
                        with suppress(apsw.Error):
                            db.execute("ROLLBACK")
            except (apsw.Error, UnicodeDecodeError) as error:
                raise self.translate(error) from error

    def _reading(self) -> apsw.Connection:
        if self.location is None or self.read_only:
            return self._db
        if self._reader is None:
            reader = connections.connect(self.location, vfs=self._vfs, create=False)
            reader.execute("PRAGMA query_only = ON")
            self._reader = reader
        return self._reader

    def _level(self, full: bool) -> None:
        """Make sure that the log can be built upon, and that commits sync as they should."""
        try:
            if self._full is None:
                undo_interrupted(self._db)
            if self.in_doubt:
                self.heal_log()
            if self._full is not full:
                self._full = None  # Unknown, should a signal handler raise behind the next line.
                self._db.execute(f"PRAGMA synchronous = {'FULL' if full else 'NORMAL'}")
                self._full = full
        except apsw.Error as error:
            raise self._give_up(error) from error

    # --- admission ------------------------------------------------------------------------------

    def admit(self) -> None:
        """Raise if nothing may be written here."""
        if self.refusal is not None:
            raise self.refusal()

    def _read_only(self) -> HoldfastError:
        return ReadOnlyStore(
            self.name, "opened with read_only=True; nothing was written: open it without"
        )

    def _closed(self) -> HoldfastError:
        return StoreClosed(
            self.name, "the store was closed; nothing was written: open it again to go on"
        )

    def _forked(self) -> HoldfastError:
        return ForkedStore(
            self.name,
            f"opened in the parent of process {os.getpid()}; nothing was touched:"
            " open the store in this process, after the fork",
        )

    def _failed(self) -> HoldfastError:
        return StoreFailed(
            self.name,
            "its disk fails to write or sync; the call that saw it first may or may not be on"
            " record, and nothing is written since: run no tool, see to the disk, then reopen",
        )

    # --- forks ----------------------------------------------------------------------------------

    def pause(self) -> bool:
        """Before a fork: let no thread be inside SQLite. False if one does not come out soon."""
        if not self.lock.acquire(timeout=PAUSE_S):
            return False
        if not self._reader_lock.acquire(timeout=PAUSE_S):
            self.lock.release()
            return False
        return True

    def resume(self) -> None:
        """Behind a fork, in the parent: go on."""
        self._reader_lock.release()
        self.lock.release()

    def forked(self, *, paused: bool) -> None:
        """Behind a fork, in the child: from now on every use raises, and close does nothing.

        SQLite still believes that this process holds the parent's locks and shares its memory of
        the log.  A store that the child opens would build on that, so it must go first.  Closing
        here drops nothing of the parent's and writes nothing.  It is left undone where a thread
        of the parent was in the middle of something: undoing that would reach into shared memory.
        """
        if self.refusal != self._closed:
            self.refusal = self._forked
        self._make_locks()
        open_ones = [db for db in (self._reader, self._db) if db is not None]
        with suppress(apsw.Error):
            if paused and not any(db.in_transaction for db in open_ones):
                for db in open_ones:
                    db.close()

    # --- errors ---------------------------------------------------------------------------------

    def translate(self, error: BaseException) -> HoldfastError:
        """Turn what SQLite says into what a user can act on."""
        return failures.translate(self.name, error, self._db.system_errno)

    def _prepare_retry(self, error: apsw.Error) -> None:
        """After a failed write: raise what cannot be helped by one more try."""
        if not isinstance(error, apsw.IOError | apsw.FullError):
            raise self.translate(error) from error
        self._doubt_log()
        if failures.is_no_room(error, self._db.system_errno):
            raise self.translate(error) from error
        log.warning("%s: a write failed (%s); trying once more", self.name, error)

    def _give_up(self, error: apsw.Error) -> HoldfastError:
        """The second failure in a row. A disk that fails to write or sync latches the store."""
        if not isinstance(error, apsw.IOError | apsw.FullError):
            return self.translate(error)
        self._doubt_log()
        if failures.is_no_room(error, self._db.system_errno) or failures.is_read_failure(error):
            return self.translate(error)
        self.refusal = self._failed
        self._mark_failed()
        log.error("%s: writes and syncs fail (%s); the store refuses to write", self.name, error)
        return self._failed()

    def _mark_failed(self) -> None:
        """Tell the next opener that the log is in doubt."""
        if self.location is None:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with suppress(OSError):  # The disk may refuse this too; a dead owner's row says the same.
            descriptor = os.open(self.location.failed, flags, 0o600)
            try:
                os.write(descriptor, f"syncs failed at {time.time():.0f}\n".encode())
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            sync_folder(self.location.path.parent)

    # --- the end --------------------------------------------------------------------------------

    def close_connections(self) -> None:
        """Close what is open."""
        with self._reader_lock:
            if self._reader is not None:
                self._reader.close()
                self._reader = None
            self._db.close()


__all__ = ["Core", "undo_interrupted"]
