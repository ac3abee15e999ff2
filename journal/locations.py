"""Where a store may live: its path, the files beside it, and file systems that cannot hold one."""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.journal.errors import (
    InvalidPath,
    NetworkFilesystem,
    NotAStore,
    StoreFull,
    StoreNotFound,
    StoreNotWritable,
)

# WAL shares memory between the processes that use a file; over these, processes on two machines
# would each see a memory of their own and overwrite each other.
NETWORK_TYPES = frozenset(
    "nfs nfs4 cifs smb3 smbfs 9p afs ceph glusterfs lustre gfs2 ocfs2 beegfs gpfs pvfs2 ncpfs "
    "coda davfs vboxsf prl_fs fuse.sshfs fuse.glusterfs fuse.ceph fuse.s3fs fuse.gcsfuse "
    "fuse.rclone fuse.davfs fuse.juicefs fuse.vmhgfs-fuse virtiofs".split()
)
MOUNTS = Path("/proc/self/mountinfo")
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# SQLite's unix layer takes 512 bytes, and the names of the files beside a store must fit as well.
PATH_BYTES_MAX = 480


@dataclass(frozen=True, slots=True)
class Location:
    """One store on disk. Links are resolved, so that two names of a file share one lock file."""

    path: Path

    @property
    def wal(self) -> Path:
        """SQLite's write-ahead log."""
        return self._beside("-wal")

    @property
    def shm(self) -> Path:
        """SQLite's shared memory."""
        return self._beside("-shm")

    @property
    def rollback_journal(self) -> Path:
        """SQLite's rollback journal: there only while a store is being made."""
        return self._beside("-journal")

    @property
    def lock(self) -> Path:
        """The lock file: a byte range a living owner."""
        return self._beside("-lock")

    @property
    def failed(self) -> Path:
        """The mark that syncs failed here; it is gone once an open has made the log sound."""
        return self._beside("-failed")

    def backup_of(self, version: int) -> Path:
        """Where a migration keeps the file as it was."""
        return self._beside(f"-format{version}-backup")

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)


def locate(path: str | os.PathLike[str]) -> Location:
    """Read a path as users type it; refuse what cannot name a file."""
    text = os.fspath(path)
    if not isinstance(text, str):
        raise InvalidPath(repr(text), "the path is bytes; give a str or a Path")
    if not text or "\0" in text:
        raise InvalidPath(repr(text), "the path is empty or has a NUL; give the path of a file")
    if text == ":memory:" or text.startswith("file:"):
        raise InvalidPath(
            text,
            "a store is a file that outlives its process; give a plain path"
            " (a journal alone can be had with open_in_memory)",
        )
    with suppress(RuntimeError):  # No such user: then it is a name that begins with a tilde.
        text = str(Path(text).expanduser())
    try:
        # POSIX lets a path begin with two slashes, which a URI would read as a host.
        resolved = Path("/" + os.path.realpath(text).lstrip("/"))
        length = len(str(resolved).encode())
    except UnicodeEncodeError:
        raise InvalidPath(repr(text), "the path is no UTF-8; give one that is") from None
    if length > PATH_BYTES_MAX:
        raise InvalidPath(
            resolved, f"the path has {length} bytes, and SQLite takes some {PATH_BYTES_MAX}"
        )
    try:
        mode = resolved.stat().st_mode
    except OSError:
        return Location(resolved)  # Not there, or not to be seen: opening it will say.
    if stat.S_ISDIR(mode):
        raise NotAStore(resolved, "this is a folder; give the path of a file in it")
    if not stat.S_ISREG(mode):
        raise NotAStore(resolved, "this is no regular file; give the path of one")
    return Location(resolved)


def make_folder(location: Location, *, create: bool) -> None:
    """See that the folder is there: made with 0700, and durable before anything is put into it."""
    folder = location.path.parent
    made: list[Path] = []
    try:
        if folder.is_dir():
            return
        if not create:
            raise StoreNotFound(location.path, "no such folder; nothing was created")
        while not folder.exists():
            made.append(folder)
            folder = folder.parent
        for missing in reversed(made):
            missing.mkdir(mode=0o700, exist_ok=True)
            sync_folder(missing.parent)
    except OSError as error:
        kind = StoreFull if error.errno in NO_ROOM else StoreNotWritable
        raise kind(
            location.path, f"cannot make its folder: {error}; no store was made: check the path"
        ) from error


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refuse_network_filesystem(location: Location, mounts: Path | None = None) -> None:
    """Raise if the store would lie on a file system where WAL does not hold."""
    kind = filesystem_type(location.path.parent, mounts)
    if kind in NETWORK_TYPES:
        raise NetworkFilesystem(
            location.path,
            f"the file system is {kind}, where SQLite's WAL cannot be shared; nothing was created:"
            " use a local disk, or exclusive=True if one process alone will ever open it",
        )


def filesystem_type(folder: Path, mounts: Path | None = None) -> str | None:
    """Type of the file system that holds `folder`, or None where the system does not tell."""
    try:
        table = (mounts or MOUNTS).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    target = os.path.realpath(folder)
    best, found = -1, None
    for line in table.splitlines():
        head, _, tail = line.partition(" - ")
        fields, kind = head.split(" "), tail.split(" ")[0]
        if len(fields) < 5 or not kind:
            continue
        point = _unescape(fields[4])
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        # The longest mount point wins; of two at one point the later one covers the earlier.
        if inside and len(point) >= best:
            best, found = len(point), kind
    return found


def _unescape(text: str) -> str:
    """The kernel writes blanks and backslashes of a mount point in octal."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), text)
