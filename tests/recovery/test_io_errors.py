"""Disks that fail: every operation of every workload, and each sync in turn."""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

import holdfast
from holdfast.journal.engine.log import Log
from holdfast.recovery.explore import Crash, Exploration, check_promises
from holdfast.recovery.faults import FaultDisk
from holdfast.recovery.oracle import Judge, read_store
from holdfast.recovery.recording import LEVELS, Recorder, Run, scratch_folder
from holdfast.recovery.told import Ack
from holdfast.recovery.workloads import WORKLOADS, Agent, Workload

T = TypeVar("T")
# Thousands of warnings about disks that fail on purpose would tell nothing.
pytestmark = pytest.mark.usefixtures("quiet")

# Kind of operation, errors, kind of file.  A short read of the database itself is left out: SQLite
# takes what lies behind the end of that file for zeros, and cannot tell the two apart.
ERRORS: tuple[tuple[Any, tuple[Any, ...], Any], ...] = (
    ("write", ("eio", "full", "short"), None),
    ("sync", ("eio", "full"), None),
    ("read", ("eio",), None),
    ("read", ("short",), "wal"),
    ("open", ("eio", "full"), None),
    ("truncate", ("eio",), None),
    ("delete", ("eio",), None),
)


NEVER = 1 << 60
THOROUGH = "HOLDFAST_THOROUGH" in os.environ  # every error of every operation, with each reaction


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    """For these tests alone: those of other files read the log."""
    logger = logging.getLogger("holdfast")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


class Died(Exception):
    """The application gave up."""


class Killed(BaseException):
    """The process was killed while it looked at an error."""


class Enduring(Agent):
    """An application that repeats a call that failed, and goes on; `tries` 1: it gives up."""

    def __init__(self, *args: Any, tries: int) -> None:
        super().__init__(*args)
        self.told: Recorder = args[2]
        self._tries = tries
        self.errors: list[BaseException] = []
        self._stores: list[holdfast.Store] = []

    def open(self) -> Any:
        store = self._endure(super().open)
        self._stores.append(store)
        return _Leaving(self, store)

    def session(self, store: holdfast.Store, name: str) -> holdfast.Session:
        return self._endure(lambda: store.session(name))

    def make(self, call: Callable[[], T]) -> T:
        self._ack.begin()
        return self._endure(call)

    def _endure(self, call: Callable[[], T]) -> T:
        for _ in range(self._tries):
            try:
                return call()
            except holdfast.HoldfastError as error:
                self.errors.append(error)
        raise Died from self.errors[-1]

    def abandon(self) -> None:
        """The process is gone: its locks and its handles, and nothing else happens."""
        for store in self._stores:
            engine = store.engine
            engine.close_connections()
            if engine._departure is not None:
                engine._departure()
            engine.refusal = engine._closed
        self._stores.clear()


class _Leaving:
    """A store that is closed by a clean end only."""

    def __init__(self, agent: Enduring, store: holdfast.Store) -> None:
        self._agent, self._store = agent, store

    def __enter__(self) -> holdfast.Store:
        return self._store

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self._store.close()
        else:
            self._agent.abandon()


Fault = dict[str, Any]


@dataclass
class Trial:
    """One run of a workload on a disk that fails."""

    run: Run
    agent: Enduring
    judge: Exploration
    died: bool
    failed_at: int  # the operation that failed first

    def crash(self, crash: Crash) -> None:
        self.judge.visit(crash, None, self.run.disk)


@cache
def clean_run(workload: Workload) -> tuple[list[Ack], list[int]]:
    """What a workload tells on a sound disk, and how many operations of each kind it makes."""
    with scratch_folder() as folder, FaultDisk() as disk:
        told = Recorder(disk)
        workload(folder / "live" / "store.db", disk.name, told)
        return told.acks, [disk.count(kind, file) for kind, _, file in ERRORS]


@contextmanager
def trial(workload: Workload, fault: Fault, *, tries: int, reopen: bool = False) -> Iterator[Trial]:
    """Run a workload while the disk fails; the judge knows all that it told and had begun."""
    with scratch_folder() as folder, FaultDisk() as disk:
        told = Recorder(disk)
        path = folder / "live" / "store.db"
        path.parent.mkdir()
        if workload.prepare is not None:
            workload.prepare(path, told)
        disk.fail(**fault)
        agent = Enduring(path, disk.name, told, workload.durability, tries=tries)
        died = False
        try:
            workload.run(agent)
        except (Died, Killed):
            died = True
            agent.abandon()
        disk.clear_faults()
        failed = next((op.number for op in disk.ops if op.error is not None), len(disk.ops))
        # What was under way may be on record; a sound run tells what it was.
        begun = len(told.begun_at)
        under_way = clean_run(workload)[0][len(told.acks) : begun] if died else []
        if died and reopen:
            live_again(Enduring(path, disk.name, told, workload.durability, tries=1), under_way)
        else:
            told.acks += under_way
            told.acked_at += [NEVER for _ in under_way]
        run = Run(workload.name, workload.durability, 0, disk, told)
        yield Trial(run, agent, Exploration(run, check_promises, folder), died, failed)
        agent.abandon()


