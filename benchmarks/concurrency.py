"""What do many streams gain by sharing commits?

Async streams against the sync API called on the loop, at NORMAL (`process`) and at FULL (`power`);
`barrier` with tools running against `process`; two processes against one; threads with and without
a shared writer.  Both sides of a ratio take turns in one run, the ratio is made within a round, and
one round goes first as a warm-up.  Streams begin anew in each round.  See _streams.py for the
closed loop and the Poisson arrivals.  The files lie in the project's folder: see that this is a
disk, with syncs on.

    python benchmarks/concurrency.py [--rounds 7] [--quick]

What dominates: an event lies on its step's own page, so a shared commit still writes a page of the
log, two calls to the kernel, for each stream in it.  Streams that have just begun share pages, and
gain more; the second table has streams that no longer do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from _measure import Spread, Verdicts, folder_on_disk, machine, no_collection
from _streams import Async, Direct, Run, threads

import holdfast

Load = Callable[[], Awaitable[Run]]
NAMES = {"process": "NORMAL", "power": "FULL"}


async def take_turns(loads: Mapping[str, Load], rounds: int) -> dict[str, list[Run]]:
    """Let the loads take turns, each round beginning with another; the first one is a warm-up."""
    names = list(loads)
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for number in range(-1, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            run = await loads[name]()
            if number >= 0:
                runs[name].append(run)
    return runs


def show(runs: Mapping[str, Sequence[Run]]) -> None:
    """A line a load."""
    print(
        f"  {'':<28}{'deltas/s':>9} {'(middle half)':<18}{'p50 us':>8}{'p99':>9}{'max':>9}"
        f"{'gap ms':>8}{'CPU us':>8}{'MB':>6}"
    )
    for name, rounds in runs.items():
        rate = Spread.of([run.rate for run in rounds])

        def median(of: str, rounds: Sequence[Run] = rounds) -> float:
            return statistics.median(getattr(run, of) for run in rounds)

        between = f"({rate.low:,.0f}..{rate.high:,.0f})"
        print(
            f"  {name:<28}{rate.median:>9,.0f} {between:<18}{median('p50'):>8.0f}"
            f"{median('p99'):>9.0f}{max(run.longest for run in rounds):>9.0f}"
            f"{max(run.gap_ms for run in rounds):>8.1f}{median('cpu'):>8.1f}"
            f"{max(run.memory for run in rounds):>6.0f}",
            flush=True,
        )


def ratio(ours: Sequence[Run], theirs: Sequence[Run]) -> Spread:
    """Rate against rate, made within each round."""
    return Spread.of([a.rate / b.rate for a, b in zip(ours, theirs, strict=True)])


# --- async against direct -----------------------------------------------------------------------


async def against_direct(
    folder: Path, level: str, streams: int, deltas: int, rounds: int, *, old: bool = False
) -> Spread:
    """The closed loop; `old`: with streams that have long begun, and go on."""
    name = f"{level}{streams}{old}"
    direct = Direct(folder / f"d{name}.db", level, streams)
    shared = await Async.open(folder / f"a{name}.db", level, streams)
    if old:
        for load in (direct, shared):
            await load.closed_loop(4 * deltas)

    def load(of: Direct | Async) -> Load:
        async def run() -> Run:
            if not old:
                await of.renew()
            return await of.closed_loop(deltas)

        return run

    what = f"{streams:,} streams, {NAMES[level]}" if streams > 1 else f"1 stream, {NAMES[level]}"
    runs = await take_turns(
        {f"direct, {what}": load(direct), f"async, {what}": load(shared)}, rounds
    )
    show(runs)
    await direct.close()
    await shared.close()
    theirs, ours = runs.values()
    return ratio(ours, theirs)


async def poisson(
    folder: Path, level: str, streams: int, rate: float, count: int, rounds: int
) -> None:
    """Streams whose deltas come by themselves."""
    direct = Direct(folder / f"dp{level}{rate}.db", level, streams)
    shared = await Async.open(folder / f"ap{level}{rate}.db", level, streams)
    what = f"{NAMES[level]}, {rate:,.0f}/s"
    loads: dict[str, Load] = {
        f"direct, {what}": lambda: direct.poisson(rate, count),
        f"async, {what}": lambda: shared.poisson(rate, count),
    }
    show(await take_turns(loads, rounds))
    await direct.close()
    await shared.close()


# --- levels, processes, threads -----------------------------------------------------------------


async def barrier_against_process(folder: Path, streams: int, deltas: int, rounds: int) -> Spread:
    """Whole turns at once, each with a tool that runs."""
    stores = {
        level: await Async.open(folder / f"turns-{level}.db", level, streams)
        for level in ("process", "barrier")
    }
    for store in stores.values():
        for step in store.steps:
            await step.discard()
    runs = await take_turns(
        {
            f"{streams} turns, process": lambda: stores["process"].turns(deltas),
            f"{streams} turns, barrier": lambda: stores["barrier"].turns(deltas),
        },
        rounds,
    )
    show(runs)
    for store in stores.values():
        await store.close()
    process, barrier = runs.values()
    return ratio(barrier, process)


class OtherProcess:
    """Streams of a process of their own, which runs a round when it is told to."""

    def __init__(self, path: Path, streams: int, deltas: int, name: str) -> None:
        command = [sys.executable, __file__, "--serve", str(path), str(streams), str(deltas), name]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def say(self, word: str) -> None:
        """Give an order."""
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        """Its answer."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def close(self) -> None:
        """Let it end."""
        self.process.communicate("end\n")


