"""A disk that fails and forgets on demand: a SQLite VFS for proofs.

INVARIANT  Every change that SQLite makes to a database, its WAL and its rollback journal through
           this VFS is one numbered operation; from the operations alone each crash image follows.

    with FaultDisk(seed=7) as disk:
        store = holdfast.open(path, vfs=disk.name)
        ...
        disk.mark("ack", 1)                            # the workload was told: it is on record
    for at in range(len(disk.ops) + 1):
        for keep in disk.strategies(at):
            disk.image(at, folder, loss="power", keep=keep)     # open it, hold it to the promise

Files lie on the real file system, where the running process reads them; the real disk is never
synced, for what survives a power loss is worked out from the trace (`holdfast.recovery.images`).
Folders are synced as SQLite's unix VFS does it: with the first sync of a WAL or journal that was
opened to be created, and with a deletion that asks for it.  Files that are there when the disk
first opens them count as durable.

NOT MODELLED
    -shm            the shared memory passes by in C; an image has none, as after a reboot
    mmap            stays off on this VFS
    other writers   other processes, a forked child, other VFSes, plain file calls: lock files,
                    renames, and fsync of a folder by hand are not seen
    bit rot         bytes change only because SQLite wrote them; a sector is whole or untouched
    lost syncs      a sync that reports success is believed, except for pages that an earlier
                    failed sync has lost
    file systems    any pending subset may survive; ext4 or APFS would rule some out.  Growth is
                    what was written: no preallocation (SQLITE_FCNTL_CHUNK_SIZE), no stale blocks
    temporary files they are not recorded and not in an image
"""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import apsw

from holdfast.recovery.images import Keep, Loss, Replay, Snapshot
from holdfast.recovery.injection import ErrorName, Fault, FaultKind, Injector
from holdfast.recovery.trace import Op, OpKind, Role

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from holdfast.recovery.explore import ExplorationReport, Violation, check_promises, explore

__all__ = [
    "ErrorName",
    "ExplorationReport",
    "Fault",
    "FaultDisk",
    "FaultKind",
    "Op",
    "Snapshot",
    "Violation",
    "check_promises",
    "explore",
]

_JOURNALS = apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL | apsw.SQLITE_OPEN_SUPER_JOURNAL
_TEMPORARY = (
    apsw.SQLITE_OPEN_TEMP_DB
    | apsw.SQLITE_OPEN_TEMP_JOURNAL
    | apsw.SQLITE_OPEN_TRANSIENT_DB
    | apsw.SQLITE_OPEN_SUBJOURNAL
    | apsw.SQLITE_OPEN_DELETEONCLOSE
)

_EXPLORATION = ("ExplorationReport", "Violation", "check_promises", "explore")


