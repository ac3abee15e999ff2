"""Owners: who is alive, told by locks that the kernel drops when a process dies.

INVARIANT  An owner lives if and only if its byte in the lock file is locked, or this very process
           has it in its registry.  A stopped process is alive; a killed one is dead at once; a
           reused pid, a forked child or a copied file is nobody.

ON DISK (`<store>-lock`, beside the store)
    byte owner_id      locked by the process that has this owner; nothing is written there
    MODE_BYTE          shared by processes that share the store or read it, else exclusive
    SETUP_BYTE         held while a store is made or migrated
    bytes 0..255       who locked last, as one line of JSON: for messages only

POSIX record locks: a forked child does not inherit them (flock would live on in it), but closing
ANY descriptor of the file drops all of the process's locks.  So what a process opens of the file
stays open until no store of it is left.  The kernel does not show a process its own locks, hence
the registry, which is emptied in a forked child.

A crash leaves the file with no locks on it: nothing to clean.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import struct
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from holdfast.journal.errors import StoreBusy, StoreFull, StoreNotWritable
from holdfast.journal.locations import NO_ROOM, Location

MODE_BYTE = 1 << 61
SETUP_BYTE = MODE_BYTE + 1
NAME_BYTES = 256


@dataclass(frozen=True, slots=True)
class Identity:
    """Which process this is, in words that another machine's log still understands."""

    pid: int
    host: str
    boot: str
    pid_space: str

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


def this_process() -> Identity:
    """Name this process."""
    return Identity(os.getpid(), platform.node() or "localhost", _boot(), _pid_space())


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def _pid_space() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return "unknown"


class LockFile:
    """All that this process holds of one lock file, whichever of its stores asked for it."""

    def __init__(self, path: Path, descriptor: int, *, exclusive: bool, writable: bool) -> None:
        self.path = path
        self.exclusive = exclusive
        self.writable = writable
        self.descriptor = descriptor
        self.owners: set[int] = set()
        self.users = 0
        # The kernel does not keep two threads of one process apart.
        self.setup_lock = threading.Lock()
        self._outgrown: list[int] = []

    def try_hold(self, owner_id: int) -> bool:
        """Lock an owner's byte, before its row can be seen by anyone; False if it is taken."""
        if owner_id in self.owners:
            return False
        try:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, owner_id)
        except OSError:
            return False
        self.owners.add(owner_id)
        name = json.dumps(asdict(this_process()))[: NAME_BYTES - 1] + "\n"
        with suppress(OSError):  # For messages only: a full disk must not keep anyone out.
            os.pwrite(self.descriptor, name.ljust(NAME_BYTES).encode(), 0)
        return True

    def release(self, owner_id: int) -> None:
        """The owner is no more."""
        if owner_id in self.owners:
            self.owners.discard(owner_id)
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1, owner_id)

    def is_alive(self, owner_id: int) -> bool:
        """Whether anybody holds this owner, in this process or another."""
        return owner_id in self.owners or holder_of(self.descriptor, owner_id) is not None

    def last_holder(self) -> Identity | None:
        """Who locked last, for messages."""
        try:
            named = json.loads(os.pread(self.descriptor, NAME_BYTES, 0).decode().strip() or "null")
            return Identity(**named) if named else None
        except (OSError, ValueError, TypeError):
            return None

    def become_writable(self, descriptor: int) -> None:
        """Go on with a descriptor that can lock; the old one stays open, for closing it unlocks."""
        self._outgrown.append(self.descriptor)
        self.descriptor, self.writable = descriptor, True

    def close(self) -> None:
        """Let go of everything. In a forked child this leaves the parent's locks alone."""
        self.owners.clear()
        for descriptor in (self.descriptor, *self._outgrown):
            os.close(descriptor)
        self.descriptor = -1


# Per process: every lock file that it has open, by device and inode. Not by name: a store that was
# deleted and made again under its old name is another store.
_open_files: dict[tuple[int, int], LockFile] = {}
_registry_lock = threading.RLock()


