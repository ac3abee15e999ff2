"""Measuring on a busy machine: contenders take turns, and ratios are made within a round.

A disk or a neighbour that is slow for a second is then slow for all of them alike.  Every number is
the median over the rounds, with the middle half of them as its spread.
"""

from __future__ import annotations

import gc
import os
import platform
import resource
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns

import apsw

# A contender does its work once and gives back what each operation took, in nanoseconds.
Contender = Callable[[], Sequence[int]]
WORDS = ("The ", "journal", " holds", " what", " was", " shown", ",", " in", " order", ".\n")


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of one contender: its median and p99, and the mean, which the slow ones are in."""

    median_ns: float
    p99_ns: float
    mean_ns: float

    @classmethod
    def of(cls, times: Sequence[int]) -> Round:
        """Sum up one turn."""
        ranked = sorted(times)
        p99 = ranked[min(len(ranked) - 1, len(ranked) * 99 // 100)]
        return cls(statistics.median(ranked), p99, sum(ranked) / len(ranked))


@dataclass(frozen=True, slots=True)
class Spread:
    """A median over the rounds, and the middle half of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Sum up all rounds."""
        if len(values) < 4:
            return cls(statistics.median(values), min(values), max(values))
        low, middle, high = statistics.quantiles(values, n=4)
        return cls(middle, low, high)

    def __str__(self) -> str:
        return f"{self.median:8.2f}  ({self.low:.2f}..{self.high:.2f})"


def deltas(count: int) -> list[tuple[str]]:
    """A stream of small pieces of text, as arguments for a call."""
    return [(WORDS[n % len(WORDS)],) for n in range(count)]


def timed(act: Callable[..., object], arguments: Sequence[tuple[object, ...]]) -> list[int]:
    """Call `act` with each of the arguments; what each call took, in nanoseconds."""
    times: list[int] = []
    note = times.append
    for given in arguments:
        start = perf_counter_ns()
        act(*given)
        note(perf_counter_ns() - start)
    return times


def timed_undisturbed(
    act: Callable[..., object], arguments: Sequence[tuple[object, ...]], undisturbed: list[int]
) -> list[int]:
    """The same; times of calls during which the kernel gave our core to nobody else are noted too.

    An involuntary switch is another program's doing; a call that waits by itself, for a disk or a
    lock, switches voluntarily and is not excused.
    """
    times: list[int] = []
    for given in arguments:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
        start = perf_counter_ns()
        act(*given)
        took = perf_counter_ns() - start
        times.append(took)
        if resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw == before:
            undisturbed.append(took)
    return times


def interleaved(
    contenders: Mapping[str, Contender], rounds: int, *, warm_up: int = 4
) -> dict[str, list[Round]]:
    """Let the contenders take turns, each round beginning with another."""
    names = list(contenders)
    results: dict[str, list[Round]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            times = contenders[name]()
            if number >= 0:
                results[name].append(Round.of(times))
    return results


def show(results: Mapping[str, Sequence[Round]]) -> None:
    """A line a contender: microseconds an operation."""
    print(f"  {'us an operation':<34}{'median':>8}  (middle half)    p99")
    for name, rounds in results.items():
        median = Spread.of([r.median_ns / 1000 for r in rounds])
        p99 = statistics.median(r.p99_ns / 1000 for r in rounds)
        print(f"  {name:<34}{median!s:<26}{p99:8.1f}")


def ratio(ours: Sequence[Round], theirs: Sequence[Round]) -> Spread:
    """Median against median, made within each round."""
    return Spread.of([a.median_ns / b.median_ns for a, b in zip(ours, theirs, strict=True)])


def mean_ratio(ours: Sequence[Round], theirs: Sequence[Round]) -> Spread:
    """The same over the means: slow operations count in full."""
    return Spread.of([a.mean_ns / b.mean_ns for a, b in zip(ours, theirs, strict=True)])


class Verdicts:
    """Prints each measured number beside its target, and remembers whether all were met."""

    def __init__(self) -> None:
        self.over: list[str] = []

    def judge(self, what: str, value: Spread | float, at_most: float, note: str = "") -> None:
        """Say whether a number is within its target."""
        number = value.median if isinstance(value, Spread) else value
        word = "OK" if number <= at_most else "over"
        if word == "over":
            self.over.append(what)
        shown = str(value) if isinstance(value, Spread) else f"{value:8.2f}"
        print(f"  {what:<46}{shown:<24} at most {at_most:<8g}{word:<5}{note}")

    def at_least(self, what: str, value: Spread | float, target: float, note: str = "") -> None:
        """The same for a number that should not be small."""
        number = value.median if isinstance(value, Spread) else value
        word = "OK" if number >= target else "missed"
        if word == "missed":
            self.over.append(what)
        shown = str(value) if isinstance(value, Spread) else f"{value:8.2f}"
        print(f"  {what:<46}{shown:<24} at least {target:<7g}{word:<7}{note}", flush=True)


def written_bytes() -> int:
    """Bytes that this process gave to write calls so far; a mapped file is not counted."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("wchar:"):
            return int(line.split()[1])
    raise OSError("no wchar in /proc/self/io")


@contextmanager
def folder_on_disk() -> Iterator[Path]:
    """A folder in the project's own, on whatever disk that is: /tmp may be memory."""
    home = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=home) as name:
        yield Path(name)


@contextmanager
def no_collection() -> Iterator[None]:
    """Without Python's garbage collector, which is no part of the question."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def machine() -> str:
    """What this ran on, in one line."""
    return (
        f"Python {platform.python_version()}, SQLite {apsw.sqlite_lib_version()},"
        f" {os.cpu_count()} cores, {platform.system()} {platform.machine()}"
    )
