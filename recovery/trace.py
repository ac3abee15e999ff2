"""One operation on the disk, as a `FaultDisk` records it, and how it is called in plain words."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["Op", "OpKind", "Role"]

Role = Literal["db", "wal", "journal", "other"]
OpKind = Literal["open", "adopt", "read", "write", "truncate", "sync", "delete", "mark"]

_IN_WORDS: Mapping[str, str] = {
    "db": "the database",
    "wal": "the WAL",
    "journal": "the rollback journal",
    "other": "another file",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation of the trace, or a mark of the workload between two of them."""

    number: int  # 1, 2, 3 ... without a gap
    kind: OpKind
    file: Role | None = None  # None for a mark
    path: str = ""
    inode: int = 0  # which file it was: a name may stand for several, one after the other
    offset: int = 0
    data: bytes = b""  # what was written; of a failed write what got through
    size: int = 0  # bytes asked for; of a truncation the new length
    creates: bool = False  # an open that made the file
    syncs_folder: bool = False  # creations and deletions beside it are durable too
    covers: int = 0  # a sync: the last operation before it began
    loses: bool = False  # a failed sync after which the kernel takes the lost pages for clean
    error: str | None = None  # the injected fault
    label: str = ""  # a mark's kind
    payload: object = None  # a mark's payload

    @property
    def name(self) -> str:
        """The file's name without its folder."""
        return os.path.basename(self.path)  # noqa: PTH119  (hot, and the path is a string)

    @property
    def words(self) -> str:
        """The operation in plain words, as reports print it."""
        if self.kind == "mark":
            return f"{self.number}: mark {self.label} {self.payload!r}"
        target = f"{_IN_WORDS[self.file or 'other']} ({self.name})"
        match self.kind:
            case "open":
                text = f"create {target}" if self.creates else f"open {target}"
            case "adopt":
                text = f"find {target} replaced from outside"
            case "read" | "write":
                text = f"{self.kind} {self.size} bytes at {self.offset} of {target}"
            case "truncate":
                text = f"truncate {target} to {self.size} bytes"
            case "sync" | "delete":
                text = f"{self.kind} {target}" + (" and its folder" if self.syncs_folder else "")
        if self.error is not None:
            text += f": fails ({self.error})" + (" and loses its pages" if self.loses else "")
        return f"{self.number}: {text}"
