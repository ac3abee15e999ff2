"""What a crash leaves behind: the files after any operation of a recorded trace.

INVARIANT  The same trace, seed, operation, loss and strategy give the same bytes.

A trace is the list of operations that one `FaultDisk` recorded.  From it every crash image is
derived offline, in memory; nothing is run a second time.

    kill    the process died: the kernel still has every byte that was written
    power   the power went: a write, truncation, creation or deletion is certain to survive if and
            only if a sync of its file (for creation and deletion: of its folder) began after it
            and succeeded; of all others, called *pending*, any subset may survive

A pending operation survives by the strategy `keep`:

    "none" "all"    nothing, everything
    3               the first three
    "drop:17"       all but operation 17            "keep:17"   operation 17 alone
    "torn"          all, but the last write only in some of its 512-byte sectors
    "torn:17"       the same for operation 17
    "random"        a subset by the seed, some writes torn; "random:1", "random:2" ... are others

Operations that survive are applied in the order in which they were made, so that a later one can
stand where an earlier one is missing.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from holdfast.recovery.trace import Op

__all__ = ["Keep", "Loss", "Replay", "Snapshot"]

SECTOR_BYTES = 512

Loss = Literal["kill", "power"]
Keep = str | int

# The pending operations that survive, by number; torn ones with their sectors.
_Chosen = dict[int, list[tuple[int, int]] | None]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The files of one crash image, in memory. Equal digests mean equal files."""

    files: Mapping[str, bytes]
    digest: str

    def write(self, into: Path) -> None:
        """Write the files into the folder `into`, which is made if it is missing."""
        into.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            target = into / name
            if "/" in name:
                target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


@dataclass(slots=True)
class _Content:
    """Bytes that change, with their frozen copy and hash kept until the next change."""

    data: bytearray = field(default_factory=bytearray)
    _frozen: tuple[bytes, bytes] | None = None

    def apply(self, op: Op, sectors: Iterable[tuple[int, int]] | None = None) -> None:
        self._frozen = None
        if op.kind == "truncate":
            del self.data[op.size :]
            self._grow(op.size)
        elif sectors is None:
            self._put(op.offset, op.data)
        else:
            for start, stop in sectors:
                self._put(start, op.data[start - op.offset : stop - op.offset])

    def frozen(self) -> tuple[bytes, bytes]:
        if self._frozen is None:
            content = bytes(self.data)
            self._frozen = (content, hashlib.sha256(content).digest())
        return self._frozen

    def _put(self, offset: int, piece: bytes) -> None:
        if piece:
            self._grow(offset)
            self.data[offset : offset + len(piece)] = piece

    def _grow(self, size: int) -> None:
        if len(self.data) < size:
            self.data.extend(bytes(size - len(self.data)))


@dataclass(slots=True)
class _Inode:
    live: _Content = field(default_factory=_Content)  # what a reader sees
    durable: _Content = field(default_factory=_Content)  # what a sync has made certain
    pending: list[Op] = field(default_factory=list)  # writes and truncations since
    lossy: bool = False  # durable plus pending is no longer live: a sync lost pages


