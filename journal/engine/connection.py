"""Connections: looking at a file before touching it, making a store, and the settings of each.

One small function a setting; its docstring says what goes wrong without it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import apsw

from holdfast.journal.engine import failures, schema
from holdfast.journal.engine.log import heal
from holdfast.journal.errors import (
    HoldfastError,
    InvalidArgument,
    NotAStore,
    StoreBusy,
    StoreCorrupt,
    StoreNotFound,
    StoreNotWritable,
    StoreTooNew,
)
from holdfast.journal.locations import Location, sync_folder
from holdfast.journal.owners import LockFile

BUSY_TIMEOUT_S = 10.0
WAL_KEEP_BYTES = 8 << 20  # A log larger than this is cut back when it starts over.
SQLITE_AT_LEAST = (3, 51, 3)  # Older ones have a race of two connections that corrupts the log.
MAGIC = b"SQLite format 3\0"


def require_sqlite() -> None:
    """Refuse a SQLite whose WAL is known to be unsound."""
    version = tuple(int(part) for part in apsw.sqlite_lib_version().split("."))
    if version < SQLITE_AT_LEAST:
        wanted = ".".join(map(str, SQLITE_AT_LEAST))
        raise HoldfastError(f"SQLite {apsw.sqlite_lib_version()} is too old; need {wanted}")


def require_vfs(vfs: str | None) -> None:
    """Refuse a VFS that nobody has registered: SQLite would say so only halfway through."""
    if vfs is not None and vfs not in apsw.vfs_names():
        known = ", ".join(apsw.vfs_names())
        raise InvalidArgument(f"vfs is {vfs!r}, which is not registered; these are: {known}")


# --- looking ------------------------------------------------------------------------------------


def look(location: Location, *, create: bool, vfs: str | None = None) -> bool:
    """Judge the file by its header without changing a byte; True if there is a store to open.

    Through SQLite's own file layer: closing a plain descriptor of the database would drop the locks
    of every connection that this process has on it.
    """
    try:
        there = location.path.exists()
    except OSError as error:
        raise StoreNotWritable(location.path, f"cannot look at it: {error}") from error
    header = _header(location, vfs) if there else b""
    if not header and there and location.path.stat().st_size:
        header = b"?"  # SQLite takes a file of one byte for an empty one, and would write over it.
    if not header:
        if not create:
            raise StoreNotFound(location.path, "there is no store here; nothing was created")
        return False
    if not any(header) and location.rollback_journal.exists():
        return False  # Power was cut while this store was being made; SQLite rolls that back.
    if header[:16] != MAGIC or len(header) < 100:
        raise NotAStore(
            location.path, "this file is no SQLite database; it was left as it was: check the path"
        )
    found = int.from_bytes(header[68:72], "big")
    if found != schema.APPLICATION_ID:
        raise NotAStore(
            location.path,
            f"a SQLite database of another program (application id {found:#x}, expected"
            f" {schema.APPLICATION_ID:#x}); it was left as it was: check the path",
        )
    refuse_newer(location, int.from_bytes(header[60:64], "big"))
    if max(header[18:20]) > 2:  # SQLite would only say that it may not be written.
        raise StoreCorrupt(
            location.path,
            f"the file is damaged (it claims to need SQLite's file format {max(header[18:20])});"
            " it was not changed: run doctor, then salvage into a new store",
        )
    return True


def refuse_newer(location: Location, version: int) -> None:
    """Raise if a newer Holdfast wrote the file."""
    if version > schema.FORMAT:
        raise StoreTooNew(
            location.path,
            f"format {version}, and this Holdfast reads up to format {schema.FORMAT};"
            " it was left as it was: upgrade holdfast",
        )


def _header(location: Location, vfs: str | None) -> bytes:
    flags = [apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READONLY, 0]
    try:
        file = apsw.VFSFile(vfs or "", str(location.path), flags)
    except (apsw.Error, OSError) as error:
        raise StoreNotWritable(
            location.path, f"cannot be read: {error}; it was left as it was: check its permissions"
        ) from error
    try:
        return file.xRead(min(100, file.xFileSize()), 0)
    except apsw.Error as error:
        raise failures.translate(str(location.path), error, 0) from error
    finally:
        file.xClose()


# --- connecting ---------------------------------------------------------------------------------


def connect(
    location: Location,
    *,
    vfs: str | None,
    create: bool = True,
    read_only: bool = False,
    immutable: bool = False,
) -> apsw.Connection:
    """Open one connection with every setting of ours on it."""
    uri = f"file:{quote(str(location.path))}"
    if read_only:
        uri += "?immutable=1" if immutable else ""
        flags = apsw.SQLITE_OPEN_READONLY
    else:
        # A file that SQLite makes gets the mode of the lock file, which is ours: 0600.
        uri += f"?modeof={quote(str(location.lock))}"
        flags = apsw.SQLITE_OPEN_READWRITE | (apsw.SQLITE_OPEN_CREATE if create else 0)
    db = apsw.Connection(uri, flags=flags | apsw.SQLITE_OPEN_URI, vfs=vfs)
    try:
        leave_log_on_close(db)
        wait_when_busy(db)
        keep_references_sound(db)
        distrust_schema(db)
        if not read_only:
            never_checkpoint_by_itself(db)
            bound_log_file(db)
    except BaseException:
        db.close()
        raise
    return db


def leave_log_on_close(db: apsw.Connection) -> None:
    """Without it a forked child that just exits checkpoints and unlinks its parent's log."""
    db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)


