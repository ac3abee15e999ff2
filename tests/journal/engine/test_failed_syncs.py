"""A sync that fails, at every place in turn, held against the power cut that follows it.

The model is that of Linux file systems: the failed sync reports its error once, may drop the pages
it was to write, and goes on to show them.  Whatever was acknowledged behind that must be there
after the power is cut, as far as the level promises it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import apsw
import pytest

import holdfast
from holdfast.journal.engine import log
from holdfast.recovery.faults import FaultDisk

STEPS, DELTAS = 3, 2


class Killed(BaseException):
    """The process dies here."""


def die(store: holdfast.Store) -> None:
    """What SIGKILL does to a store: nothing is written, the kernel drops the lock."""
    engine = store.engine
    engine.refusal = engine._closed
    engine.close_connections()
    assert engine._departure is not None
    engine._departure()


class Agent:
    """An application that goes on: what its store died over is done again with a new one."""

    def __init__(self, disk: FaultDisk, path: Path, durability: str, dies: bool) -> None:
        self.disk, self.path, self.durability, self.dies = disk, path, durability, dies
        self.store: holdfast.Store | None = None
        self.lives = 0

    def run(self) -> None:
        self.insist(lambda: self.session)
        for step in range(STEPS):
            self.insist(lambda: self.step(step))  # noqa: B023
        assert self.store is not None
        die(self.store)

    def step(self, number: int) -> None:
        handle = self.session.begin_step()
        self.disk.mark("barrier")
        for delta in range(DELTAS):
            text = f"<{number}.{self.lives}.{delta}>"
            handle.append_text(text)
            self.disk.mark("delta", text)
        handle.commit()
        self.disk.mark("barrier")

    @property
    def session(self) -> holdfast.Session:
        assert self.store is not None
        with suppress(holdfast.SessionNotFound):
            return self.store.session("s")
        return self.store.create_session("s")

    def insist(self, work: Callable[[], object]) -> None:
        for _ in range(10):
            try:
                if self.store is None:
                    self.open()
                work()
                return
            except (Killed, holdfast.StoreFailed):
                if self.store is not None:
                    die(self.store)
                self.store = None
        raise AssertionError("the store fails for ever")

    def open(self) -> None:
        self.lives += 1
        self.store = holdfast.open(self.path, vfs=self.disk.name, durability=self.durability)
        if self.dies:
            self.store.engine.heal_log = self.killed  # type: ignore[method-assign]

    def killed(self) -> None:
        """The process is killed before it can heal the log."""
        raise Killed


def promised(disk: FaultDisk, at: int, durability: str) -> list[str]:
    """The texts that must be there if the power is cut after operation `at`."""
    acks = [op for op in disk.ops[:at] if op.kind == "mark"]
    if durability == "process":
        return []
    if durability == "barrier":
        while acks and acks[-1].label == "delta":
            acks.pop()
    return [str(op.payload) for op in acks if op.payload and op.label == "delta"]


def words(path: Path) -> str:
    """All text in a store, wherever it stands, read with SQLite alone."""
    db = apsw.Connection(str(path))
    db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)  # Else closing waits for the real disk.
    try:
        assert db.pragma("quick_check") == "ok"
        assert db.pragma("application_id") == 0x486F4C44
        if not db.execute("SELECT count(*) FROM sqlite_schema").get:
            return ""  # Not even the making of the store is certain at the lowest level.
        found = [text for (text,) in db.execute("SELECT content FROM stream_journal")]
        found += [text for (text,) in db.execute("SELECT body FROM history_entries")]
        return "".join(found)
    finally:
        db.close()


def images(disk: FaultDisk, since: int) -> Iterator[tuple[int, str]]:
    """The acknowledgements next to the failure and the last ones, and ways to lose the rest."""
    marks = [op.number for op in disk.ops[since:] if op.kind == "mark"]
    for at in [*marks[:4], *marks[4:][-2:]]:
        yield at, "none"
        yield at, "random:0"


def sync_count(tmp_path: Path, durability: str) -> int:
    with FaultDisk() as disk:
        Agent(disk, tmp_path / "probe.db", durability, dies=False).run()
        return disk.count("sync")


@pytest.mark.parametrize("durability", ["process", "barrier", "power"])
@pytest.mark.parametrize(
    ("dies", "times", "lose_pages"),
    [(False, 1, False), (False, 1, True), (False, 3, True), (True, 1, True)],
    ids=["is healed", "loses pages and is healed", "is given up", "kills"],
)
def test_nothing_acknowledged_after_a_failed_sync_is_lost_with_the_power(
    tmp_path, monkeypatch, durability, dies, times, lose_pages
):
    # So that checkpoints, and their syncs, are among those that fail.
    monkeypatch.setattr(log, "LOG_TIDY_PAGES", 15)
    seen: set[tuple[str, int]] = set()
    struck = 0
    for nth in range(1, sync_count(tmp_path, durability) + 1):
        with FaultDisk(seed=nth) as disk:
            fault = disk.fail("sync", nth, times=times, lose_pages=lose_pages)
            agent = Agent(disk, tmp_path / f"{nth}.db", durability, dies)
            agent.run()
            struck += fault.fired
            since = next((op.number for op in disk.ops if op.kind == "sync" and op.error), 0)
            for at, keep in images(disk, since):
                wanted = promised(disk, at, durability)
                snapshot = disk.snapshot(at, "power", keep)
                if (snapshot.digest, len(wanted)) in seen or disk.database.name not in (
                    snapshot.files
                ):
                    assert (snapshot.digest, len(wanted)) in seen or not wanted
                    continue
                seen.add((snapshot.digest, len(wanted)))
                found = words(disk.image(at, tmp_path / "image", "power", keep))
                lost = [text for text in wanted if found.count(text) != 1]
                assert lost == [], f"sync {nth}, power cut after {at}, kept {keep}"
    assert struck >= 5
