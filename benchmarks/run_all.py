"""Run every benchmark, and write what they print to RESULTS.md and one chart to results.svg.

    python benchmarks/run_all.py [--only append,peers] [--into FOLDER] [--quick]

Some minutes on an idle machine; on a busy one trust only the ratios.  A benchmark that misses a
target or fails is reported and stops none of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from _chart import chart

HERE = Path(__file__).resolve().parent
# What each is given, so that all of them take some minutes.
RUNS = {
    "append": "--rounds 20 --deltas 50000 --entries 20000",
    "concurrency": "--rounds 5",
    "peers": "--rounds 11 --kills 5",
    "scale": "--rounds 5",
    "history": "--rounds 7",
    "recovery": "--rounds 5",
    "tokens": "--runs 40",
}
PACKAGES = ("apsw", "pydantic", "tiktoken", "openai-agents", "langgraph-checkpoint-sqlite")
PACKAGES += ("rocksdict", "uvloop")
VERDICTS = {"OK": "OK", "missed": "missed", "over": "missed"}


def machine() -> str:
    """What this ran on, as lines of Markdown."""
    lines = [
        f"- date: {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        f"- processor: {processor()}, {os.cpu_count()} cores,"
        f" load {', '.join(f'{load:.1f}' for load in os.getloadavg())} at the start",
        f"- system: {platform.system()} {platform.release()}, files on {filesystem()}",
        f"- Python {platform.python_version()}, holdfast {version('holdfast')}",
    ]
    for package in PACKAGES:
        try:
            lines.append(f"- {package} {version(package)}")
        except PackageNotFoundError:
            lines.append(f"- {package}: not installed")
    return "\n".join(lines)


def processor() -> str:
    """Its name, where the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def filesystem() -> str:
    """The kind of file system that the project's folder lies on."""
    asked = subprocess.run(
        ["stat", "-f", "-c", "%T", str(HERE)], capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() or "an unknown file system"


def judged(output: str) -> list[tuple[str, str]]:
    """The lines that stand beside a target, and whether they met it."""
    found = []
    for line in output.splitlines():
        words = line.split()
        if "at most" in line or "at least" in line:
            word = next((VERDICTS[w] for w in words if w in VERDICTS), None)
            if word is not None:
                found.append((word, line.strip()))
    return found


def run(name: str, arguments: str) -> tuple[str, float]:
    """One benchmark: what it printed, and how long it took."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(HERE / f"{name}.py"), *arguments.split()],
        capture_output=True,
        text=True,
        check=False,
    )
    output = done.stdout
    # 1 with nothing but a sentence on stderr: a target was missed, and the output says which.
    if done.returncode not in (0, 1) or "Traceback" in done.stderr:
        output += f"\nFAILED with {done.returncode}:\n{done.stderr[-2000:]}"
    return output.strip(), time.monotonic() - began


def progress(stack: ExitStack, total: int) -> Callable[[str, int], None]:
    """Says what runs now: with a bar, if rich is there."""
    try:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        return lambda name, done: print(f"[{done}/{total}] {name}", flush=True)
    bar = Progress(
        TextColumn("{task.description:<14}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    stack.enter_context(bar)
    task = bar.add_task("", total=total)
    return lambda name, done: bar.update(task, description=name, completed=done)


def report(outputs: dict[str, tuple[str, float]], where: str, quick: bool) -> str:
    """RESULTS.md."""
    verdicts = [(name, *line) for name, (text, _) in outputs.items() for line in judged(text)]
    missed = [(name, line) for name, word, line in verdicts if word == "missed"]
    failed = [name for name, (text, _) in outputs.items() if "\nFAILED with" in f"\n{text}"]
    parts = ["# What it costs, measured", ""]
    if quick:
        parts += ["**A quick look: these sizes only show that the benchmarks run.**", ""]
    parts += [where, "", "Made by `make bench`. Ratios are made within one run; trust them more"]
    parts += ["than microseconds. `OK`, `missed` and `over` stand beside the targets.", ""]
    parts += ["![cost of a delta and deltas lost at a kill](results.svg)", ""]
    parts += [f"{len(verdicts) - len(missed)} of {len(verdicts)} targets met."]
    parts += ["", "Missed:", ""] if missed else [""]
    parts += [f"- {name}: `{' '.join(line.split())}`" for name, line in missed]
    parts += [f"- {name} FAILED, see below" for name in failed]
    for name, (text, took) in outputs.items():
        parts += ["", f"## benchmarks/{name}.py ({took:.0f} s)", "", "```text", text, "```"]
    return "\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="run every benchmark")
    parser.add_argument("--only", help="names, with commas between")
    parser.add_argument("--into", type=Path, default=HERE, help="where the results go")
    parser.add_argument("--quick", action="store_true", help="only to see that it works")
    given = parser.parse_args()
    names = given.only.split(",") if given.only else list(RUNS)
    unknown = set(names) - set(RUNS)
    if unknown:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    where = machine()
    outputs: dict[str, tuple[str, float]] = {}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rows = scratch / "peers.json"
        tell = progress(stack, len(names))
        for done, name in enumerate(names):
            tell(name, done)
            arguments = "--quick" if given.quick else RUNS[name]
            if name == "peers":
                arguments += f" --json {rows}"
            outputs[name] = run(name, arguments)
        tell("done", len(names))
        if rows.exists():
            peers = json.loads(rows.read_text())
            (given.into / "results.svg").write_text(chart(peers), encoding="utf-8")
    text = report(outputs, where, given.quick)
    (given.into / "RESULTS.md").write_text(text, encoding="utf-8")
    failed = [name for name, (output, _) in outputs.items() if "FAILED with" in output]
    print(f"written: {given.into / 'RESULTS.md'}" + (f"; FAILED: {failed}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