async def serve(path: Path, streams: int, deltas: int, name: str) -> None:
    """Be another process."""
    load = await Async.open(path, "power", streams, name=name)
    for order in iter(sys.stdin.readline, "end\n"):
        if order == "renew\n":
            await load.renew()
            print("renewed", flush=True)
        else:
            print(json.dumps((await load.closed_loop(deltas)).as_dict()), flush=True)
    await load.close()


async def two_processes(folder: Path, streams: int, deltas: int, rounds: int) -> Spread:
    """One store, at FULL: so many streams of one process, or half of them in each of two."""
    pair = [OtherProcess(folder / "two.db", streams // 2, deltas, name) for name in "ab"]
    one = [OtherProcess(folder / "one.db", streams, deltas, "a")]

    async def run(processes: list[OtherProcess]) -> Run:
        for order in ("renew", "go"):
            for process in processes:
                process.say(order)
            answers = [process.hear() for process in processes]
        runs = [Run(**json.loads(answer)) for answer in answers]
        slowest = min(runs, key=lambda run: run.rate)
        # Both have done when the slower one has.
        together = {**slowest.as_dict(), "rate": slowest.rate * len(runs)}
        return Run(**together)

    runs = await take_turns(
        {
            f"1 process, {streams} streams": lambda: run(one),
            f"2 processes, {streams // 2} each": lambda: run(pair),
        },
        rounds,
    )
    for process in pair + one:
        process.close()
    show(runs)
    single, double = runs.values()
    return ratio(double, single)


async def eight_threads(folder: Path, deltas: int, rounds: int) -> Spread:
    """At FULL: the shared writer against a lock around one connection."""
    with (
        holdfast.open(folder / "shared.db", durability="power") as shared,
        holdfast.open(folder / "locked.db", durability="power") as locked,
    ):
        locked.together = None
        steps = {
            "8 threads, a lock": [locked.create_session().begin_step() for _ in range(8)],
            "8 threads, shared writer": [shared.create_session().begin_step() for _ in range(8)],
        }

        def load(name: str) -> Load:
            async def run() -> Run:
                return threads(steps[name], deltas)

            return run

        runs = await take_turns({name: load(name) for name in steps}, rounds)
    show(runs)
    lock, ours = runs.values()
    return ratio(ours, lock)


async def closed_loops(
    folder: Path, rounds: int, share: float, verdicts: Verdicts, *, old: bool
) -> None:
    """Every number of streams at every level, beside its target."""
    some, many = (64, 2000) if share == 1 else (8, 24)
    for level, streams, new_deltas, old_deltas, target in (
        ("process", 1, 8000, 8000, 0.9),
        ("process", some, 150, 150, 1.6),
        ("process", many, 10, 20, 3),
        ("power", some, 40, 40, 12),
        ("power", many, 4, 6, 20),
    ):
        deltas = max(2, int((old_deltas if old else new_deltas) * share))
        found = await against_direct(folder, level, streams, deltas, rounds, old=old)
        first, last = (4 * deltas + 1, (5 + rounds) * deltas) if old else (1, deltas)
        what = f"async / direct, {streams:,} at {NAMES[level]}{', old' if old else ''}"
        verdicts.at_least(what, found, target, f"  deltas {first} to {last} of each stream")


async def measure(folder: Path, rounds: int, share: float, verdicts: Verdicts) -> None:
    def some(count: int) -> int:
        return max(2, int(count * share))

    judge = verdicts.at_least
    streams = 64 if share == 1 else 8
    print("\nClosed loop: async streams against the sync API called on the loop")
    await closed_loops(folder, rounds, share, verdicts, old=False)
    print("\nThe same with streams that have long begun: each has a page of its own in a commit")
    await closed_loops(folder, max(1, rounds // 2), share, verdicts, old=True)
    print("\nPoisson arrivals at all streams together: an append is timed from when its delta came")
    for level, rate in (("process", 8_000), ("power", 2_000), ("power", 8_000)):
        await poisson(folder, level, streams, rate, some(rate), max(1, rounds // 3))
    print("\nWhole turns with a tool that runs")
    found = await barrier_against_process(folder, streams, some(500), rounds)
    judge("barrier / process", found, 0.5)
    print("\nTwo processes on one store, FULL")
    judge("two processes / one", await two_processes(folder, streams, some(100), rounds), 0.4)
    print("\nThreads, FULL")
    judge("shared writer / lock, 8 threads", await eight_threads(folder, some(300), rounds), 2.5)


def main() -> int:
    parser = argparse.ArgumentParser(description="what many streams gain by sharing commits")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="only to see that it works")
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        path, streams, deltas, name = given.serve
        asyncio.run(serve(Path(path), int(streams), int(deltas), name))
        return 0
    verdicts = Verdicts()
    print(machine())
    with folder_on_disk() as folder, no_collection():
        rounds, share = (1, 0.02) if given.quick else (given.rounds, 1.0)
        asyncio.run(measure(folder, rounds, share, verdicts))
    print("\n" + (f"missed: {', '.join(verdicts.over)}" if verdicts.over else "every target met"))
    return 1 if verdicts.over and not given.quick else 0


if __name__ == "__main__":
    sys.exit(main())