def __getattr__(name: str) -> Any:
    # What stands upon this disk is found here, too, and is loaded only when it is asked for.
    if name in _EXPLORATION:
        return getattr(importlib.import_module("holdfast.recovery.explore"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_serial = itertools.count(1)


class FaultDisk:
    """A SQLite VFS, registered as `name`, that records, fails on demand and forgets.

    Connections of several threads may use it at once.  After `close` the name is gone; the trace
    and its images stay.  `sync_delay` is slept in each sync, in seconds.  `die_at` kills this very
    process (SIGKILL) directly after the operation of that number: the live counterpart of an image.
    """

    def __init__(self, seed: int = 0, base: str | None = None) -> None:
        self.seed = seed
        self.base = base or ""
        self.name = f"holdfast-faults-{os.getpid()}-{next(_serial)}"
        self.sync_delay = 0.0
        self.die_at: int | None = None
        self._ops: list[Op] = []
        self._initial: dict[str, tuple[int, bytes]] = {}
        self._seen: dict[str, str] = {}  # every path there ever was, and its name in an image
        self._replay = Replay(self._ops, self._initial, self._seen, seed=seed)
        self._injector = Injector()
        self._lock = threading.RLock()
        self._databases: dict[str, None] = {}  # in the order of their first opening
        self._inodes = itertools.count(1)
        # What each name stands for now: our number, and the file system's to notice replacement.
        self._names: dict[str, tuple[int, int]] = {}
        self._vfs = _Vfs(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unregister the VFS. Open connections go on; may be called again."""
        self._vfs.unregister()

    @property
    def ops(self) -> Sequence[Op]:
        """The operations and marks so far; `ops[k - 1]` has number k. Read only, grows."""
        return self._ops

    @property
    def database(self) -> Path:
        """The first database that was opened on this disk."""
        if not self._databases:
            raise ValueError("no database was opened on this disk")
        return Path(next(iter(self._databases)))

    def count(self, kind: FaultKind, file: Role | None = None) -> int:
        """How many operations of a kind were tried, on one kind of file or on all."""
        return self._injector.count(kind, file)

    def mark(self, kind: str, payload: object = None) -> int:
        """Put a mark into the sequence and return its number."""
        return self._record(kind="mark", label=kind, payload=payload)

    def fail(
        self,
        kind: FaultKind,
        nth: int = 1,
        error: ErrorName = "eio",
        times: int | None = 1,
        lose_pages: bool = False,
        *,
        file: Role | None = None,
    ) -> Fault:
        """Let the nth operation of a kind from now on fail, `times` in a row (None: for ever).

        "short": a write stops halfway, a read finds half.  `lose_pages` (a sync): what was to be
        synced is gone at power loss, and later syncs do not bring it back; only what is written
        again becomes durable.  `file` counts, and fails, operations on that kind of file only.
        """
        fault = Fault(kind, error, file, nth - 1, times, lose_pages)
        self._injector.add(fault)
        return fault

    def clear_faults(self) -> None:
        """Take back every fault: from now on all operations succeed."""
        self._injector.clear()

    def strategies(self, at: int, *, randoms: int = 2, limit: int | None = None) -> list[Keep]:
        """The values of `keep` worth trying after operation `at`; at most `limit` drops and keeps.

        Numbers are left out: the first n at `at` are all of an earlier operation.
        """
        with self._lock:
            return self._replay.strategies(at, randoms=randoms, limit=limit)

    def snapshot(self, at: int, loss: Loss = "kill", keep: Keep = "none") -> Snapshot:
        """What `image` would write, in memory and with its digest. Quick when `at` rises."""
        with self._lock:
            return self._replay.snapshot(at, loss, keep)

    def image(
        self, at: int, into: str | os.PathLike[str], loss: Loss = "kill", keep: Keep = "none"
    ) -> Path:
        """Write the files as they are found after a crash directly after operation `at`.

        Returns the database's path in the folder `into`: no file is there if the crash undid its
        creation.  An older image in that folder is replaced, files of other names stay.
        """
        folder, database = Path(into).resolve(), self.database
        if folder == database.parent:
            raise ValueError(f"{folder}: the image would overwrite the files it is made from")
        found = self.snapshot(at, loss, keep)
        with self._lock:
            known = list(self._seen.values())
        for name in known:
            for stale in (folder / name, folder / f"{name}-shm"):
                stale.unlink(missing_ok=True)
        found.write(folder)
        return folder / database.name

    # -- for the VFS

    def _record(self, *, kind: OpKind, **fields: Any) -> int:
        with self._lock:
            number = len(self._ops) + 1
            self._ops.append(Op(number=number, kind=kind, **fields))
            if number == self.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return number

    def _open(self, path: str, name: str | apsw.URIFilename, flags: list[int]) -> _File:
        with self._lock:
            if flags[0] & apsw.SQLITE_OPEN_MAIN_DB:
                self._databases.setdefault(path)
            file = self._role(path)
            fault = self._injector.strike("open", file)
            if fault is not None:
                if file == "db" and path not in self._names:
                    # Nobody has it open through this disk, and no later opening may ever come.
                    for there in (path, path + "-wal", path + "-journal"):
                        self._adopt(there)
                self._record(kind="open", file=file, path=path, error=fault.error)
                raise fault.exception()
            existed = Path(path).exists()
            if file == "db":
                self._adopt(path + "-wal")
                self._adopt(path + "-journal")
            opened = _File(self, path, file, name, flags)
            self._enter(opened, existed)
            return opened

    def _enter(self, opened: _File, existed: bool) -> None:
        """Find out which inode was opened, and record the opening."""
        path, file = opened.path, opened.file
        if not existed:
            if path in self._names:  # gone without us
                self._record(kind="delete", file=file, path=path)
            opened.inode = next(self._inodes)
        else:
            opened.inode = self._adopt(path, opened)
        self._names[path] = (opened.inode, os.stat(path).st_ino)  # noqa: PTH116
        self._name(path)
        self._record(kind="open", file=file, path=path, inode=opened.inode, creates=not existed)

    def _adopt(self, path: str, opened: _File | None = None) -> int:
        """Take in a file that is there and that this disk has not made: it counts as durable."""
        try:
            place = os.stat(path).st_ino  # noqa: PTH116
        except FileNotFoundError:
            return 0
        if path in self._names and self._names[path][1] == place:
            return self._names[path][0]
        # A database is read through the handle that SQLite got: closing a descriptor of our own
        # would drop the locks of the whole process.  On a WAL or journal nobody holds a lock.
        content = Path(path).read_bytes() if opened is None else opened.read_whole()
        number = next(self._inodes)
        if path in self._seen:
            self._record(kind="adopt", file=self._role(path), path=path, inode=number, data=content)
        else:
            self._initial[path] = (number, content)
        self._names[path] = (number, place)
        self._name(path)
        return number

    def _delete(self, path: str, sync_folder: bool, delete: Any) -> None:
        file = self._role(path)
        with self._lock:
            fault = self._injector.strike("delete", file)
            if fault is not None:
                self._record(kind="delete", file=file, path=path, error=fault.error)
                raise fault.exception()
            number = self._adopt(path)
            delete()
            self._names.pop(path, None)
            self._record(
                kind="delete", file=file, path=path, inode=number, syncs_folder=sync_folder
            )

    def _name(self, path: str) -> None:
        folder = os.path.dirname(next(iter(self._databases), path))  # noqa: PTH120
        short = os.path.relpath(path, folder)
        outside = short.startswith("..")
        self._seen[path] = os.path.basename(path) if outside else short  # noqa: PTH119

    def _role(self, path: str) -> Role:
        if path in self._databases:
            return "db"
        if path.endswith("-wal"):
            return "wal"
        return "journal" if path.endswith("-journal") else "other"


class _Vfs(apsw.VFS):
    def __init__(self, disk: FaultDisk) -> None:
        self._disk = disk
        super().__init__(disk.name, disk.base)

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        if name is None or flags[0] & _TEMPORARY:
            return super().xOpen(name, flags)
        path = name if isinstance(name, str) else name.filename()
        return self._disk._open(os.path.abspath(path), name, flags)  # noqa: PTH100

    def xDelete(self, filename: str, syncdir: bool) -> None:
        path = os.path.abspath(filename)  # noqa: PTH100
        # The real folder is not synced: see the module's docstring.
        self._disk._delete(path, syncdir, lambda: super(_Vfs, self).xDelete(filename, False))

    def xGetLastError(self) -> tuple[int, str | None]:
        code = self._disk._injector.take_errno()
        return (code, os.strerror(code)) if code else super().xGetLastError()


class _File(apsw.VFSFile):
    inode = 0

    def __init__(
        self,
        disk: FaultDisk,
        path: str,
        file: Role,
        name: str | apsw.URIFilename,
        flags: list[int],
    ) -> None:
        self._disk, self.path, self.file = disk, path, file
        asked = flags[0]
        self._folder_unsynced = bool(asked & apsw.SQLITE_OPEN_CREATE and asked & _JOURNALS)
        super().__init__(disk.base, name, flags)

    def read_whole(self) -> bytes:
        size = os.stat(self.path).st_size  # noqa: PTH116
        return super().xRead(size, 0) if size else b""

    def xRead(self, amount: int, offset: int) -> bytes:
        fault = self._disk._injector.strike("read", self.file)
        if fault is None:
            return super().xRead(amount, offset)
        self._note("read", offset=offset, size=amount, error=fault.error)
        if fault.error != "short":
            raise fault.exception()
        # APSW fills up with zeros and reports the short read, as the unix VFS does.
        return super().xRead(amount, offset)[: amount // 2]

    def xWrite(self, data: Buffer, offset: int) -> None:
        fault = self._disk._injector.strike("write", self.file)
        whole = bytes(data)
        through = whole
        if fault is not None:
            through = whole[: len(whole) // 2] if fault.error == "short" else b""
        if through:
            super().xWrite(through, offset)
        error = None if fault is None else fault.error
        self._note("write", offset=offset, data=through, size=len(whole), error=error)
        if fault is not None:
            raise fault.exception()

    def xTruncate(self, newsize: int) -> None:
        fault = self._disk._injector.strike("truncate", self.file)
        if fault is None:
            super().xTruncate(newsize)
        self._note("truncate", size=newsize, error=None if fault is None else fault.error)
        if fault is not None:
            raise fault.exception()

    def xSync(self, flags: int) -> None:
        fault = self._disk._injector.strike("sync", self.file)
        # What another thread writes while we sync is not covered by it.
        covers = len(self._disk._ops)
        if self._disk.sync_delay:
            time.sleep(self._disk.sync_delay)
        if fault is not None:
            self._note("sync", covers=covers, error=fault.error, loses=fault.lose_pages)
            raise fault.exception()
        folder, self._folder_unsynced = self._folder_unsynced, False
        self._note("sync", covers=covers, syncs_folder=folder)

    def _note(self, kind: OpKind, **fields: Any) -> None:
        self._disk._record(kind=kind, file=self.file, path=self.path, inode=self.inode, **fields)
