"""One run of a workload on a `FaultDisk`: its trace, and what it was told on the way."""

from __future__ import annotations

import shutil
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.recovery.faults import FaultDisk
from holdfast.recovery.images import Loss
from holdfast.recovery.told import Ack, Acks, promised_of

__all__ = ["LEVELS", "Recorder", "Run", "STORE", "record", "scratch_folder"]

STORE = "store.db"
LEVELS = ("process", "barrier", "power")


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder in memory if there is one: images are written by the thousand, and never synced."""
    memory = Path("/dev/shm")
    place = memory if memory.is_dir() and _writable(memory) else None
    made = Path(tempfile.mkdtemp(prefix="holdfast-explore-", dir=place))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _writable(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


class Recorder:
    """What a workload gets as `ack`: each acknowledgement becomes a mark in the trace."""

    def __init__(self, disk: FaultDisk) -> None:
        self._disk = disk
        self.acks: list[Ack] = []
        self.acked_at: list[int] = []
        self.begun_at: list[int] = []

    def __call__(self, kind: str, step_id: int = 0, seq: int = 0, data: Any = None) -> None:
        """A call has returned."""
        self.acks.append(Ack(kind, step_id, seq, data))
        self.acked_at.append(self._disk.mark("ack", (kind, step_id, seq)))

    def begin(self, *_: Any) -> None:
        """A call is about to be made."""
        self.begun_at.append(self._disk.mark("begin"))


@dataclass(slots=True)
class Run:
    """One run of a workload: its trace and its acknowledgements."""

    name: str
    durability: str
    seed: int
    disk: FaultDisk
    told: Recorder

    @property
    def first(self) -> int:
        """The last mark before the disk was first used: what is told there was there before."""
        ops = self.disk.ops
        return next((op.number - 1 for op in ops if op.kind != "mark"), len(ops))

    def acks(self, at: int, loss: Loss) -> Acks:
        """What had been acknowledged after operation `at`, and what of it the loss cannot take."""
        told = self.told
        acked = bisect_right(told.acked_at, at)
        begun = acked + 1
        if told.begun_at:
            begun = max(acked, bisect_right(told.begun_at, at))
        # What a file held before the workload opened it was there, whatever is lost since.
        before = bisect_right(told.acked_at, self.first)
        promised = promised_of(told.acks[:acked], loss=loss, durability=self.durability)
        return Acks(told.acks[:acked], max(promised, min(before, acked)), told.acks[acked:begun])


def record(
    workload: Callable[..., object], folder: Path, *, seed: int, durability: str | None
) -> Run:
    """Run the workload once."""
    disk = FaultDisk(seed=seed)
    told = Recorder(disk)
    live = folder / "live"
    live.mkdir()
    try:
        with _watching_levels() as levels:
            workload(live / STORE, disk.name, told)
    except BaseException:
        disk.close()
        raise
    level = durability or getattr(workload, "durability", None)
    if level is None:
        level = min(levels, key=LEVELS.index) if levels else "barrier"
    name = getattr(workload, "name", None) or getattr(workload, "__name__", "workload")
    return Run(str(name), str(level), seed, disk, told)


@contextmanager
def _watching_levels() -> Iterator[set[str]]:
    """Which levels stores are opened with meanwhile: a file does not tell."""
    from holdfast.journal.durability import Durability
    from holdfast.journal.engine.engine import SqliteEngine

    levels: set[str] = set()
    plain = SqliteEngine.__dict__["open"]

    def watched(cls: Any, *args: Any, **options: Any) -> Any:
        levels.add(str(Durability.of(options.get("durability", Durability.BARRIER)).value))
        return plain.__func__(cls, *args, **options)

    setattr(SqliteEngine, "open", classmethod(watched))  # noqa: B010
    try:
        yield levels
    finally:
        setattr(SqliteEngine, "open", plain)  # noqa: B010