class Replay:
    """Walks along a trace and answers what a crash at its place would leave.

    Going forward costs each operation once, however many images are asked for on the way.
    Going back starts again at the beginning.  `initial` holds the files that were there before
    (by path: inode, content), `names` what each path is called in an image.  All three may grow.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        initial: Mapping[str, tuple[int, bytes]],
        names: Mapping[str, str],
        *,
        seed: int,
    ) -> None:
        self._ops, self._initial, self._names, self._seed = ops, initial, names, seed
        self._restart()

    def _restart(self) -> None:
        self._at = 0
        self._inodes: dict[int, _Inode] = {}
        self._live_names: dict[str, int] = {}
        self._durable_names: dict[str, int] = {}
        self._pending_names: dict[str, list[Op]] = {}  # by folder
        self._adopted = 0
        self._adopt_initial()

    def strategies(self, at: int, *, randoms: int, limit: int | None) -> list[Keep]:
        """Every strategy that can give an image of its own for a power loss after `at`."""
        self._go(at)
        pending = self._pending()
        if not pending:
            return ["none"]
        found: list[Keep] = ["none", "all"]
        if any(op.kind == "write" for op in pending):
            found.append("torn")
        if len(pending) > 1:
            found += [f"random:{index}" for index in range(randoms)]
            single: list[Keep] = [
                f"{way}:{op.number}" for way in ("drop", "keep") for op in pending
            ]
            if limit is not None and len(single) > limit:
                single = random.Random(f"{self._seed}:{at}:sample").sample(single, limit)
            found += single
        return found

    def snapshot(self, at: int, loss: Loss, keep: Keep) -> Snapshot:
        """The files after operation `at`; see the module's docstring."""
        self._go(at)
        if loss == "kill":
            return self._pack({p: self._inodes[n].live for p, n in self._live_names.items()})
        if loss != "power":
            raise ValueError(f'loss is {loss!r}, expected "kill" or "power"')
        return self._surviving(self._chosen(at, keep))

    # -- along the trace

    def _go(self, at: int) -> None:
        if not 0 <= at <= len(self._ops):
            raise ValueError(f"operation is {at}, expected 0 to {len(self._ops)}")
        if at < self._at:
            self._restart()
        self._adopt_initial()
        while self._at < at:
            self._step(self._ops[self._at])
            self._at += 1

    def _adopt_initial(self) -> None:
        # A file that was there before its first use was there, and durable, from the beginning.
        if self._adopted < len(self._initial):
            for path, (number, content) in list(self._initial.items())[self._adopted :]:
                self._adopt(path, number, content)
            self._adopted = len(self._initial)

    def _adopt(self, path: str, number: int, content: bytes) -> None:
        self._inodes[number] = _Inode(
            live=_Content(bytearray(content)), durable=_Content(bytearray(content))
        )
        self._live_names[path] = self._durable_names[path] = number

    def _step(self, op: Op) -> None:
        match op.kind:
            case "open" if op.creates:
                self._inodes[op.inode] = _Inode()
                self._live_names[op.path] = op.inode
                self._names_of(op.path).append(op)
            case "adopt":
                self._adopt(op.path, op.inode, op.data)
            case "write" if op.data:
                self._change(op)
            case "truncate" if op.error is None:
                self._change(op)
            case "delete" if op.error is None:
                self._live_names.pop(op.path, None)
                self._names_of(op.path).append(op)
                if op.syncs_folder:
                    self._sync_folder(op.path, op.number)
            case "sync":
                self._sync(op)

    def _change(self, op: Op) -> None:
        inode = self._inodes.get(op.inode)
        if inode is not None:
            inode.live.apply(op)
            inode.pending.append(op)

    def _sync(self, op: Op) -> None:
        inode = self._inodes.get(op.inode)
        if inode is None or (op.error is not None and not op.loses):
            return
        covered = [change for change in inode.pending if change.number <= op.covers]
        later = inode.pending[len(covered) :]
        if op.error is not None:
            # The kernel reported the error once and marked the pages clean: readers see them, no
            # later sync writes them.  Only what is written again can become durable.
            inode.pending = [change for change in covered if change.kind != "write"] + later
            inode.lossy = True
            return
        for change in covered:
            inode.durable.apply(change)
        inode.pending = later
        if op.syncs_folder:
            self._sync_folder(op.path, op.covers)

    def _sync_folder(self, path: str, covers: int) -> None:
        names = self._names_of(path)
        for op in names:
            if op.number <= covers:
                _rename(self._durable_names, op)
        names[:] = [op for op in names if op.number > covers]
        # A file that no crash can bring back is forgotten; handles may still write to it.
        alive = {*self._live_names.values(), *self._durable_names.values()}
        alive.update(op.inode for ops in self._pending_names.values() for op in ops)
        for number in self._inodes.keys() - alive:
            del self._inodes[number]

    def _names_of(self, path: str) -> list[Op]:
        return self._pending_names.setdefault(path.rpartition("/")[0], [])

    def _pending(self) -> list[Op]:
        found = [op for inode in self._inodes.values() for op in inode.pending]
        found += [op for names in self._pending_names.values() for op in names]
        found.sort(key=lambda op: op.number)
        return found

    # -- images

    def _chosen(self, at: int, keep: Keep) -> _Chosen | None:
        """Which pending operations survive; None for all."""
        if keep == "all":
            return None
        if keep == "none" or keep == 0:
            return {}
        pending = self._pending()
        if isinstance(keep, int):
            if keep < 0:
                raise ValueError(f"keep is {keep}, expected 0 or more")
            return {op.number: None for op in pending[:keep]}
        way, _, index = keep.partition(":")
        chance = random.Random(f"{self._seed}:{at}:{keep}")
        if way == "random":
            return _at_random(pending, chance)
        if way == "torn" and not index:
            last = next((op.number for op in reversed(pending) if op.kind == "write"), 0)
            return _torn(pending, last, chance)
        numbers = {op.number for op in pending}
        if way not in ("drop", "keep", "torn"):
            raise ValueError(f"keep is {keep!r}, which names no strategy")
        if not index.isdecimal() or int(index) not in numbers:
            raise ValueError(f"keep is {keep!r}: that operation is not pending after {at}")
        if way == "keep":
            return {int(index): None}
        if way == "drop":
            return {number: None for number in numbers if number != int(index)}
        return _torn(pending, int(index), chance)

    def _surviving(self, chosen: _Chosen | None) -> Snapshot:
        names = self._live_names
        if chosen is not None:
            names = dict(self._durable_names)
            for ops in self._pending_names.values():
                for op in ops:
                    if op.number in chosen:
                        _rename(names, op)
        return self._pack({p: self._survivor(self._inodes[n], chosen) for p, n in names.items()})

    def _survivor(self, inode: _Inode, chosen: _Chosen | None) -> _Content:
        if chosen is None and not inode.lossy:
            return inode.live
        kept = [op for op in inode.pending if chosen is None or op.number in chosen]
        if not kept:
            return inode.durable
        content = _Content(bytearray(inode.durable.data))
        for op in kept:
            content.apply(op, None if chosen is None else chosen[op.number])
        return content

    def _pack(self, contents: Mapping[str, _Content]) -> Snapshot:
        files: dict[str, bytes] = {}
        whole = hashlib.sha256()
        for path in sorted(contents):
            name = self._names[path]
            content, digest = contents[path].frozen()
            files[name] = content
            whole.update(name.encode(errors="surrogateescape") + b"\0" + digest)
        return Snapshot(files, whole.hexdigest())


