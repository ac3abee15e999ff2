"""What do others pay for keeping a turn, and what do they lose when they are killed?

The same turn for all: 500 deltas of 12 characters, a tool call with its result, the end.  Each peer
does it as it naturally would (see the column `written`), and, where that is possible, bent to
holdfast's promise: each delta on record before it is shown.  Compare rows of the same promise only.
A row that is faster than holdfast says so.

Kills are real: a process streams a delta each half millisecond, says which it has shown, and gets
SIGKILL in mid-stream; another gets it while its tool runs.  What is left is read by a third.

    python benchmarks/peers.py [--rounds 15] [--kills 7] [--json FILE] [--quick]

Peers that are missing are left out:  pip install 'holdfast[bench-peers]'.  Two turns of each go
first as a warm-up.  The files lie in the project's folder: see that this is a disk, with syncs on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter_ns

from _measure import Spread, folder_on_disk, machine, no_collection
from _peers import DELTA, PEERS, Peer
from _peers_other import NEEDS, OTHERS

DELTAS = 500
PACKAGES = ("openai-agents", "langgraph-checkpoint-sqlite", "rocksdict")
# A level of holdfast, and what keeps the same promise for each delta.
EQUALS = {
    "holdfast, process": ("JSONL, flushed", "RocksDB"),
    "holdfast, power": (
        "JSONL, fsync",
        "RocksDB, sync",
        "three b-trees, no buffer",
        "openai-agents, a delta",
        "langgraph, a delta",
    ),
}


def installed() -> dict[str, type[Peer]]:
    """The peers that can run here; says which cannot."""
    chosen = {**PEERS, **OTHERS}
    for prefix, module in NEEDS.items():
        try:
            there = find_spec(module) is not None
        except ModuleNotFoundError:
            there = False
        if not there:
            print(f"{prefix}: not installed: pip install holdfast[bench-peers]")
            chosen = {name: peer for name, peer in chosen.items() if not name.startswith(prefix)}
    return chosen


# --- kills --------------------------------------------------------------------------------------


def forked(work: Callable[[int], object]) -> tuple[int, int]:
    """A child that does `work` with the end of a pipe; its pid and our end."""
    hears, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(hears)
            work(says)
        finally:
            os._exit(0)
    os.close(says)
    return pid, hears


def heard(pipe: int) -> bytes:
    """All that a child still says."""
    with os.fdopen(pipe, "rb") as file:
        return file.read()


def left_behind(peer: type[Peer], path: Path) -> tuple[int, bool]:
    """What is there, read by a process of its own."""
    pid, pipe = forked(lambda says: os.write(says, json.dumps(peer(path).found()).encode()))
    answer = heard(pipe)
    os.waitpid(pid, 0)
    deltas, traced = json.loads(answer or "[0, false]")
    return deltas, traced


def killed_in_stream(peer: type[Peer], path: Path, after: int) -> int:
    """How many deltas were shown and are gone."""

    def stream(says: int) -> None:
        keeper = peer(path)
        keeper.begin()
        while True:
            keeper.delta(DELTA)
            os.write(says, b".")  # Now it is shown.
            time.sleep(0.0005)

    pid, pipe = forked(stream)
    shown = 0
    while shown < after:
        new = len(os.read(pipe, 1))
        if not new:
            raise RuntimeError(f"{peer.__name__}: the stream broke off by itself")
        shown += new
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    shown += len(heard(pipe))
    return shown - left_behind(peer, path)[0]


def killed_in_tool(peer: type[Peer], path: Path) -> bool:
    """Whether anything says that a tool was running."""

    def run(says: int) -> None:
        keeper = peer(path)
        keeper.begin()
        for _ in range(10):
            keeper.delta(DELTA)
        keeper.call()
        os.write(says, b".")  # Now the tool runs.
        time.sleep(60)

    pid, pipe = forked(run)
    assert os.read(pipe, 1), peer
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(pipe)
    return left_behind(peer, path)[1]


# --- times --------------------------------------------------------------------------------------


def one_turn(keeper: Peer, deltas: int) -> tuple[int, list[int]]:
    """Nanoseconds for the whole turn, and for each delta."""
    times = []
    start = perf_counter_ns()
    keeper.begin()
    for _ in range(deltas):
        before = perf_counter_ns()
        keeper.delta(DELTA)
        times.append(perf_counter_ns() - before)
    keeper.call()
    keeper.result()
    keeper.end()
    return perf_counter_ns() - start, times


def measure(
    peers: dict[str, type[Peer]], folder: Path, rounds: int, deltas: int
) -> dict[str, list[tuple[int, list[int]]]]:
    """Turns of all peers, taking turns themselves."""
    keepers = {name: peer(folder / f"t{n}") for n, (name, peer) in enumerate(peers.items())}
    results: dict[str, list[tuple[int, list[int]]]] = {name: [] for name in peers}
    names = list(peers)
    with no_collection():
        for number in range(-2, rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                turn = one_turn(keepers[name], deltas)
                if number >= 0:
                    results[name].append(turn)
    for keeper in keepers.values():
        keeper.close()
    return results


def show(rows: dict[str, dict[str, object]]) -> None:
    """The table."""
    print(
        f"\n{'':<30}{'written':<12}{'a delta survives':<24}{'ms a turn':>10} {'(middle half)':<18}"
        f"{'us a delta':>10}{'p99':>8}{'lost':>6}{'most':>6}  tool left a trace"
    )
    for name, row in rows.items():
        between = f"({row['turn_low']:.2f}..{row['turn_high']:.2f})"
        print(
            f"{name:<30}{row['grain']:<12}{row['survives']:<24}{row['turn_ms']:>10.2f}"
            f" {between:<18}{row['delta_us']:>10.1f}{row['delta_p99']:>8.1f}"
            f"{row['lost']:>6.0f}{row['lost_most']:>6}  {'yes' if row['trace'] else 'no'}"
        )


def compare(results: dict[str, list[tuple[int, list[int]]]]) -> None:
    """Rows of the same promise, whole turns, within each round."""
    print("\nThe same promise for a delta; whole turns, holdfast's time / the other's")
    for ours, others in EQUALS.items():
        for other in others:
            if other not in results:
                continue
            both = zip(results[ours], results[other], strict=True)
            found = Spread.of([mine[0] / theirs[0] for mine, theirs in both])
            word = "the other is faster" if found.median > 1 else "holdfast is faster"
            print(f"  {ours + ' / ' + other:<48}{found!s:<28}{word}")


def main() -> None:
    parser = argparse.ArgumentParser(description="what others pay, and what they lose")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kills", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the table here too")
    parser.add_argument("--quick", action="store_true", help="only to see that it works")
    given = parser.parse_args()
    rounds, kills, deltas = (1, 1, 20) if given.quick else (given.rounds, given.kills, DELTAS)
    print(machine())
    for package in PACKAGES:
        try:
            print(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    peers = installed()
    chance = random.Random(0)
    rows: dict[str, dict[str, object]] = {}
    with folder_on_disk() as folder:
        # Kills first: a fork is best made before anybody has threads.
        for number, (name, peer) in enumerate(peers.items()):
            lost = [
                killed_in_stream(
                    peer, folder / f"k{number}.{n}", chance.randint(deltas // 4, deltas)
                )
                for n in range(kills)
            ]
            rows[name] = {
                "grain": peer.grain,
                "survives": peer.survives,
                "lost": statistics.median(lost),
                "lost_most": max(lost),
                "trace": killed_in_tool(peer, folder / f"w{number}"),
            }
        results = measure(peers, folder, rounds, deltas)
    for name, turns in results.items():
        whole = Spread.of([turn / 1e6 for turn, _ in turns])
        every = sorted(time for _, times in turns for time in times)
        rows[name] |= {
            "turn_ms": whole.median,
            "turn_low": whole.low,
            "turn_high": whole.high,
            "turn_us_a_delta": whole.median * 1000 / deltas,
            "delta_us": statistics.median(every) / 1000,
            "delta_p99": every[len(every) * 99 // 100] / 1000,
        }
    show(rows)
    compare(results)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