class Patience:
    """Whether whoever calls may wait, for others and for long work; an event loop must not."""

    def __init__(self) -> None:
        self.waits = True
        # Hands work over to somebody who may wait, where the caller may not.
        self.postpone: Callable[[Callable[[], object]], object] = lambda work: work()


def wait_when_busy(db: apsw.Connection) -> Patience:
    """SQLite's own handler backs off up to 100 ms at a time: a short sync elsewhere stalls us."""
    started = 0.0
    patience = Patience()

    def handler(calls: int) -> bool:
        nonlocal started
        if not patience.waits:
            return False
        now = time.monotonic()
        if calls == 0:
            started = now
        if now - started > BUSY_TIMEOUT_S:
            return False
        time.sleep(0.0002 if calls < 20 else 0.002)
        return True

    db.set_busy_handler(handler)
    return patience


def keep_references_sound(db: apsw.Connection) -> None:
    """Without it a deleted session would leave its calls and results behind."""
    db.execute("PRAGMA foreign_keys = ON")


def distrust_schema(db: apsw.Connection) -> None:
    """A damaged or malicious file must not run functions of ours through its schema."""
    db.config(apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0)
    db.config(apsw.SQLITE_DBCONFIG_DQS_DML, 0)
    db.config(apsw.SQLITE_DBCONFIG_DQS_DDL, 0)


def never_checkpoint_by_itself(db: apsw.Connection) -> None:
    """SQLite's automatic checkpoint stalls an append, and swallows its own errors."""
    db.wal_autocheckpoint(0)


def bound_log_file(db: apsw.Connection) -> None:
    """Without it a log that grew while a reader held a snapshot keeps its size for ever."""
    db.execute(f"PRAGMA journal_size_limit = {WAL_KEEP_BYTES}")


# --- making and migrating -----------------------------------------------------------------------


def format_of(db: apsw.Connection) -> int:
    """The format of the open file; 0 while it is being made."""
    version = db.pragma("user_version")
    assert isinstance(version, int)
    return version


