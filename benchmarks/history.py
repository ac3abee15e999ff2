"""Does a session of a million entries open and append like one of ten?

Stores of 10, 1,000 and 1,000,000 entries in one session.  `open` is `holdfast.open` to the first
look at the session (its length and its newest entry); `append` is one `history.push` with its token
count given, at the level "process", so that no disk is waited for.  Contenders take turns; a ratio
is made within a round.  Pages are counted by a file layer of our own, over an open and one append
with nothing cached; times are taken without it.

    python benchmarks/history.py [--rounds 15] [--large 1000000] [--quick]

Last answer (two cores of an AMD EPYC, Python 3.11, SQLite 3.54; a million against ten):
    open      1.9 ms against 2.2 ms, ratio 0.97    38 pages against 36, ratio 1.06
    append    28 us against 28 us,   ratio 1.00     8 pages against 6,  ratio 1.33
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter_ns

from _measure import Verdicts, folder_on_disk, interleaved, machine, no_collection, ratio, show
from _stores import build

import holdfast
from holdfast import Message
from holdfast.recovery.faults import FaultDisk

AT_MOST = 1.5
APPENDS = 50
OPENS = 4


def look(path: Path, vfs: str | None = None) -> holdfast.Store:
    """Open a store as far as a program needs to go on with its session."""
    store = holdfast.open(path, durability="process", vfs=vfs)
    assert store.session("s").history.entries()[-1].token_count == 12
    return store


def opens(path: Path) -> Sequence[int]:
    times = []
    for _ in range(OPENS):
        start = perf_counter_ns()
        store = look(path)
        times.append(perf_counter_ns() - start)
        store.close()
    return times


def appends(path: Path) -> Sequence[int]:
    times = []
    message = Message.user("one more")
    with look(path) as store:
        history = store.session("s").history
        for _ in range(APPENDS):
            start = perf_counter_ns()
            added = history.push(message, 12)
            times.append(perf_counter_ns() - start)
            history.pop_if_last(added)  # So that the store stays what it is.
    return times


def pages(path: Path) -> tuple[int, int]:
    """Pages read by an open, and by one append behind it."""
    with FaultDisk() as disk:
        store = look(path, vfs=disk.name)
        opened = disk.count("read")
        history = store.session("s").history
        before = disk.count("read")
        added = history.push(Message.user("one more"), 12)
        appended = disk.count("read") - before
        history.pop_if_last(added)
        store.close()
    return opened, appended


def main() -> None:
    parser = argparse.ArgumentParser(description="open and append, by length of the history")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--large", type=int, default=1_000_000)
    parser.add_argument("--quick", action="store_true", help="only to see that it works")
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.large = 2, 2_000
    sizes = (10, 1_000, given.large)
    print(machine())
    verdicts = Verdicts()
    with folder_on_disk() as folder:
        paths = {size: build(folder, size) for size in sizes}
        for size in sizes:
            print(f"  {size:>9,} entries: {paths[size].stat().st_size / 1e6:.1f} MB")
        read = {size: pages(paths[size]) for size in sizes}
        kinds: dict[str, Callable[[Path], Sequence[int]]] = {"open": opens, "append": appends}
        for index, (kind, act) in enumerate(kinds.items()):
            print(f"{kind}:")
            contenders = {f"{size:,} entries": partial(act, paths[size]) for size in sizes}
            with no_collection():
                results = interleaved(contenders, given.rounds)
            show(results)
            few = results[f"{sizes[0]:,} entries"]
            for size in sizes[1:]:
                against = f"{size:,} against {sizes[0]}"
                spread = ratio(results[f"{size:,} entries"], few)
                verdicts.judge(f"time to {kind}, {against}", spread, AT_MOST)
                least = max(read[sizes[0]][index], 1)
                verdicts.judge(
                    f"pages read, {kind}, {against}",
                    read[size][index] / least,
                    AT_MOST,
                    f"({read[size][index]} against {read[sizes[0]][index]})",
                )
    if verdicts.over and not given.quick:
        raise SystemExit(f"over the target: {', '.join(verdicts.over)}")


if __name__ == "__main__":
    main()
