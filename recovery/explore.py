"""Every crash that a workload can meet: each operation on its disk times each way to lose data.

    report = explore(workload)                      # workload(path, vfs, ack)
    assert not report.violations, report.summary()

The workload runs once, on a `FaultDisk`.  From the trace every crash image follows; each is opened
as a user would open it, which recovers it, and is held to the promises (see `oracle`).
Then the recovery itself is run on a `FaultDisk`, and crashes at each of its own operations.

Images that are equal byte for byte are recovered once; each still counts as a state.

`python -m holdfast.recovery.explore` explores the workloads that ship, and repeats one state:

    python -m holdfast.recovery.explore --workload tools --durability barrier --seed 0 \\
        --at 93 --loss power --keep drop:88
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.recovery import oracle
from holdfast.recovery.faults import FaultDisk
from holdfast.recovery.images import Keep, Loss, Snapshot
from holdfast.recovery.oracle import Found, Judge, check_promises
from holdfast.recovery.recording import STORE, Run, record, scratch_folder
from holdfast.recovery.told import KINDS, Acks

if TYPE_CHECKING:
    from holdfast.store import Store

__all__ = ["Crash", "ExplorationReport", "Violation", "check_promises", "explore"]

Check = Callable[[Acks, "Store"], object]

NESTED_SHARE = 3  # one state in so many is a crash of the recovery
SINGLES_MAX = 24  # without a budget: operations dropped or kept alone, at each crash point
NESTED_AT_ONCE = 60  # crash states within one recovery
VIOLATIONS_MAX = 50  # more of the same tell nobody anything


@dataclass(frozen=True, slots=True)
class Crash:
    """A crash directly after operation `at`, and what is lost with it."""

    at: int
    loss: Loss
    keep: Keep = "none"

    def options(self, prefix: str = "") -> str:
        """The crash on a command line."""
        keep = f" --{prefix}keep {self.keep}" if self.loss == "power" else ""
        return f"--{prefix}at {self.at} --{prefix}loss {self.loss}{keep}"


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was not kept, and how to see it again. `then`: the recovery crashed, too."""

    workload: str
    durability: str
    seed: int
    crash: Crash
    then: Crash | None
    operation: str
    what: str

    @property
    def command(self) -> str:
        """Repeats it, for the workloads that ship."""
        then = f" {self.then.options('then-')}" if self.then else ""
        return (
            f"python -m holdfast.recovery.explore --workload {self.workload}"
            f" --durability {self.durability} --seed {self.seed} {self.crash.options()}{then}"
        )

    def __str__(self) -> str:
        return (
            f"{self.workload} at {self.durability}, seed {self.seed}, {self.crash.loss} after"
            f" {self.operation}, keeping {self.crash.keep}: {self.what}\n    {self.command}"
        )


@dataclass(slots=True)
class ExplorationReport:
    """What an exploration has seen."""

    workload: str
    durability: str
    seed: int
    operations: int = 0
    states: int = 0  # crash states judged
    distinct: int = 0  # images that differed
    nested: int = 0  # states within a recovery, part of `states`
    seconds: float = 0.0
    violations: list[Violation] = field(default_factory=list)
    not_judged: dict[str, int] = field(default_factory=dict)  # acknowledgements of unknown kinds

    @property
    def states_per_second(self) -> float:
        """How fast it went."""
        return self.states / self.seconds if self.seconds else 0.0

    def summary(self) -> str:
        """The report in words."""
        lines = [
            f"{self.workload} at {self.durability}, seed {self.seed}: {self.states} crash states"
            f" ({self.distinct} distinct images, {self.nested} during recovery) of"
            f" {self.operations} operations, {self.states_per_second:.0f} a second:"
            f" {len(self.violations)} violations"
        ]
        if self.not_judged:
            lines.append(f"  not judged, of kinds unknown to the judge: {self.not_judged}")
        lines += [f"  {violation}" for violation in self.violations]
        return "\n".join(lines)


def explore(
    workload: Callable[..., object],
    check: Check = check_promises,
    *,
    faults: Iterable[Loss] = ("kill", "power"),
    budget: int | None = None,
    seed: int = 0,
    durability: str | None = None,
    progress: Callable[[int], object] | None = None,
) -> ExplorationReport:
    """Crash a workload everywhere, recover, and hold each recovered store to the promises.

    `workload(path, vfs, ack)` opens a store at `path` on the disk `vfs` and calls `ack(kind,
    step_id, seq, data)` when a call of ours has returned; `ack.begin()` before a call is only
    needed where several are under way at once.  `check(acks, store)` raises, or returns something
    true, if a promise is broken.  `budget` bounds the number of states, of which a sample by the
    seed is visited; None visits every crash point with every strategy (a sample of the single drops
    and keeps, where a point has many), and half as many again within recoveries.  `durability` is
    what the workload opens its stores with; it is seen when left out.
    """
    with scratch_folder() as folder:
        run = record(workload, folder, seed=seed, durability=durability)
        try:
            return Exploration(run, check, folder, progress).run_all(tuple(faults), budget)
        finally:
            run.disk.close()


