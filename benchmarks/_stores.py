"""Stores of every size, made for a measurement, and a child to measure memory in."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import holdfast
from holdfast import Message
from holdfast.history.entries import new_entry
from holdfast.journal.engine.rows import NewEntry

ENTRIES_A_COMMIT = 50_000
WORD = "word "


def build(folder: Path, size: int) -> Path:
    """A store with one session of so many entries."""
    path = folder / f"{size}.db"
    with holdfast.open(path, durability="process") as store:
        store.create_session("s")
        for start in range(0, size, ENTRIES_A_COMMIT):
            part = range(start, min(size, start + ENTRIES_A_COMMIT))
            store.engine.add_entries("s", [entry(number) for number in part])
            store.engine.checkpoint()
    return path


def build_many(path: Path, sessions: int, entries: int) -> None:
    """A store with so many sessions of so many entries each: s0, s1, s2 ..."""
    with holdfast.open(path, durability="process") as store:
        for number in range(sessions):
            store.create_session(f"s{number}")
            store.engine.add_entries(f"s{number}", [entry(n) for n in range(entries)])
            if number % 500 == 0:
                store.engine.checkpoint()


def entry(number: int) -> NewEntry:
    message = Message.user(f"message {number}: the journal holds what was shown, in order")
    return new_entry(message, created_us=number, token_count=12, counter="given")


def leave_small_steps(path: Path, count: int) -> None:
    with holdfast.open(path, durability="process") as store:
        for n in range(count):
            step = store.create_session(f"s{n}").begin_step("a-model")
            for _ in range(3):
                step.append_text(WORD)


def in_child(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds that `work` takes in a forked child, and megabytes it needs beyond the start."""
    hear, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.perf_counter()
        work()
        took = time.perf_counter() - began
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(says, f"{took} {grown / 1024}".encode())
        os._exit(0)
    os.close(says)
    took, grown = os.read(hear, 100).split()
    os.close(hear)
    os.waitpid(pid, 0)
    return float(took), float(grown)
