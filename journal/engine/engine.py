"""The engine: one SQLite file and every operation on it, each exactly one transaction.

The list of operations is the list of things that a crash cannot split.  Rows go in and out; the
messages, the policies and the words stand above.  Another engine can take this one's place.
"""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import Self

import apsw

from holdfast.journal import owners
from holdfast.journal.durability import Durability
from holdfast.journal.engine import connection as connections
from holdfast.journal.engine import failures, schema
from holdfast.journal.engine.calls import CallOperations
from holdfast.journal.engine.history import HistoryOperations
from holdfast.journal.engine.leftovers import LeftoverOperations
from holdfast.journal.engine.sessions import SessionOperations
from holdfast.journal.engine.steps import StepOperations
from holdfast.journal.engine.summaries import SummaryOperations
from holdfast.journal.errors import InvalidArgument
from holdfast.journal.locations import (
    Location,
    locate,
    make_folder,
    refuse_network_filesystem,
)
from holdfast.journal.observers import Observer


class SqliteEngine(
    StepOperations,
    LeftoverOperations,
    CallOperations,
    HistoryOperations,
    SummaryOperations,
    SessionOperations,
):
    """One open store. Made by `open` or `open_in_memory`, ended by `close`."""

    _departure: weakref.finalize[..., SqliteEngine] | None = None

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        durability: str | Durability = Durability.BARRIER,
        exclusive: bool = False,
        create: bool = True,
        vfs: str | None = None,
        observer: Observer | None = None,
    ) -> Self:
        """Open or make a store; its owner is registered when this returns."""
        connections.require_sqlite()
        level = Durability.of(durability)
        if exclusive and vfs is not None:
            raise InvalidArgument("exclusive=True chooses its own VFS; give one or the other")
        vfs = "unix-excl" if exclusive else vfs
        connections.require_vfs(vfs)
        location = locate(path)
        make_folder(location, create=create)
        if not exclusive:
            refuse_network_filesystem(location)
        connections.look(location, create=create, vfs=vfs)
        lock_file = owners.enter(location, exclusive=exclusive)
        try:
            db = _open_database(location, lock_file, vfs=vfs)
            engine = cls(
                location, db, durability=level, vfs=vfs, lock_file=lock_file, observer=observer
            )
            try:
                engine._start()
            except BaseException:
                lock_file.release(engine.owner_id)
                engine.close_connections()
                raise
        except BaseException:
            owners.leave(lock_file)
            raise
        engine._depart_with(lock_file)
        return engine

    @classmethod
    def open_read_only(cls, path: str | os.PathLike[str], *, vfs: str | None = None) -> Self:
        """Open a store without changing its database or log, beside a living writer or not."""
        connections.require_sqlite()
        connections.require_vfs(vfs)
        location = locate(path)
        connections.look(location, create=False, vfs=vfs)
        lock_file = owners.enter_to_look(location)
        try:
            try:
                db = connections.connect_read_only(location, vfs=vfs)
            except (apsw.Error, UnicodeDecodeError) as error:
                raise failures.translate(str(location.path), error, 0) from error
            engine = cls(
                location,
                db,
                durability=Durability.PROCESS,
                vfs=vfs,
                lock_file=lock_file,
                read_only=True,
            )
            try:
                version = engine.read(lambda cursor: int(cursor.execute("PRAGMA user_version").get))
                connections.refuse_newer(location, version)
                connections.refuse_older(location, version)
            except BaseException:
                engine.close_connections()
                raise
        except BaseException:
            if lock_file is not None:
                owners.leave(lock_file)
            raise
        if lock_file is not None:
            engine._depart_with(lock_file)
        return engine

    @classmethod
    def open_in_memory(cls) -> Self:
        """A store that ends with the process, for tests of programs that embed a journal."""
        connections.require_sqlite()
        db = apsw.Connection(":memory:")
        connections.keep_references_sound(db)
        db.execute("BEGIN IMMEDIATE")
        schema.migrate(db, 0)
        db.execute("COMMIT")
        engine = cls(None, db, durability=Durability.PROCESS)
        engine.register_owner()
        return engine

    def _start(self) -> None:
        """Make the log sound if somebody died over it, then register."""
        assert self.location is not None
        marked = self.location.failed.exists()
        try:
            if marked or (self._log_bytes() and self._is_unattended()):
                self.heal_log()
        except apsw.Error as error:
            raise self.translate(error) from error
        self.register_owner()
        if marked:
            with suppress(OSError):
                self.location.failed.unlink()

    def _is_unattended(self) -> bool:
        """Whether somebody left without closing: whoever closes last leaves an empty log."""
        alive = [self.is_alive(row.owner_id) for row in self.owners()]
        return not alive or not all(alive)

    def _depart_with(self, lock_file: owners.LockFile) -> None:
        """Let the owner end with this object, closed or not: nobody else can write in its name."""
        self._departure = weakref.finalize(self, _depart, lock_file, self.owner_id)
        self._departure.atexit = False  # The kernel sees to that.

    def _has_company(self) -> bool:
        """Whether another owner lives."""
        return any(
            row.owner_id != self.owner_id and self.is_alive(row.owner_id) for row in self.owners()
        )

    def retire(self) -> None:
        """Leave: unfinished steps of this owner are anybody's to recover from now on."""
        with self.lock:
            if self.refusal is None:
                with suppress(Exception):
                    self.forget_owners([self.owner_id])
                with suppress(Exception):
                    self._db.set_busy_handler(None)  # Leaving waits for nobody.
                    # An empty log tells the next opener that all is well; a log that others
                    # write to would only have to grow again.
                    mode = apsw.SQLITE_CHECKPOINT_TRUNCATE
                    self.checkpoint(apsw.SQLITE_CHECKPOINT_PASSIVE if self._has_company() else mode)
                if self.in_doubt:
                    self._mark_failed()

    def close(self) -> None:
        """Close for good. Idempotent; in a forked child it touches nothing."""
        with self.lock:
            if self.refusal is not None and self.refusal in (self._closed, self._forked):
                return
            if not self.read_only:
                self.retire()
            self.refusal = self._closed
            try:
                self.close_connections()
            finally:
                if self._departure is not None:
                    self._departure()


def _depart(lock_file: owners.LockFile, owner_id: int) -> None:
    lock_file.release(owner_id)
    owners.leave(lock_file)


def _open_database(
    location: Location, lock_file: owners.LockFile, *, vfs: str | None
) -> apsw.Connection:
    try:
        db = connections.connect(location, vfs=vfs)
    except (apsw.Error, UnicodeDecodeError) as error:
        raise failures.translate(str(location.path), error, 0) from error
    try:
        version = connections.format_of(db)
        connections.refuse_newer(location, version)
        if version < schema.FORMAT:
            with owners.setting_up(lock_file):
                connections.set_up(db, location, lock_file, vfs=vfs)
        elif db.pragma("journal_mode") != "wal":
            with owners.setting_up(lock_file):  # A backup is one file, without a log.
                connections.use_wal(db, location)
        return db
    except (apsw.Error, UnicodeDecodeError, OSError) as error:
        system_errno = getattr(error, "errno", None) or db.system_errno
        db.close()
        raise failures.translate(str(location.path), error, system_errno) from error
    except BaseException:
        db.close()
        raise