def repeat(
    workload: Callable[..., object],
    crash: Crash,
    then: Crash | None = None,
    *,
    check: Check = check_promises,
    seed: int = 0,
    durability: str | None = None,
) -> ExplorationReport:
    """Visit one state of an exploration again."""
    with scratch_folder() as folder:
        run = record(workload, folder, seed=seed, durability=durability)
        try:
            return Exploration(run, check, folder, None).run_one(crash, then)
        finally:
            run.disk.close()


@dataclass(frozen=True, slots=True)
class _Seen:
    """A recovered image."""

    problems: tuple[str, ...]  # wrong whatever was acknowledged
    found: Found | None = None
    places: tuple[int, ...] = ()


class Exploration:
    """Visits states of one run, and keeps what it has seen."""

    def __init__(
        self,
        run: Run,
        check: Check,
        folder: Path,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        self._run, self._check, self._progress = run, check, progress
        self._image = folder / "image"
        self._image.mkdir(exist_ok=True)
        self._judge = Judge(run.told.acks)
        self._own = check is not check_promises
        self._known: dict[Any, _Seen] = {}
        # Recovered states that a second recovery left as they were: those look alike in their rows.
        self._settled: set[tuple[int, ...]] = set()
        self._chance = random.Random(f"{run.seed}:explore")
        unknown = Counter(ack.kind for ack in run.told.acks if ack.sort not in KINDS)
        self.report = ExplorationReport(
            run.name,
            run.durability,
            run.seed,
            operations=len(run.disk.ops),
            not_judged={} if self._own else dict(unknown),
        )

    def run_all(self, faults: Sequence[Loss], budget: int | None) -> ExplorationReport:
        """Visit everything within the budget."""
        started = time.perf_counter()
        plan = self._plan(faults, SINGLES_MAX if budget is None else None)
        nested = len(plan) // 2 if budget is None else budget // NESTED_SHARE
        if budget is not None and len(plan) > budget - nested:
            plan = self._sample(plan, budget - nested)
        sound: list[
            Crash
        ] = []  # crashes with an image of their own whose recovery is worth a crash
        for crash in plan:
            if len(self.report.violations) >= VIOLATIONS_MAX:
                break
            known = len(self._known)
            seen = self.visit(crash, None, self._run.disk)
            if seen is not None and len(self._known) > known:
                sound.append(crash)
        if budget is not None:
            nested = budget - self.report.states
        self._crash_recoveries(sound, faults, nested)
        self.report.seconds = time.perf_counter() - started
        self.report.distinct = len(self._known)
        return self.report

    def run_one(self, crash: Crash, then: Crash | None) -> ExplorationReport:
        """Visit one state."""
        started = time.perf_counter()
        if then is None:
            self.visit(crash, None, self._run.disk)
        else:
            with self._recovery_of(crash) as disk:
                self.visit(crash, then, disk)
        self.report.seconds = time.perf_counter() - started
        self.report.distinct = len(self._known)
        return self.report

    def _plan(self, faults: Sequence[Loss], limit: int | None) -> list[Crash]:
        """Every crash point times every strategy; of single drops and keeps at most `limit`."""
        run = self._run
        return [
            crash
            for at in range(run.first, len(run.disk.ops) + 1)
            for crash in _crashes(run.disk, at, faults, limit=limit)
        ]

    def _sample(self, plan: Sequence[Crash], size: int) -> list[Crash]:
        """The kills first, for they are few and common; of the others what there is room for."""
        order = list(range(len(plan)))
        self._chance.shuffle(order)
        order.sort(key=lambda index: plan[index].loss != "kill")
        return [plan[index] for index in sorted(order[:size])]

    def _crash_recoveries(self, sound: Sequence[Crash], faults: Sequence[Loss], room: int) -> None:
        """Recover on a disk that remembers, and crash there: a recovery must survive its own death.

        Spread over as many recoveries as there is room for, in the order of the trace.
        """
        count = min(len(sound), max(1, room // NESTED_AT_ONCE)) if room > 0 else 0
        chosen = sorted(self._chance.sample(range(len(sound)), count))
        for left, index in zip(range(count, 0, -1), chosen, strict=True):
            if len(self.report.violations) >= VIOLATIONS_MAX:
                return
            share = -(-room // left)
            room -= self._crash_recovery(sound[index], faults, share)

    def _crash_recovery(self, crash: Crash, faults: Sequence[Loss], share: int) -> int:
        with self._recovery_of(crash) as disk:
            plan = [
                then
                for at in range(1, len(disk.ops) + 1)
                for then in _crashes(disk, at, faults, limit=4)
            ]
            if len(plan) > share:
                plan = [plan[i] for i in sorted(self._chance.sample(range(len(plan)), share))]
            for then in plan:
                self.visit(crash, then, disk)
        self.report.nested += len(plan)
        return len(plan)

    @contextmanager
    def _recovery_of(self, crash: Crash) -> Iterator[FaultDisk]:
        """The trace of the recovery from a crash."""
        path = self._write(self._run.disk.snapshot(crash.at, crash.loss, crash.keep))
        with FaultDisk(seed=self._run.seed) as disk:
            self._open(path, vfs=disk.name).close()
            yield disk

    def visit(self, crash: Crash, then: Crash | None, disk: FaultDisk) -> _Seen | None:
        """Judge one state, the one at the last crash on its disk; what was seen if it is sound."""
        last = then or crash
        acks = self._run.acks(crash.at, crash.loss)
        snapshot = disk.snapshot(last.at, last.loss, last.keep)
        # A check of the user's own judges the store, not its rows: once for each set of promises.
        key = (snapshot.digest, len(acks), acks.promised) if self._own else snapshot.digest
        seen = self._known.get(key)
        if seen is None:
            seen = self._known[key] = self._recover(snapshot, acks)
        self.report.states += 1
        if self._progress is not None:
            self._progress(1)
        what = "; ".join(seen.problems)
        if not what and seen.found is not None:
            wrong = self._judge.verdict(seen.found, seen.places, acks.promised, len(acks.begun))
            what = wrong or ""
        if not what:
            return seen
        operation = self._run.disk.ops[crash.at - 1].words if crash.at else "nothing"
        if then is not None:
            operation += f", then {then.loss} in its recovery after {disk.ops[then.at - 1].words}"
        run = self._run
        self.report.violations.append(
            Violation(run.name, run.durability, run.seed, crash, then, operation, what)
        )
        return None

    def _recover(self, snapshot: Snapshot, acks: Acks) -> _Seen:
        """Open an image as a user would, and read it as another program would."""
        path = self._write(snapshot)
        try:
            with self._open(path) as store:
                if self._own:
                    return _Seen(_answer_of(self._check, acks, store))
                problems = oracle.illegal_messages(store)
            found = oracle.read_store(path)
            problems += oracle.faults_of(found)
            places = () if problems else tuple(self._judge.places(found))
            if places not in self._settled:
                self._open(path).close()
                if oracle.read_store(path) != found:
                    problems.append("a second recovery changed the store")
        except Exception as error:  # Whatever it is: a user would have it instead of a store.
            return _Seen((f"recovery raised {type(error).__name__}: {error}",))
        if problems:
            return _Seen(tuple(problems), found)
        if places:
            self._settled.add(places)
        return _Seen((), found, places)

    def _open(self, path: Path, vfs: str | None = None) -> Store:
        import holdfast

        store: Store = holdfast.open(path, vfs=vfs, durability=self._run.durability)
        return store

    def _write(self, snapshot: Snapshot) -> Path:
        for stale in self._image.iterdir():
            stale.unlink()
        snapshot.write(self._image)
        return self._image / STORE


def _crashes(
    disk: FaultDisk, at: int, faults: Sequence[Loss], *, limit: int | None = None
) -> Iterator[Crash]:
    for loss in faults:
        if loss == "kill":
            yield Crash(at, loss)
        elif loss == "power":
            for keep in disk.strategies(at, limit=limit):
                yield Crash(at, loss, keep)
        else:
            raise ValueError(f"faults has {loss!r}, expected 'kill' and 'power'")


def _answer_of(check: Check, acks: Acks, store: Store) -> tuple[str, ...]:
    try:
        answer = check(acks, store)
    except Exception as error:
        return (f"{type(error).__name__}: {error}",)
    if answer is False:
        return ("the check said no",)
    if not answer or answer is True:
        return ()
    return (answer,) if isinstance(answer, str) else tuple(map(str, answer))  # type: ignore[call-overload]


if __name__ == "__main__":
    # Python runs this file under another name; the command works with the module everybody has.
    from holdfast.recovery.explore_command import main

    sys.exit(main())
