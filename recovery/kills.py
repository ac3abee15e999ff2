"""When a victim is killed, and what it has said until then."""

from __future__ import annotations

import os
import random
import selectors
import shlex
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.recovery.acks import Line, decode
from holdfast.recovery.drill_judge import Life
from holdfast.recovery.drill_report import DrillError, DrillReport
from holdfast.recovery.nursery import NOT_FOUND, Nursery

PATIENCE_SECONDS = 20.0  # a victim that says nothing for so long is killed where it is
LONGEST_SECONDS = 0.05  # an agent does not live longer than this, even if its moment never comes
PIPE_BYTES = 1 << 16
# Calls that wait for the disk: a kill that is aimed at one of them lands in the middle of it.
AIMS = ("session", "user", "begin", "seal", "start", "result", "commit", "commit", "discard")
LIVES_WITHOUT_A_KILL = 10


def program_of(command: str | list[str]) -> list[str]:
    """The command as a list, once it is known that there is such a program."""
    try:
        argv = shlex.split(command) if isinstance(command, str) else list(command)
    except ValueError as error:
        raise DrillError(f"the command {command!r} cannot be read: {error}") from None
    if not argv:
        raise DrillError("the command is empty, expected a program and its arguments")
    if shutil.which(argv[0]) is None:
        raise DrillError(f"the command {argv[0]!r} is not a program that can be run")
    return argv


@dataclass(slots=True)
class Plan:
    """The moment a victim is to die: when it says something for the nth time, and a bit later."""

    sign: str
    kind: str | None  # None: any
    nth: int
    wait: float  # seconds

    @classmethod
    def of_agent(cls, chance: random.Random, report: DrillReport) -> Plan:
        """Spread over opening and recovery, the calls that wait for the disk, and any moment."""
        way = chance.random()
        if way < 0.25:
            return cls("*", "opening", 1, chance.uniform(0, 1.2 * report.opening_guess))
        if way < 0.6:
            nth = 1 if chance.random() < 0.6 else chance.randint(1, 4)
            return cls("?", chance.choice(AIMS), nth, chance.uniform(0, 0.0008))
        return cls("*", "open", 1, chance.uniform(0, 0.015))

    @classmethod
    def of_program(cls, chance: random.Random, report: DrillReport) -> Plan:
        """While it opens the store, or behind some acknowledgement."""
        way = chance.random()
        if way < 0.2:
            return cls("*", "opening", 1, chance.uniform(0, 1.2 * report.opening_guess))
        wait = chance.uniform(0, 0.003) if way < 0.8 else chance.uniform(0, 0.05)
        return cls("!", None, chance.randint(1, report.acks_guess), wait)


@dataclass(slots=True)
class Victim:
    """A process that lives until its moment comes."""

    pid: int
    fd: int
    life: Life
    plan: Plan
    deadline: float
    store: str | None = None  # acknowledgements of this store count; None: of every one
    words: Path | None = None  # what it writes to stderr
    was_killed: bool = False
    where: str = "starting"
    last_words: str = ""
    opening_at: float = 0.0
    _text: bytearray = field(default_factory=bytearray)
    _heard: int = 0
    _openings: set[int] = field(default_factory=set)

    def hear(self, text: bytes, report: DrillReport) -> None:
        """Take in what has come through the pipe."""
        self._text += text
        whole = self._text.rfind(b"\n") + 1
        lines = decode(bytes(self._text[:whole]))
        del self._text[:whole]
        for line in lines:
            if self._counts(line):
                self._note(line, report)

    def _counts(self, line: Line) -> bool:
        if self.store is None:
            return True
        if line.sign == "*" and line.data == self.store:
            self._openings.add(line.opening)
        return line.opening in self._openings

    def _note(self, line: Line, report: DrillReport) -> None:
        self.life.hear(line)
        if line.sign == "*":
            self.where = "opening" if line.kind == "opening" else "between calls"
            if line.kind == "opening":
                self.opening_at = time.perf_counter()
            elif line.kind == "open" and self.opening_at:
                took = time.perf_counter() - self.opening_at
                report.opening_guess += (took - report.opening_guess) / 8
            else:
                self.last_words = line.kind
        elif line.sign == "?":
            self.where = line.kind
        else:
            self.where = "between calls" if self.store is None else f"after {line.kind}"
        if (line.sign, self.plan.kind or line.kind) == (self.plan.sign, line.kind):
            self._heard += 1
            if self._heard == self.plan.nth:
                self.deadline = min(self.deadline, time.perf_counter() + self.plan.wait)