def live_again(agent: Enduring, under_way: list[Ack]) -> None:
    """The application starts anew on the same disk, looks what it had done, and goes on."""
    told = agent.told
    with agent.open() as store:
        if under_way and is_on_record(store, told.acks, under_way):
            told(*under_way[0])
        elif under_way:
            told.begun_at.pop()
        for info in store.sessions():
            agent.turn(agent.session(store, info.id), 2)
        session = agent.create(store, "again")
        agent.user(session, "are you there?")
        agent.turn(session, 3, commit=False)
        agent.abandon()


def is_on_record(store: holdfast.Store, acks: list[Ack], under_way: list[Ack]) -> bool:
    """Whether the call that failed has landed all the same."""
    with scratch_folder() as folder:
        store.backup(folder / "copy.db")
        later = [Ack("session", 0, 0, "later"), Ack("begin", 1 << 30, 0, "later")]
        judge = Judge([*acks, *under_way, *later])  # who tells all is held to all
        places = judge.places(read_store(folder / "copy.db"))
    return len(acks) not in places


# --- every operation -----------------------------------------------------------------------------


def faults_of(workload: Workload, *, all_of_them: bool = False) -> Iterator[Fault]:
    """Each operation fails, once or from then on, with one of its errors, or with each of them."""
    for (kind, errors, file), count in zip(ERRORS, clean_run(workload)[1], strict=True):
        for nth in range(1, count + 1):
            for index, error in enumerate(errors):
                for times in (1, None):
                    turn = (nth + index) % len(errors) == 0 and (nth // len(errors)) % 2 == (
                        times is None
                    )
                    if turn or all_of_them:
                        yield {
                            "kind": kind,
                            "nth": nth,
                            "error": error,
                            "times": times,
                            "file": file,
                        }


def survives_a_kill(workload: Workload, fault: Fault, tries: int) -> None:
    with trial(workload, fault, tries=tries) as made:
        made.crash(Crash(len(made.run.disk.ops), "kill"))
        assert not made.judge.report.violations, (fault, made.judge.report.summary())
        assert made.died or tries > 1 or not made.agent.errors
        for error in made.agent.errors:
            assert str(error) and "Error" not in type(error).__name__


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_an_error_at_any_operation_is_typed_and_loses_nothing_acknowledged(name: str) -> None:
    for index, fault in enumerate(faults_of(WORKLOADS[name], all_of_them=THOROUGH)):
        for tries in (1, 3) if THOROUGH else (1 + index % 2 * 2,):
            survives_a_kill(WORKLOADS[name], fault, tries)


def test_a_long_log_that_a_kill_has_left_is_made_sound(tmp_path: Path) -> None:
    """Healing wrote a megabyte at once, and SQLite's unix layer fails at 128 KB with "disk full":
    a store that was killed with more than that in its log could not be opened again.
    """
    with FaultDisk() as disk, holdfast.open(tmp_path / "live" / "a.db", vfs=disk.name) as store:
        step = store.create_session("s").begin_step()
        for _ in range(9):
            step.append_text("x" * 40_000)
        killed = disk.image(len(disk.ops), tmp_path / "killed")
    with holdfast.open(killed) as store:
        assert store.session("s").messages()[0].text == "x" * 360_000


def test_a_disk_that_fails_to_read_puts_no_sound_step_into_quarantine(tmp_path: Path) -> None:
    """Recovery took every error of a read for the step's own, and set it aside after a few."""
    with FaultDisk() as disk, holdfast.open(tmp_path / "live" / "a.db", vfs=disk.name) as store:
        store.create_session("s").begin_step().append_text("kept")
        killed = disk.image(len(disk.ops), tmp_path / "killed")
    with FaultDisk() as disk:
        holdfast.open(disk_copy(killed, tmp_path / "count"), vfs=disk.name).close()
        reads = disk.count("read")
    for nth in range(1, reads + 1):
        path = disk_copy(killed, tmp_path / str(nth))
        with FaultDisk() as disk:
            disk.fail("read", nth=nth, times=None)
            with suppress(holdfast.HoldfastError):
                holdfast.open(path, vfs=disk.name).close()
        with holdfast.open(path) as store:
            assert store.session("s").messages()[0].text == "kept"


