"""What grows with the store, and what with the unfinished steps?

Stores of 10 to 1,000,000 entries in sessions of 100, and stores with 1 to 10,000 unfinished steps
of three deltas.  A delta's append and an open should cost the same on all of them; a listing grows
with its sessions, messages with their session, recovery with what is unfinished.  Stores take turns
and one round goes first as a warm-up.  Memory is what a forked child has at its peak beyond what
it began with.  `history.py` asks the same of one session of a million entries, `recovery.py` of
one endless step.  The files lie in the project's folder: see that this is a disk, with syncs on.

    python benchmarks/scale.py [--rounds 9] [--entries 1000000] [--steps 10000] [--quick]
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter_ns

from _measure import (
    Contender,
    Round,
    Spread,
    Verdicts,
    deltas,
    folder_on_disk,
    interleaved,
    machine,
    no_collection,
    ratio,
    timed,
)
from _stores import build, build_many, in_child, leave_small_steps

import holdfast
from holdfast.recovery import recover

SESSION_ENTRIES = 100
AT_MOST = 1.5
Act = Callable[[holdfast.Store], Sequence[int]]


def once(act: Callable[[], object]) -> list[int]:
    """What one call takes."""
    start = perf_counter_ns()
    act()
    return [perf_counter_ns() - start]


def opening(path: Path) -> Sequence[int]:
    """`holdfast.open`, without the close behind it."""
    times = []
    for _ in range(3):
        start = perf_counter_ns()
        store = holdfast.open(path, durability="process", recover=False)
        times.append(perf_counter_ns() - start)
        store.close()
    return times


def appending(store: holdfast.Store) -> Sequence[int]:
    """Deltas of one step in a session of its own."""
    session = store.create_session()
    step = session.begin_step()
    times = timed(step.append_text, deltas(300))
    step.discard()
    store.delete_session(session.id)
    return times


def listing(store: holdfast.Store) -> Sequence[int]:
    """All sessions."""
    return once(store.sessions)


def reading(store: holdfast.Store) -> Sequence[int]:
    """The messages of one session, ready to be sent."""
    return once(store.session("s0").messages)


def on_open_store(path: Path, act: Act) -> Sequence[int]:
    """Open, act, close; only the act is timed."""
    with holdfast.open(path, durability="process", recover=False) as store:
        return act(store)


def line(what: str, results: Sequence[Sequence[Round]], unit: float, after: str = "") -> None:
    """A row: its median on each store."""
    cells = "".join(
        f"{Spread.of([r.median_ns / unit for r in rs]).median:>14,.2f}" for rs in results
    )
    print(f"  {what:<34}{cells}{after}", flush=True)


def head(what: str, sizes: Sequence[int]) -> None:
    print(f"\n  {what:<34}" + "".join(f"{size:>14,}" for size in sizes))


def measured(
    sizes: Sequence[int], work: Callable[[int], Contender], rounds: int
) -> list[list[Round]]:
    """The same work on each store, taking turns."""
    with no_collection():
        found = interleaved({str(size): work(size) for size in sizes}, rounds, warm_up=1)
    return list(found.values())


def by_entries(folder: Path, sizes: Sequence[int], rounds: int, verdicts: Verdicts) -> None:
    """Stores that have much behind them."""
    paths = {size: folder / f"e{size}.db" for size in sizes}
    for size, path in paths.items():
        build_many(path, max(1, size // SESSION_ENTRIES), min(size, SESSION_ENTRIES))
    head("entries, in sessions of 100", sizes)
    opened = measured(sizes, lambda size: partial(opening, paths[size]), rounds)
    line("open, ms", opened, 1e6)
    found: dict[str, list[list[Round]]] = {}
    for what, act, unit in (
        ("append of a delta, us", appending, 1e3),
        ("list of all sessions, ms", listing, 1e6),
        ("messages of one session, ms", reading, 1e6),
    ):
        found[what] = measured(sizes, lambda s, a=act: partial(on_open_store, paths[s], a), rounds)
        line(what, found[what], unit)
    memory = [in_child(lambda p=path: on_open_store(p, listing))[1] for path in paths.values()]
    print(f"  {'memory of open and list, MB':<34}" + "".join(f"{mb:>14,.1f}" for mb in memory))
    disk = [path.stat().st_size / 1e6 for path in paths.values()]
    print(f"  {'the file, MB':<34}" + "".join(f"{mb:>14,.1f}" for mb in disk))
    appended = found["append of a delta, us"]
    few, many = f"{sizes[0]:,}", f"{sizes[-1]:,}"
    verdicts.judge(f"open, {many} / {few}", ratio(opened[-1], opened[0]), AT_MOST)
    verdicts.judge(f"append, {many} / {few}", ratio(appended[-1], appended[0]), AT_MOST)


def long_sessions(folder: Path, sizes: Sequence[int]) -> None:
    """Messages are all of a session: time and memory are in proportion to it."""
    head("entries, in one session", sizes)
    seconds, memory = [], []
    for size in sizes:
        path = build(folder, size)

        def read(path: Path = path) -> None:
            on_open_store(path, lambda store: once(store.session("s").messages))

        took, peak = in_child(read)
        seconds.append(took)
        memory.append(peak)
    print(f"  {'open and messages, ms':<34}" + "".join(f"{s * 1000:>14,.1f}" for s in seconds))
    print(f"  {'memory, MB':<34}" + "".join(f"{mb:>14,.1f}" for mb in memory))


def by_unfinished(folder: Path, sizes: Sequence[int], rounds: int, verdicts: Verdicts) -> None:
    """Stores that a crash has left."""
    paths = {size: folder / f"u{size}.db" for size in sizes}
    for size, path in paths.items():
        leave_small_steps(path, size)
    head("unfinished steps", sizes)
    copy = folder / "copy.db"

    def recovering(size: int) -> Sequence[int]:
        shutil.copy(paths[size], copy)
        with holdfast.open(copy, durability="process", recover=False) as store:
            times = once(lambda: recover(store))
        copy.unlink()
        return times

    line("open, ms", measured(sizes, lambda size: partial(opening, paths[size]), rounds), 1e6)
    for what, act, unit in (
        ("append of a delta, us", appending, 1e3),
        ("list of all sessions, ms", listing, 1e6),
        ("messages of one session, ms", reading, 1e6),
    ):
        rows = measured(sizes, lambda s, a=act: partial(on_open_store, paths[s], a), rounds)
        line(what, rows, unit)
    recovered = measured(sizes, lambda size: partial(recovering, size), max(2, rounds // 2))
    line("recover, ms", recovered, 1e6)
    memory = [in_child(lambda p=path: holdfast.open(p).close())[1] for path in paths.values()]
    print(f"  {'memory of open with recovery, MB':<34}" + "".join(f"{m:>14,.1f}" for m in memory))
    each = Spread.of([r.median_ns / 1000 / sizes[-1] for r in recovered[-1]])
    verdicts.judge(f"recover, us a step of {sizes[-1]:,}", each, 50)


def main() -> int:
    parser = argparse.ArgumentParser(description="what grows with what")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--quick", action="store_true", help="only to see that it works")
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.entries, given.steps = 2, 1_000, 20
    verdicts = Verdicts()
    print(machine())
    with folder_on_disk() as folder:
        # First: its memory is measured from where this process stands.
        entries = sorted({10, 1_000, given.entries // 10, given.entries} - {1, 100})
        long_sessions(folder, [size for size in entries if size <= 100_000])
        by_entries(folder, entries, given.rounds, verdicts)
        by_unfinished(folder, sorted({1, given.steps // 10, given.steps}), given.rounds, verdicts)
    print("\n" + (f"over: {', '.join(verdicts.over)}" if verdicts.over else "every target met"))
    return 1 if verdicts.over and not given.quick else 0


if __name__ == "__main__":
    sys.exit(main())