class Victims:
    """Those who live, and how they die."""

    def __init__(self, nursery: Nursery, report: DrillReport, chance: random.Random) -> None:
        self._nursery, self._report = nursery, report
        self.living: list[Victim] = []
        self._unkilled = 0

    def start(self, order: dict[str, Any], life: Life, plan: Plan) -> None:
        """Start an agent of ours."""
        listen, tell = os.pipe()
        pid = self._nursery.start(order, [tell])
        self.living.append(Victim(pid, listen, life, plan, time.perf_counter() + LONGEST_SECONDS))

    def start_program(
        self, argv: list[str], life: Life, plan: Plan, store: str, folder: Path
    ) -> None:
        """Start the user's program."""
        words = folder / "stderr"
        log = os.open(words, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        listen, tell = os.pipe()
        pid = self._nursery.start({"argv": argv}, [tell, log])
        deadline = time.perf_counter() + PATIENCE_SECONDS
        victim = Victim(pid, listen, life, plan, deadline, os.path.realpath(store), words)
        self.living.append(victim)

    def next_death(self) -> Victim:
        """Wait until one of the living dies, by our hand or by itself."""
        with selectors.DefaultSelector() as selector:
            for victim in self.living:
                selector.register(victim.fd, selectors.EVENT_READ, victim)
            while True:
                first = min(self.living, key=lambda victim: victim.deadline)
                left = first.deadline - time.perf_counter()
                if left <= 0:
                    return self._bury(first, kill=True)
                for key, _ in selector.select(left):
                    text = os.read(key.fd, PIPE_BYTES)
                    if not text:
                        return self._bury(key.data, kill=False)
                    key.data.hear(text, self._report)

    def _bury(self, victim: Victim, *, kill: bool) -> Victim:
        """Kill it if it is not dead yet, and take in its last words."""
        if kill:
            # Not yet reaped, so the pid is still its own.
            if victim.store is None:
                os.kill(victim.pid, signal.SIGKILL)
            else:
                os.killpg(victim.pid, signal.SIGKILL)
        while text := os.read(victim.fd, PIPE_BYTES):
            victim.hear(text, self._report)
        os.close(victim.fd)
        code = self._nursery.reap(victim.pid)
        victim.was_killed = code == -signal.SIGKILL
        self.living.remove(victim)
        if victim.store is not None:
            self._consider_program(victim, code)
        elif not victim.was_killed and not victim.last_words:
            victim.last_words = f"ended by itself with {code}"
        return victim

    def _consider_program(self, victim: Victim, code: int) -> None:
        """A program that ends by itself is no kill; learn how long its lives are."""
        report = self._report
        acked = len(victim.life.acks)
        if not victim.was_killed:
            if code != 0:
                what = f"ended by itself with {code}{_tail(victim.words)}"
                if report.kills == 0 or code == NOT_FOUND:
                    raise DrillError(f"the program {what}")
                victim.last_words = (
                    what  # It has run before, and a kill is what it does not survive.
                )
                return
            self._unkilled += 1
            report.acks_guess = max(1, acked)
        else:
            self._unkilled = 0
        if victim.where == "starting":
            raise DrillError(
                f"the program never opened {victim.store} with holdfast.open in the process that"
                f" was started{_tail(victim.words)}"
            )
        if self._unkilled >= LIVES_WITHOUT_A_KILL:
            raise DrillError(
                f"the program ended by itself {self._unkilled} times in a row before it could be"
                " killed: let it do more"
            )


def _tail(words: Path | None) -> str:
    """The last line that it wrote to stderr."""
    if words is None:
        return ""
    lines = words.read_text(errors="replace").strip().splitlines()
    return f": {lines[-1]}" if lines else "; it printed nothing"