def disk_copy(store: Path, into: Path) -> Path:
    shutil.copytree(store.parent, into)
    return into / store.name


def test_a_full_disk_that_gets_room_again_leaves_no_gap_and_no_double() -> None:
    workload = WORKLOADS["one-stream"]
    for nth in range(60, 110):
        fault: Fault = {"kind": "write", "nth": nth, "error": "full", "times": 2}
        with trial(workload, fault, tries=4) as made:
            assert not made.died
            assert all(isinstance(error, holdfast.StoreFull) for error in made.agent.errors)
            told = [(ack.kind, ack.data) for ack in made.run.told.acks]
            assert told == [(ack.kind, ack.data) for ack in clean_run(workload)[0]]
            made.crash(Crash(len(made.run.disk.ops), "kill"))
            assert not made.judge.report.violations, made.judge.report.summary()


# --- the failed sync -----------------------------------------------------------------------------

# goes on: one sync fails, and the application repeats what raised.
# refused: the sync and the one after it fail; the application dies and starts again.
# killed:  the process is gone before it can do anything about the error, and starts again.
REACTIONS = ("goes on", "refused", "killed")


def after_a_failed_sync(
    workload: Workload, nth: int, lose_pages: bool, reaction: str, crashes: int
) -> Exploration:
    """One sync fails, life goes on, then the power is cut."""
    fault: Fault = {
        "kind": "sync",
        "nth": nth,
        "times": 2 if reaction == "refused" else 1,
        "lose_pages": lose_pages,
    }
    tries = 3 if reaction == "goes on" else 1
    with trial(workload, fault, tries=tries, reopen=True) as made:
        disk = made.run.disk
        chance = random.Random(f"{workload.name}:{nth}:{reaction}")
        plan = [
            Crash(at, "power", keep)
            for at in range(made.failed_at, len(disk.ops) + 1)
            for keep in disk.strategies(at, limit=6)
        ]
        plan = sorted(chance.sample(plan, min(crashes, len(plan))), key=lambda crash: crash.at)
        for crash in [*plan, Crash(len(disk.ops), "power", "none"), Crash(len(disk.ops), "kill")]:
            made.crash(crash)
        return made.judge


@contextmanager
def reacting(reaction: str) -> Iterator[None]:
    def kill(self: Log) -> None:
        raise Killed

    if reaction != "killed":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Log, "_doubt_log", kill)
        yield


def syncs_of(workload: Workload) -> range:
    return range(1, clean_run(workload)[1][1] + 1)


@pytest.mark.parametrize("reaction", REACTIONS)
@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_nothing_acknowledged_after_a_failed_sync_is_lost_when_the_power_is_cut(
    name: str, reaction: str
) -> None:
    level = LEVELS[1 + len(name) % 2]
    workload = WORKLOADS[name].at(level)
    for nth in syncs_of(workload):
        with reacting(reaction):
            judged = after_a_failed_sync(workload, nth, nth % 3 != 0, reaction, crashes=6)
        assert not judged.report.violations, (nth, judged.report.summary())


def test_a_log_that_is_not_made_sound_after_a_failed_sync_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """New frames chain onto frames that never reached the disk: all of them go with the power."""

    def trust(self: Log) -> None:
        self.in_doubt = False

    monkeypatch.setattr(Log, "heal_log", trust)
    workload = WORKLOADS["one-stream"].at("power")
    broken = []
    for nth in syncs_of(workload):
        with reacting("killed"):
            judged = after_a_failed_sync(workload, nth, True, "killed", crashes=8)
        broken += judged.report.violations
    assert any("lost: " in violation.what for violation in broken)


def test_a_store_whose_syncs_fail_for_good_refuses_every_write_and_runs_no_tool(
    tmp_path: Path,
) -> None:
    with FaultDisk() as disk, holdfast.open(tmp_path / "a.db", vfs=disk.name) as store:
        session = store.create_session("s")
        step = session.begin_step()
        step.announce_call("a", "tool")
        step.append_args("a", "{}")
        step.append_done()
        call = step.seal().tool_calls[0]
        ran = []
        disk.fail("sync", times=None)
        with pytest.raises(holdfast.StoreFailed):
            step.execute(call, lambda: ran.append(1))
        disk.clear_faults()
        with pytest.raises(holdfast.StoreFailed):
            step.execute(call, lambda: ran.append(1))
        assert not ran
