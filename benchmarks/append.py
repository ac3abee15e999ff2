"""What does it cost to have a delta on record before it is shown?

Against what one would write instead: a bare insert into the same table, a line of JSON appended to
a file, and a table with a primary key, a timestamp as text and a partial index (three b-trees).
Contenders take turns in one run; ratios are made within a round (see _measure.py); four rounds go
first as a warm-up, in which the log of a new store reaches its size.  The files lie in the
project's folder: see that this is a disk, with syncs on.

    python benchmarks/append.py [--rounds 60] [--deltas 100000] [--quick]

Last answer (two cores of an AMD EPYC, ext4, Python 3.11, SQLite 3.54; medians; `over` marks a
target that was missed):
    one append 6.5 us, exclusive 3.2, power 113; bare insert 5.6, JSONL flushed 2.8, synced 160
    against a bare insert 1.15 to 1.16 (over), JSONL 2.4 (exclusive 1.15), JSONL synced 0.71,
    three b-trees 0.67; 1,271 bytes a delta; no growth with the stream or with history
    longest append 18 to 70 medians on a quiet machine; 180 to 1,300 (over) beside other programs,
    and there, of those that were not preempted, 11, 16 and, unexplained, 243 in three runs
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import apsw
from _measure import (
    Contender,
    Round,
    Spread,
    Verdicts,
    deltas,
    folder_on_disk,
    interleaved,
    machine,
    mean_ratio,
    no_collection,
    ratio,
    show,
    timed,
    timed_undisturbed,
    written_bytes,
)

import holdfast
from holdfast.journal.engine.steps import APPEND

STEP_DELTAS = 500
Timer = Callable[[Callable[..., object], Sequence[tuple[object, ...]]], Sequence[int]]

THREE_TREES = """
CREATE TABLE stream_journal (
    step_id INTEGER NOT NULL, seq INTEGER NOT NULL, event_type TEXT NOT NULL, content TEXT NOT NULL,
    created_at TEXT NOT NULL, sealed INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (step_id, seq)
);
CREATE INDEX unsealed ON stream_journal (step_id, seq) WHERE sealed = 0;
"""

THREE_TREES_APPEND = """
INSERT INTO stream_journal (step_id, seq, event_type, content, created_at)
VALUES (?, ?, 'text_delta', ?, ?)
"""


# --- the contenders -----------------------------------------------------------------------------


def ours(store: holdfast.Store, count: int, timer: Timer = timed) -> Contender:
    """One step of one session: its appends are timed, its beginning and end are not."""
    session = store.create_session()

    def turn() -> Sequence[int]:
        step = session.begin_step("a-model")
        times = timer(step.append_text, deltas(count))
        step.append_done()
        step.commit()
        return times

    return turn


def bare_insert(path: Path, count: int, *, full: bool = False) -> Contender:
    """The same row, made beforehand, into the same table over a connection with our settings."""
    holdfast.open(path).close()
    db = bare_connection(path, full=full)
    step = 0

    def turn() -> list[int]:
        nonlocal step
        step += 1
        rows = [
            (APPEND, (step << 32 | seq, "text_delta", None, delta, 0xFFFFFFFF - seq))
            for seq, (delta,) in enumerate(deltas(count), 1)
        ]
        times = timed(db.cursor().execute, rows)
        end_step(db)
        return times

    return turn


def three_trees(path: Path, count: int) -> Contender:
    """One table with an index for its key and a partial one, and a timestamp as text."""
    db = bare_connection(path)
    db.execute(THREE_TREES)
    execute = db.cursor().execute
    step = 0

    def turn() -> list[int]:
        nonlocal step
        step, seq = step + 1, 0

        def insert(delta: str) -> None:
            nonlocal seq
            seq += 1
            execute(THREE_TREES_APPEND, (step, seq, delta, datetime.now(UTC).isoformat()))

        times = timed(insert, deltas(count))
        end_step(db)
        return times

    return turn


def bare_connection(path: Path, *, full: bool = False) -> apsw.Connection:
    db = apsw.Connection(str(path))
    db.execute("PRAGMA page_size = 1024")
    assert db.pragma("journal_mode", "wal") == "wal"
    db.execute(f"PRAGMA synchronous = {'FULL' if full else 'NORMAL'}")
    db.execute(f"PRAGMA foreign_keys = ON; PRAGMA journal_size_limit = {8 << 20}")
    db.wal_autocheckpoint(0)
    return db


def end_step(db: apsw.Connection) -> None:
    db.execute("DELETE FROM stream_journal")
    db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)


def jsonl(path: Path, count: int, *, sync: bool = False) -> Contender:
    """A line of JSON a delta, flushed to the kernel or synced to the disk."""
    file = path.open("a", encoding="utf-8")
    step = 0

    def turn() -> list[int]:
        nonlocal step
        step, seq = step + 1, 0

        def append(delta: str) -> None:
            nonlocal seq
            seq += 1
            line = {"step_id": step, "seq": seq, "type": "text_delta", "content": delta}
            file.write(json.dumps(line) + "\n")
            file.flush()
            if sync:
                os.fdatasync(file.fileno())

        return timed(append, deltas(count))

    return turn


# --- the questions ------------------------------------------------------------------------------


def against_others(folder: Path, rounds: int, verdicts: Verdicts) -> None:
    print(f"\nOne append, not synced (`process` and `barrier`), steps of {STEP_DELTAS}")
    with ExitStack() as stack:
        shared = stack.enter_context(holdfast.open(folder / "shared.db"))
        alone = stack.enter_context(holdfast.open(folder / "alone.db", exclusive=True))
        results = interleaved(
            {
                "holdfast": ours(shared, STEP_DELTAS),
                "holdfast, exclusive=True": ours(alone, STEP_DELTAS),
                "bare insert, same table": bare_insert(folder / "bare.db", STEP_DELTAS),
                "JSONL, flushed": jsonl(folder / "log.jsonl", STEP_DELTAS),
                "three b-trees, text timestamp": three_trees(folder / "trees.db", STEP_DELTAS),
            },
            rounds,
        )
    show(results)
    mine, excl = results["holdfast"], results["holdfast, exclusive=True"]
    bare, lines, trees = (
        results[name]
        for name in ("bare insert, same table", "JSONL, flushed", "three b-trees, text timestamp")
    )
    compare(verdicts, "holdfast / bare insert", mine, bare, 1.15)
    compare(verdicts, "holdfast / JSONL flushed", mine, lines, 4)
    compare(verdicts, "holdfast exclusive / JSONL flushed", excl, lines, 2)
    compare(verdicts, "holdfast / three b-trees", mine, trees, 0.7)


def at_power(folder: Path, rounds: int, verdicts: Verdicts) -> None:
    print(f"\nOne append, synced (`power`), steps of {STEP_DELTAS}")
    with holdfast.open(folder / "power.db", durability="power") as power:
        contenders = {
            "holdfast, power": ours(power, STEP_DELTAS),
            "JSONL, fdatasync": jsonl(folder / "synced.jsonl", STEP_DELTAS, sync=True),
            "bare insert, FULL": bare_insert(folder / "full.db", STEP_DELTAS, full=True),
        }
        new, lines, _ = interleaved(contenders, 2, warm_up=0).values()
        results = interleaved(contenders, rounds)
    show(results)
    print(f"  while the log of a new store still grows (first two steps): {ratio(new, lines)}")
    mine = results["holdfast, power"]
    compare(verdicts, "holdfast power / JSONL fdatasync", mine, results["JSONL, fdatasync"], 1.0)


def compare(verdicts: Verdicts, what: str, a: list[Round], b: list[Round], at_most: float) -> None:
    verdicts.judge(what, ratio(a, b), at_most, f"  by means {mean_ratio(a, b).median:.2f}")


def long_run(folder: Path, count: int, verdicts: Verdicts) -> None:
    print(f"\n{count:,} deltas in steps of {STEP_DELTAS}")
    undisturbed: list[int] = []
    with holdfast.open(folder / "run.db") as store:
        warm_up(ours(store, STEP_DELTAS))
        turn = ours(store, STEP_DELTAS, partial(timed_undisturbed, undisturbed=undisturbed))
        before = written_bytes()
        times = [time for _ in range(count // STEP_DELTAS) for time in turn()]
        spent = (written_bytes() - before) / len(times)
    show_tail("holdfast", times)
    show_tail("  not preempted by others", undisturbed)
    verdicts.judge("longest append / p50", max(times) / statistics.median(times), 120)
    verdicts.judge("bytes written a delta, step ends included", spent, 1600)
    turn = bare_insert(folder / "barerun.db", STEP_DELTAS)
    warm_up(turn)
    show_tail("bare insert", [time for _ in range(count // STEP_DELTAS) for time in turn()])


def warm_up(turn: Contender) -> None:
    for _ in range(4):
        turn()


def show_tail(name: str, times: list[int]) -> None:
    ranked = sorted(times)
    median = statistics.median(ranked)
    far = [ranked[int(len(ranked) * share)] / median for share in (0.99, 0.999, 0.9999)]
    print(
        f"  {name}: p50 {median / 1000:.1f} us; over p50: p99 {far[0]:.1f}, p99.9 {far[1]:.1f},"
        f" p99.99 {far[2]:.1f}, max {ranked[-1] / median:.0f} ({len(ranked):,} appends)"
    )


def one_long_stream(folder: Path, count: int, verdicts: Verdicts) -> None:
    print(f"\nOne step of {count:,} deltas")
    with holdfast.open(folder / "long.db") as store:
        times = ours(store, count)()
    tenth = count // 10
    chunk = max(1, tenth // 10)

    def medians(part: Sequence[int]) -> list[float]:
        return [statistics.median(part[n : n + chunk]) for n in range(0, len(part), chunk)]

    first = statistics.median(medians(times[:tenth]))
    grown = Spread.of([late / first for late in medians(times[-tenth:])])
    verdicts.judge("last tenth / first tenth", grown, 1.1)


def beside_much_history(folder: Path, entries: int, rounds: int, verdicts: Verdicts) -> None:
    print(f"\nOne append beside a history of 10 or {entries:,} entries")
    with ExitStack() as stack:
        contenders: dict[str, Contender] = {}
        for count in (10, entries):
            path = folder / f"history{count}.db"
            store = stack.enter_context(holdfast.open(path, durability="process"))
            session = store.create_session()
            for _ in range(count):
                session.add_user("What does the journal hold? " * 8)
            contenders[f"{count:,} entries"] = ours(store, STEP_DELTAS)
        results = interleaved(contenders, rounds)
    show(results)
    few, many = results.values()
    compare(verdicts, "much history / little history", many, few, 1.1)


def main() -> int:
    parser = argparse.ArgumentParser(description="what an append costs")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--deltas", type=int, default=100_000)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--quick", action="store_true", help="only to see that it works")
    arguments = parser.parse_args()
    if arguments.quick:
        global STEP_DELTAS
        STEP_DELTAS = 10
        arguments.rounds, arguments.deltas, arguments.entries = 4, 200, 20
    verdicts = Verdicts()
    print(machine())
    with folder_on_disk() as folder, no_collection():
        against_others(folder, arguments.rounds, verdicts)
        at_power(folder, max(4, arguments.rounds // 3), verdicts)
        long_run(folder, arguments.deltas, verdicts)
        one_long_stream(folder, arguments.deltas, verdicts)
        beside_much_history(folder, arguments.entries, max(4, arguments.rounds // 2), verdicts)
    print("\n" + (f"over: {', '.join(verdicts.over)}" if verdicts.over else "every target met"))
    return 1 if verdicts.over and not arguments.quick else 0


if __name__ == "__main__":
    sys.exit(main())
