"""Every benchmark runs from beginning to end and prints its targets; no time is judged here."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{script}.py"), *arguments],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_concurrency_prints_every_ratio_beside_its_target():
    out = run("concurrency", "--quick")
    targets = [
        line.split("at least")[1].split()[0] for line in out.splitlines() if "at least" in line
    ]
    assert targets == [*("0.9 1.6 3 12 20".split() * 2), "0.5", "0.4", "2.5"]
    assert "Poisson" in out and "gap ms" in out and "CPU us" in out


def test_scale_prints_a_column_for_each_size():
    out = run("scale", "--quick")
    for row in (
        "append of a delta",
        "open, ms",
        "recover, ms",
        "list of all",
        "messages",
        "memory",
    ):
        assert row in out, row
    assert "at most" in out


def test_everything_is_run_and_written_down_and_holdfast_loses_nothing(tmp_path: Path):
    names = ("peers", "tokens", "append", "history", "recovery")
    run("run_all", "--quick", "--only", ",".join(names), "--into", str(tmp_path))
    text = (tmp_path / "RESULTS.md").read_text()
    for name in names:
        assert f"## benchmarks/{name}.py" in text
    assert "FAILED" not in text and "targets met" in text
    ElementTree.parse(tmp_path / "results.svg")
    for prefix, module in (
        ("openai", "agents"),
        ("langgraph", "langgraph"),
        ("RocksDB", "rocksdict"),
    ):
        if importlib.util.find_spec(module) is None:
            assert f"{prefix}: not installed: pip install holdfast[bench-peers]" in text
    kept = [line for line in text.splitlines() if line.startswith("holdfast, ") and "yes" in line]
    assert len(kept) == 3
    assert all(line.split()[-3:] == ["0", "0", "yes"] for line in kept)


@pytest.mark.parametrize("lost", [0, 400])
def test_the_chart_tells_apart_what_a_delta_has_survived(lost: int):
    row = {"turn_us_a_delta": 10.0, "lost_most": lost, "survives": "nothing" if lost else "kill"}
    svg = load("_chart").chart({"a & b": row})
    assert "a &amp; b" in svg and f">{lost}<" in svg
    assert ("may be lost" in svg) == bool(lost)
    assert "prefers-color-scheme: dark" in svg