def holder_of(descriptor: int, offset: int) -> int | None:
    """Pid of another process that has a lock on this byte (0 if it cannot be named), or None."""
    # struct flock is no part of Python's fcntl module; its layout is fixed by each system's ABI.
    if sys.platform == "darwin":
        layout, order = "qqihh", (offset, 1, 0, fcntl.F_WRLCK, os.SEEK_SET)
        found = struct.unpack(
            layout, fcntl.fcntl(descriptor, fcntl.F_GETLK, struct.pack(layout, *order))
        )
        kind, pid = found[3], found[2]
    else:
        layout = "hhqqi"
        asked = struct.pack(layout, fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0)
        found = struct.unpack(layout, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
        kind, pid = found[0], found[4]
    return None if kind == fcntl.F_UNLCK else pid


def enter(location: Location, *, exclusive: bool) -> LockFile:
    """Get this process's lock file for a store, in one mode; every `enter` needs its `leave`."""
    with _registry_lock:
        file = _find(location)
        if file is None:
            descriptor = _open(location, os.O_RDWR | os.O_CREAT)
            file = _register(location, descriptor, exclusive=exclusive, writable=True)
        elif not file.writable:
            _refuse_other_mode(location, file, exclusive)
            file.become_writable(_open(location, os.O_RDWR))
        _refuse_other_mode(location, file, exclusive)
        file.users += 1
        return file


def enter_to_look(location: Location) -> LockFile | None:
    """The same for a reader, who creates nothing; None where no lock file can be read."""
    with _registry_lock:
        file = _find(location)
        if file is None:
            try:
                descriptor = _open(location, os.O_RDONLY)
            except StoreNotWritable:
                return None
            file = _register(location, descriptor, exclusive=False, writable=False)
        _refuse_other_mode(location, file, False)
        file.users += 1
        return file


def leave(file: LockFile) -> None:
    """Give it back; the last one closes the descriptor."""
    with _registry_lock:
        key = next((key for key, known in _open_files.items() if known is file), None)
        if key is None:
            return  # Forked: the registry was emptied, and the parent's locks are not ours to drop.
        file.users -= 1
        if file.users == 0:
            del _open_files[key]
            file.close()


def _find(location: Location) -> LockFile | None:
    # By stat, not by opening: closing what we opened to look would drop our own locks.
    try:
        found = location.lock.stat()
    except OSError:
        return None
    return _open_files.get((found.st_dev, found.st_ino))


def _open(location: Location, flags: int) -> int:
    try:
        return os.open(location.lock, flags | os.O_CLOEXEC, 0o600)
    except OSError as error:
        kind = StoreFull if error.errno in NO_ROOM else StoreNotWritable
        raise kind(
            location.path,
            f"cannot open its lock file: {error}; nothing was changed: make room and make the"
            " folder writable, or open with read_only=True",
        ) from error


def _register(location: Location, descriptor: int, *, exclusive: bool, writable: bool) -> LockFile:
    file = LockFile(location.lock, descriptor, exclusive=exclusive, writable=writable)
    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        fcntl.lockf(descriptor, kind | fcntl.LOCK_NB, 1, MODE_BYTE)
    except OSError:
        pid = holder_of(descriptor, MODE_BYTE)
        # The kernel knows best, unless the holder is in another pid namespace.
        holder = f"pid {pid} on {platform.node()}" if pid else str(file.last_holder() or "someone")
        file.close()
        wanted = "exclusive access" if exclusive else "access"
        raise StoreBusy(
            location.path,
            f"{wanted} is not to be had: {holder} has it open"
            f"{'' if exclusive else ' with exclusive=True'}; nothing was changed: close it there",
        ) from None
    found = os.fstat(descriptor)
    _open_files[found.st_dev, found.st_ino] = file
    return file


def _refuse_other_mode(location: Location, file: LockFile, exclusive: bool) -> None:
    if file.exclusive != exclusive:
        mode = "exclusive" if file.exclusive else "shared"
        raise StoreBusy(
            location.path,
            f"this process (pid {os.getpid()}) has it open in {mode} mode, and one process"
            " can have only one mode; nothing was changed: close that store first",
        )


@contextmanager
def setting_up(file: LockFile, timeout_s: float = 60.0) -> Iterator[None]:
    """Be the only one, in all processes, who makes or migrates this store."""
    deadline = time.monotonic() + timeout_s
    if not file.setup_lock.acquire(timeout=timeout_s):
        raise StoreBusy(file.path, "another thread sets the store up; nothing was changed")
    try:
        while True:
            try:
                fcntl.lockf(file.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, SETUP_BYTE)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise StoreBusy(
                        file.path, "another process sets the store up; nothing was changed"
                    ) from None
                time.sleep(0.002)
        try:
            yield
        finally:
            fcntl.lockf(file.descriptor, fcntl.LOCK_UN, 1, SETUP_BYTE)
    finally:
        file.setup_lock.release()


# --- forks --------------------------------------------------------------------------------------


class Forkable(Protocol):
    """What an open store does around a fork of its process."""

    def pause(self) -> bool:
        """Let no thread be in the middle of anything; False if that cannot be had soon."""

    def resume(self) -> None:
        """In the parent: go on."""

    def forked(self, *, paused: bool) -> None:
        """In the child: from now on refuse everything."""


_stores: weakref.WeakSet[Forkable] = weakref.WeakSet()
_paused: list[tuple[Forkable, bool]] = []


def watch_forks(store: Forkable) -> None:
    """Have the store told of every fork of this process."""
    _stores.add(store)


def _before_fork() -> None:
    _registry_lock.acquire()
    _paused[:] = [(store, store.pause()) for store in list(_stores)]


def _after_fork_in_parent() -> None:
    for store, paused in _paused:
        if paused:
            store.resume()
    _paused.clear()
    _registry_lock.release()


def _after_fork_in_child() -> None:
    global _registry_lock
    _registry_lock = threading.RLock()
    for file in _open_files.values():
        file.close()
    _open_files.clear()
    for store, paused in _paused:
        store.forked(paused=paused)
    _paused.clear()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
