"""Drills: real processes, real SIGKILL, and the same store again and again.

    report = run_drill("scratch.db", kills=500)
    assert not report.violations, report.summary()

An agent streams, thinks, calls tools and settles, in several sessions.  It tells each call that has
returned through a pipe, and is killed at some moment: while it opens the store and recovers it,
while it streams, in the middle of a commit.  Then the store is opened, read as another program
reads it, and held to what had been acknowledged; the next agent goes on with it.  Sometimes several
agents live in one store, and die one after the other.

With `command` it is the user's program that is killed (`holdfast.recovery.acks`).

A seed gives the same agents and the same plan of kills; where exactly a kill lands is up to the
kernel.  A kill loses nothing that was written: for power cuts see `holdfast.recovery.explore`.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdfast.journal.durability import Durability
from holdfast.recovery import oracle
from holdfast.recovery.drill_judge import (
    Life,
    State,
    Verdict,
    in_doubt,
    judge_agents,
    judge_program,
    state_of,
)
from holdfast.recovery.drill_report import DrillError, DrillReport
from holdfast.recovery.kills import Plan, Victim, Victims, program_of
from holdfast.recovery.nursery import Nursery

__all__ = ["DrillError", "DrillReport", "run_drill"]

SESSIONS_MAX = 12  # of the drill's own; older ones are deleted, so that the store stays small
VIOLATIONS_MAX = 20  # more of the same tell nobody anything


def run_drill(
    path: str | os.PathLike[str],
    *,
    kills: int,
    durability: str = "barrier",
    command: str | list[str] | None = None,
    seed: int | None = None,
    agent: Literal["honest", "liar"] = "honest",
    progress: Callable[[int], object] | None = None,
) -> DrillReport:
    """Kill an agent `kills` times on the store at `path`, and hold the store to every promise.

    Nobody else may have the store open.  `command` is a program that opens this very store: it is
    started without a shell, and killed with whatever it has started.  `agent="liar"` acknowledges
    before it calls, which a drill must notice.  `progress` is told of each kill.
    """
    if kills < 0:
        raise DrillError(f"kills is {kills}, expected 0 or more")
    level = str(Durability.of(durability).value)
    place = Path(path)
    if place.is_dir():
        raise DrillError(f"{place}: is a folder, expected the file of a store")
    if not place.absolute().parent.is_dir():
        raise DrillError(f"{place}: there is no folder {place.absolute().parent}; make it first")
    chosen = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    report = DrillReport(path=str(place), durability=level, seed=chosen, planned=kills)
    argv = None if command is None else program_of(command)
    if argv is not None:
        report.command = command if isinstance(command, str) else " ".join(argv)
    started = time.perf_counter()
    with Nursery() as nursery, _scratch(place) as scratch:
        drill = _Drill(place, report, nursery, scratch, progress)
        if argv is None:
            drill.run_agents(kills, lies=agent == "liar")
        else:
            drill.run_program(kills, argv)
    report.seconds = time.perf_counter() - started
    return report


@contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    """A folder on the same disk, so that the time to recover is that of the real store."""
    folder = Path(tempfile.mkdtemp(prefix=".holdfast-drill-", dir=path.absolute().parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(slots=True)
class _Look:
    """What a look at the store has shown."""

    state: State
    found: oracle.Found
    problems: list[str]
    settled: frozenset[int]


class _Drill:
    def __init__(
        self,
        path: Path,
        report: DrillReport,
        nursery: Nursery,
        scratch: Path,
        progress: Callable[[int], object] | None,
    ) -> None:
        self._path, self._report, self._scratch = path, report, scratch
        self._chance = random.Random(report.seed)
        self._victims = Victims(nursery, report, self._chance)
        self._progress = progress
        self._own: list[str] = []  # sessions of this drill, oldest first
        self._names = 0
        self._lives = 0
        self._suspects: list[tuple[str, str]] = []
        self._made: set[str] = set()  # kinds of calls that the program is known to make
        first = self._look(copy=True)
        self._state, self._unsettled = first.state, first.settled
        if first.problems:
            raise DrillError(f"{path}: is not sound before the drill: {'; '.join(first.problems)}")

    # --- our own agents -------------------------------------------------------------------------

    def run_agents(self, kills: int, *, lies: bool) -> None:
        """Rounds: one agent, or several in one store; when all are dead, the store is judged."""
        report = self._report
        while report.kills < kills and len(report.violations) < VIOLATIONS_MAX:
            chance = self._chance
            together = min(chance.choice((1, 1, 1, 1, 2, 3)), kills - report.kills)
            spare = chance.randint(0, 2) if together > 1 else 0
            spare = min(spare, kills - report.kills - together)
            free = [name for name in self._own if name in self._state]
            chance.shuffle(free)
            retired = self._own[:-SESSIONS_MAX] if chance.random() < 0.3 else []
            free = [name for name in free if name not in retired]
            for _ in range(together):
                self._start_agent(free, retired, lies)
                retired = []
            lives = []
            while self._victims.living:
                victim = self._victims.next_death()
                lives.append(victim.life)
                self._count(victim)
                if spare and self._victims.living:
                    # It opens the store beside living ones, and recovers what the dead one left.
                    spare -= 1
                    self._start_agent(free, [], lies)
            # The store itself, or an image of it: then the next agent finds what this one left.
            look = self._look(copy=chance.random() < 0.5, twice=chance.random() < 0.25)
            verdict = judge_agents(self._state, look.found, lives)
            self._note(look, verdict, lives)
            self._own = [name for name in self._own if name in look.state]

    def _start_agent(self, free: list[str], retired: list[str], lies: bool) -> None:
        chance = self._chance
        known = [free.pop() for _ in range(chance.choice((0, 1, 2))) if free]
        new = [self._new_name() for _ in range(chance.choice((0, 1)) if known else 1)]
        self._lives += 1
        order = {
            "path": str(self._path),
            "durability": self._report.durability,
            "seed": chance.randrange(1 << 32),
            "life": f"{self._report.seed:x}.{self._lives}",
            "known": known,
            "sessions": known + new,
            "retire": retired,
            "lies": lies,
        }
        life = Life(self._lives, (*known, *new, *retired))
        self._own += new
        self._victims.start(order, life, Plan.of_agent(chance, self._report))

    def _new_name(self) -> str:
        while True:
            self._names += 1
            name = f"drill-{self._names}"
            if name not in self._state:
                return name

    # --- the user's program ---------------------------------------------------------------------

    def run_program(self, kills: int, argv: list[str]) -> None:
        """One life after the other; only images are judged: recovery is the program's own."""
        report, victims = self._report, self._victims
        place = os.path.realpath(self._path)
        while report.kills < kills and len(report.violations) < VIOLATIONS_MAX:
            self._lives += 1
            plan = Plan.of_program(self._chance, report)
            victims.start_program(argv, Life(self._lives), plan, place, self._scratch)
            victim = victims.next_death()
            self._count(victim)
            life = victim.life
            self._made |= {ack.kind for ack in life.acks}
            look = self._look(copy=True)
            verdict = judge_program(self._state, look.found, life, self._unsettled)
            self._suspects += [(kind, what) for kind, what in verdict.suspects[:1]]
            self._note(look, verdict, [life])
            if victim.last_words:
                break  # It would end so each time.
        for kind, what in self._suspects:
            if kind not in self._made:
                report.lost += 1
                report.violations.append(f"{what}, and the program never makes a {kind}")

    # --- both -----------------------------------------------------------------------------------

    def _count(self, victim: Victim) -> None:
        report = self._report
        report.acked += len(victim.life.acks)
        if victim.was_killed:
            report.kills += 1
            report.where[victim.where] = report.where.get(victim.where, 0) + 1
            if self._progress is not None:
                self._progress(1)
        elif victim.last_words:
            report.violations.append(f"life {victim.life.number} {victim.last_words}")

    def _note(self, look: _Look, verdict: Verdict, lives: list[Life]) -> None:
        report = self._report
        report.lost += verdict.lost
        report.doubled += verdict.doubled
        after = f"after kill {report.kills}: "
        report.violations += [after + what for what in [*look.problems, *verdict.problems]]
        steps = frozenset(ack.step_id for life in lives for ack in life.acks if ack.step_id)
        report.in_doubt += in_doubt(look.state, steps)
        self._state, self._unsettled = look.state, look.settled

    def _look(self, *, copy: bool, twice: bool = False) -> _Look:
        """Open the store as a user would, and read it as another program would.

        Everybody who had it open is dead.
        """
        import holdfast

        path = self._image() if copy else self._path
        if not path.exists():
            return _Look({}, oracle.Found(""), [], frozenset())
        started = time.perf_counter()
        try:
            store = holdfast.open(path, durability=self._report.durability)
        except holdfast.HoldfastError as error:
            if self._lives == 0:
                raise DrillError(str(error).replace(str(path), str(self._path))) from None
            found = oracle.Found("")
            return _Look(self._state, found, [f"the store does not open: {error}"], frozenset())
        with store:
            if self._lives:
                self._report.recovery_seconds.append(time.perf_counter() - started)
            settled = frozenset(step.step_id for step in store.recovery.steps)
            problems = oracle.illegal_messages(store)
        found = oracle.read_store(path)
        problems += oracle.faults_of(found)
        if twice:
            holdfast.open(path, durability=self._report.durability).close()
            if oracle.read_store(path) != found:
                problems.append("a second recovery changed the store")
        return _Look(state_of(found), found, problems, settled if copy else frozenset())

    def _image(self) -> Path:
        """The files as the kill has left them."""
        image = self._scratch / "image" / self._path.name
        shutil.rmtree(image.parent, ignore_errors=True)
        image.parent.mkdir()
        for end in ("", "-wal"):
            part = Path(f"{self._path}{end}")
            if part.exists():
                shutil.copyfile(part, f"{image}{end}")
        return image
