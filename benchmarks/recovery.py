"""What does it cost to open a store after a crash?

Three answers: many small unfinished steps, one endless one, and a long history beside a few.  The
first is the pass alone, on a copy of the same crashed store each round; one round goes first as a
warm-up.  Memory is what a forked child that recovers has at its peak beyond what it began with.
The files lie in the project's folder: see that this is a disk, with syncs on.

    python benchmarks/recovery.py [--rounds 9] [--steps 10000] [--deltas 1000000] [--quick]

Last answer (2 busy cores, Python 3.11): 10,000 steps in 0.4 s; a million deltas in 2.2 s and 5
times their text in memory; 100,000 settled entries cost 5 reads of a page more than 10 do.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from _measure import Spread, Verdicts, folder_on_disk, machine
from _stores import WORD, in_child, leave_small_steps

import holdfast
from holdfast.journal.engine.rows import NewEntry
from holdfast.journal.engine.steps import event_record
from holdfast.recovery import recover
from holdfast.recovery.faults import FaultDisk


def leave_long_step(path: Path, count: int) -> None:
    with holdfast.open(path, durability="process") as store:
        step = store.create_session("s").begin_step("a-model")
        for start in range(1, count + 1, 10_000):
            store.engine.append_many(
                [
                    event_record(step.step_id << 32 | seq, "text_delta", None, WORD)
                    for seq in range(start, min(start + 10_000, count + 1))
                ]
            )


def leave_beside_history(path: Path, entries: int) -> None:
    body = '{"role":"user","content":[{"type":"text","text":"words","signature":null}]}'
    with holdfast.open(path, durability="process") as store:
        store.create_session("old")
        for start in range(0, entries, 10_000):
            batch = [NewEntry("user", body, 1)] * min(10_000, entries - start)
            store.engine.add_entries("old", batch)
        for n in range(10):
            store.create_session(f"s{n}").begin_step().append_text(WORD)


def small_steps(folder: Path, count: int, rounds: int, verdicts: Verdicts) -> None:
    print(f"\n{count:,} unfinished steps of 3 deltas, one a session")
    leave_small_steps(folder / "small.db", count)
    wall, work = [], []
    for number in range(-1, rounds):
        path = folder / f"small{number}.db"
        shutil.copy(folder / "small.db", path)
        with holdfast.open(path, recover=False) as store:
            began, busy = time.perf_counter(), time.process_time()
            report = recover(store)
            if number >= 0:
                wall.append((time.perf_counter() - began) * 1000)
                work.append((time.process_time() - busy) * 1000)
        assert len(report.steps) == count
    print(
        f"  worst round {max(wall):.0f} ms, {Spread.of(wall).median * 1000 / count:.1f} us a step"
    )
    verdicts.judge("the pass, ms", Spread.of(wall), 500)
    verdicts.judge("of it work of this process, ms", Spread.of(work), 500)


def long_step(folder: Path, count: int, verdicts: Verdicts) -> None:
    print(f"\nOne unfinished step of {count:,} deltas")
    leave_long_step(folder / "long.db", count)
    seconds, peak = in_child(lambda: holdfast.open(folder / "long.db").close())
    with holdfast.open(folder / "long.db") as store:
        assert store.session("s").messages()[0].text == WORD * count
    text_mb = len(WORD) * count / (1 << 20)
    print(f"  {seconds:.2f} s, {peak:.0f} MB at the peak for {text_mb:.1f} MB of text")
    verdicts.judge("us a delta", seconds * 1e6 / count, 5)
    verdicts.judge("memory at the peak / text", (peak - 8) / text_mb, 8)


def beside_history(folder: Path, entries: int, verdicts: Verdicts) -> None:
    print(f"\nTen unfinished steps beside a history of 10 or {entries:,} entries")
    counts = []
    for settled in (10, entries):
        path = folder / f"beside{settled}.db"
        leave_beside_history(path, settled)
        with FaultDisk() as disk:
            holdfast.open(path, vfs=disk.name).close()
        counts.append((disk.count("read"), disk.count("write")))
        print(f"  {settled:>9,} entries: {counts[-1][0]} reads, {counts[-1][1]} writes")
    (few_reads, few_writes), (reads, writes) = counts
    verdicts.judge("reads, much / little history", reads / few_reads, 1.2)
    verdicts.judge("writes, much / little history", writes / few_writes, 1.2)


def main() -> int:
    parser = argparse.ArgumentParser(description="what recovery costs")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--deltas", type=int, default=1_000_000)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--quick", action="store_true", help="only to see that it works")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.steps, arguments.deltas, arguments.entries = 2, 20, 2_000, 100
    verdicts = Verdicts()
    print(machine())
    with folder_on_disk() as folder:
        # First: its memory is measured from where this process stands.
        long_step(folder, arguments.deltas, verdicts)
        small_steps(folder, arguments.steps, arguments.rounds, verdicts)
        beside_history(folder, arguments.entries, verdicts)
    print("\n" + (f"over: {', '.join(verdicts.over)}" if verdicts.over else "every target met"))
    return 1 if verdicts.over and not arguments.quick else 0


if __name__ == "__main__":
    sys.exit(main())
