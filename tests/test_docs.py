"""The code in the guides and in the README runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python ?(?P<name>\S*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: str) -> list[tuple[str, str]]:
    """The blocks of Python of a page: the file each is for, or "", and its code."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [(found["name"], found["code"]) for found in BLOCK.finditer(text)]


def run(folder: Path, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_first_program_of_the_readme_runs_and_recovers_nothing(tmp_path):
    (tmp_path / "first.py").write_text(blocks("README.md")[0][1])
    assert "On my way." in run(tmp_path, "first.py")
    assert "Nothing to recover." in run(tmp_path, "first.py")


def test_the_async_program_of_the_readme_runs(tmp_path):
    (tmp_path / "second.py").write_text(blocks("README.md")[1][1])
    assert "text='Hi'" in run(tmp_path, "second.py")


def test_the_program_of_the_readme_is_short_enough_to_be_read():
    assert len(blocks("README.md")[0][1].splitlines()) <= 16


def test_the_guide_shows_every_way_to_test_an_agent():
    text = (ROOT / "docs/testing-your-agent.md").read_text(encoding="utf-8")
    for name in ("holdfast_store", "fault_disk", "killable", "explore", "JournalMachine", "drill"):
        assert name in text


def test_the_files_of_the_guide_are_tests_that_pass(tmp_path):
    for name, code in blocks("docs/testing-your-agent.md"):
        if name:
            (tmp_path / name).write_text(code)
    assert "3 passed" in run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider")


def test_the_other_blocks_of_the_guide_run_one_after_the_other(tmp_path):
    """A reader pastes them into one file, in the order in which they stand."""
    program = "\n".join(code for name, code in blocks("docs/testing-your-agent.md") if not name)
    (tmp_path / "guide.py").write_text(program)
    out = run(tmp_path, "guide.py")
    assert re.search(r"kills +5 ", out)
    assert "400 crash states" in out


@pytest.mark.parametrize("page", ["README.md", "docs/testing-your-agent.md"])
def test_every_link_to_a_page_leads_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []
