"""The command line: `holdfast drill`. It needs the extra `cli` (typer and rich)."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from holdfast.journal.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.recovery.drill_report import DrillReport

try:
    import typer
except ImportError:  # pragma: no cover  (the extra is there wherever the tests run)
    sys.exit("holdfast: the command line needs two more packages: pip install 'holdfast[cli]'")

app = typer.Typer(
    name="holdfast",
    help="A crash-safe journal for LLM agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _holdfast() -> None:
    """A crash-safe journal for LLM agents."""


@app.command()
def drill(
    db: Annotated[
        Path | None, typer.Option(help="The store; a new one that is thrown away if left out.")
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(help="Your program, which opens this store; an agent of ours if left out."),
    ] = None,
    kills: Annotated[int, typer.Option(min=1, help="How often to kill.")] = 100,
    seed: Annotated[int | None, typer.Option(help="The same plan of kills again.")] = None,
    durability: Annotated[str, typer.Option(help="process, barrier or power.")] = "barrier",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Kill an agent again and again with SIGKILL, and hold its store to every promise.

    Ends with 1 if a promise was broken, with 2 if the drill could not be run.
    """
    from holdfast.recovery.drill import run_drill

    if command is not None and db is None:
        _refuse("--command needs --db: the store that the program opens")
    try:
        with _store(db) as path, _progress(kills, quiet=as_json) as advance:
            report = run_drill(
                path,
                kills=kills,
                durability=durability,
                command=command,
                seed=seed,
                progress=advance,
            )
    except (HoldfastError, ValueError, OSError) as error:
        _refuse(str(error))
    if as_json:
        typer.echo(report.to_json())
    else:
        _print_table(report)
    if not report.ok:
        typer.echo("\n".join(report.accusation()), err=True)
        raise typer.Exit(1)


def _refuse(problem: str) -> None:
    typer.echo(f"holdfast: {' '.join(problem.split())}", err=True)
    raise typer.Exit(2)


@contextmanager
def _store(db: Path | None) -> Iterator[Path]:
    if db is not None:
        yield db
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-drill-") as folder:
        yield Path(folder, "drill.db")


@contextmanager
def _progress(total: int, *, quiet: bool) -> Iterator[Callable[[int], object]]:
    """A bar for people; programs that read us get none."""
    if quiet or not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("kills", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("kills", total=total)
        yield lambda count: bar.advance(task, count)


def _print_table(report: DrillReport) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        typer.echo("\n".join(f"{name}: {value}" for name, value in report.rows()))
        return
    what = report.command or "our own agent"
    table = Table(title=f"{what} at {report.durability}, seed {report.seed}", show_header=False)
    for name, value in report.rows():
        table.add_row(name, value)
    Console().print(table)


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
