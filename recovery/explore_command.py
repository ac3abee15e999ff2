"""The command line of the exploration: `python -m holdfast.recovery.explore`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from holdfast.recovery.explore import Crash, ExplorationReport, explore, repeat
from holdfast.recovery.images import Keep
from holdfast.recovery.recording import LEVELS
from holdfast.recovery.workloads import WORKLOADS

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Explore the workloads that ship, or repeat one state; 1 if a promise was broken.

    2 if there is no such state: the engine or the workload has changed.
    """
    options = _parser(sorted(WORKLOADS)).parse_args(arguments)
    chosen = [
        WORKLOADS[name].at(level)
        for name in (options.workload or WORKLOADS)
        for level in (options.durability or LEVELS)
    ]
    if options.at is not None:
        crash = Crash(options.at, options.loss, _keep(options.keep))
        then = None
        if options.then_at is not None:
            then = Crash(options.then_at, options.then_loss, _keep(options.then_keep))
        try:
            reports = [repeat(workload, crash, then, seed=options.seed) for workload in chosen]
        except ValueError as error:
            print(f"there is no such state (any more): {error}", file=sys.stderr)
            return 2
    else:
        reports = _explore_all(chosen, options.faults.split(","), options.states, options.seed)
    _print_table(reports)
    broken = [violation for report in reports for violation in report.violations]
    for violation in broken:
        print(f"VIOLATION {violation}")
    return 1 if broken else 0


def _parser(names: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m holdfast.recovery.explore", description=main.__doc__
    )
    parser.add_argument("--workload", action="append", choices=names, help="all if left out")
    parser.add_argument("--durability", action="append", choices=LEVELS, help="all if left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--states", type=int, default=200_000, help="how many to visit")
    parser.add_argument("--faults", default="kill,power")
    for prefix, what in (("", "crash"), ("then-", "crash in the recovery from that")):
        parser.add_argument(f"--{prefix}at", type=int, help=f"the {what}: after this operation")
        parser.add_argument(f"--{prefix}loss", choices=("kill", "power"), default="kill")
        parser.add_argument(f"--{prefix}keep", default="none", help="what survives a power loss")
    return parser


def _keep(text: str) -> Keep:
    return int(text) if text.isdecimal() else text


def _explore_all(
    workloads: Sequence[Any], faults: Sequence[Any], states: int, seed: int
) -> list[ExplorationReport]:
    """Share the states among the workloads; where they run out of states, go on with new seeds."""
    reports: list[ExplorationReport] = []
    with _progress_bar(states) as advance:
        while (left := states - sum(report.states for report in reports)) > 0:
            for index, workload in enumerate(workloads):
                share = -(-left // (len(workloads) - index))
                report = explore(workload, faults=faults, budget=share, seed=seed, progress=advance)
                reports.append(report)
                left = max(1, left - report.states)
            seed += 1
    return reports


@contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[int], object]]:
    """A bar where `rich` is installed, and a line now and then where it is not."""
    try:
        from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn
    except ImportError:
        yield _plain_progress(total)
        return
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, refresh_per_second=4) as bar:
        task = bar.add_task("crash states", total=total)
        yield lambda count: bar.advance(task, count)


def _plain_progress(total: int) -> Callable[[int], object]:
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        if done * 20 // total != (done + count) * 20 // total:
            print(f"{done + count} of {total} crash states", file=sys.stderr, flush=True)
        done += count

    return advance


def _print_table(reports: Sequence[ExplorationReport]) -> None:
    heads = ("workload", "level", "seed", "states", "distinct", "nested", "a second", "violations")
    rows: list[tuple[str, ...]] = [
        (
            report.workload,
            report.durability,
            str(report.seed),
            str(report.states),
            str(report.distinct),
            str(report.nested),
            f"{report.states_per_second:.0f}",
            str(len(report.violations)),
        )
        for report in reports
    ]
    sums = [sum(getattr(r, name) for r in reports) for name in ("states", "distinct", "nested")]
    seconds = sum(report.seconds for report in reports)
    speed = sums[0] / seconds if seconds else 0.0
    broken = sum(len(report.violations) for report in reports)
    rows.append(("all", "", "", *map(str, sums), f"{speed:.0f}", str(broken)))
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for row in (heads, *rows):
            print(
                "  ".join(cell.ljust(16 if i == 0 else 10) for i, cell in enumerate(row)).rstrip()
            )
        return
    table = Table()
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index < 2 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=max(96, Console().width)).print(table)