def _rename(names: dict[str, int], op: Op) -> None:
    if op.kind == "open":
        names[op.path] = op.inode
    else:
        names.pop(op.path, None)


def _at_random(pending: Sequence[Op], chance: random.Random) -> _Chosen:
    # One density for a whole image: nearly all and nearly nothing are as likely as half.
    share = chance.choice((0.15, 0.5, 0.85, 0.97))
    chosen: _Chosen = {}
    for op in pending:
        if chance.random() < share:
            chosen[op.number] = None
        elif op.kind == "write" and chance.random() < 0.3:
            chosen[op.number] = _some_sectors(op, chance)
    return chosen


def _torn(pending: Sequence[Op], number: int, chance: random.Random) -> _Chosen:
    return {
        op.number: _some_sectors(op, chance) if op.number == number and op.kind == "write" else None
        for op in pending
    }


def _some_sectors(op: Op, chance: random.Random) -> list[tuple[int, int]]:
    """Some but not all of the sectors that the write touches; none if it touches only one."""
    first, end = op.offset, op.offset + len(op.data)
    edges = [first, *range(first - first % SECTOR_BYTES + SECTOR_BYTES, end, SECTOR_BYTES), end]
    sectors = list(itertools.pairwise(edges))
    if len(sectors) == 1:
        return []
    count = chance.randint(1, len(sectors) - 1)
    return sectors[:count] if chance.random() < 0.5 else sorted(chance.sample(sectors, count))