def set_up(
    db: apsw.Connection, location: Location, lock_file: LockFile, *, vfs: str | None
) -> None:
    """Make a new store, or bring an older one to this format. The caller holds the setup lock.

    The application id is in the header before there is a log, so that a file of ours can be told
    from a foreign one by 100 bytes.
    """
    version = format_of(db)  # Again: whoever had the lock before us may have done it.
    if version == 0:
        refuse_tables(db, location)
        db.execute("PRAGMA synchronous = FULL")
        db.execute(f"PRAGMA page_size = {schema.PAGE_BYTES}")
        if db.pragma("application_id") != schema.APPLICATION_ID:
            db.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
        use_wal(db, location)
    elif version < schema.FORMAT:
        refuse_while_others_live(db, location, lock_file)
        heal(db, location, vfs)  # Nothing may be built upon a log that a failed sync left in doubt.
        back_up(db, location.backup_of(version))
        db.execute("PRAGMA synchronous = FULL")
    if version < schema.FORMAT:
        db.execute("BEGIN IMMEDIATE")
        try:
            schema.migrate(db, version)
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise


def refuse_tables(db: apsw.Connection, location: Location) -> None:
    """Raise if another program was quicker than we and made a database of its own."""
    if db.execute("SELECT count(*) FROM sqlite_schema").get:
        raise NotAStore(
            location.path, "a SQLite database of another program; it was left as it was"
        )


def use_wal(db: apsw.Connection, location: Location) -> None:
    """Switch to WAL; another connection in the way makes SQLite answer busy without waiting."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        with suppress(apsw.BusyError):
            if db.pragma("journal_mode", "wal") == "wal":
                return
        if time.monotonic() > deadline:
            raise StoreBusy(location.path, "cannot switch to WAL; nothing was changed: try again")
        time.sleep(0.002)


def refuse_while_others_live(db: apsw.Connection, location: Location, lock_file: LockFile) -> None:
    """A migration under a living owner would change the tables under its statements."""
    for owner_id, pid, host in db.execute("SELECT owner_id, pid, host FROM owners"):
        if lock_file.is_alive(owner_id):
            raise StoreBusy(
                location.path,
                f"it must be migrated to format {schema.FORMAT}, and pid {pid} on {host} has it"
                " open; nothing was changed: close it there first",
            )


def back_up(db: apsw.Connection, target: Path, *, owners: bool = True) -> None:
    """Copy the whole database through SQLite, which sees a consistent state, into a new file.

    The name appears when the copy is whole and durable; what stood there before is replaced.
    """
    partial = target.with_name(target.name + ".partial")
    partial.unlink(missing_ok=True)
    # Made by us, with our mode, before SQLite opens it: it cannot be open in this process yet.
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        copy = apsw.Connection(str(partial))
        try:
            with copy.backup("main", db, "main") as backup:
                while not backup.done:
                    backup.step(1000)
            if not owners:
                copy.execute("DELETE FROM owners")
            # One file, not three: whoever copies a backup copies one file.
            copy.pragma("journal_mode", "delete")
        finally:
            copy.close()
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def connect_read_only(location: Location, *, vfs: str | None) -> apsw.Connection:
    """Open for reading; in a folder that cannot be written only a store with an empty log opens."""
    try:
        return _readable(connect(location, vfs=vfs, read_only=True))
    except (apsw.CantOpenError, apsw.ReadOnlyError) as error:
        if location.wal.exists() and location.wal.stat().st_size:
            raise StoreNotWritable(
                location.path,
                "its log is not empty and cannot be read without writing beside it; nothing was"
                " changed: copy the store with its -wal file to a folder you can write",
            ) from error
        return _readable(connect(location, vfs=vfs, read_only=True, immutable=True))


def _readable(db: apsw.Connection) -> apsw.Connection:
    try:
        db.execute("SELECT count(*) FROM sqlite_schema").fetchall()
    except BaseException:
        db.close()
        raise
    return db


def refuse_older(location: Location, version: int) -> None:
    """A file of an older format cannot be read without changing it."""
    if version < schema.FORMAT:
        raise StoreNotWritable(
            location.path,
            f"format {version} must be migrated to format {schema.FORMAT} first; nothing was"
            " changed: open it once without read_only",
        )
