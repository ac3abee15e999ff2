"""The command line."""

from __future__ import annotations

import json
import shlex
import sys

import pytest
from typer.testing import CliRunner

from holdfast.cli import app

AGENT = """
import sys
import holdfast

with holdfast.open(sys.argv[1]) as store:
    while True:
        with store.create_session().begin_step() as step:
            for index in range(20):
                step.append_text(f"{index} ")
"""
# Before anything is put on record, its acknowledgement is sent.
FORGETFUL = """
from holdfast.journal.engine.engine import SqliteEngine
SqliteEngine.append = lambda *args: None
"""


def holdfast(*args: object):
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture
def program(tmp_path):
    """Writes a program; the command that runs it on the store `agent.db`."""

    def write(source: str) -> str:
        (tmp_path / "agent.py").write_text(source)
        return shlex.join([sys.executable, str(tmp_path / "agent.py"), str(tmp_path / "agent.db")])

    return write


def test_a_drill_prints_a_table_and_ends_well():
    result = holdfast("drill", "--kills", 3, "--seed", 1)
    assert result.exit_code == 0, result.output
    for word in ("kills", "lost", "doubled", "in doubt", "time to recover", "p99", "seed 1"):
        assert word in result.stdout


def test_a_drill_of_a_users_program_prints_json(program, tmp_path):
    db = tmp_path / "agent.db"
    result = holdfast("drill", "--command", program(AGENT), "--db", db, "--kills", 3, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["kills"] == 3
    assert (report["lost"], report["doubled"], report["violations"]) == (0, 0, [])


def test_a_broken_promise_ends_with_1_and_how_to_repeat_it(program, tmp_path):
    db = tmp_path / "agent.db"
    options = ("--command", program(FORGETFUL + AGENT), "--db", db, "--kills", 4, "--seed", 3)
    result = holdfast("drill", *options)
    assert result.exit_code == 1, result.output
    assert "VIOLATION" in result.stderr
    assert "repeat: holdfast drill" in result.stderr
    assert "--seed 3" in result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--db", "{tmp}/gone/a.db"), "there is no folder"),
        (("--db", "{tmp}"), "is a folder"),
        (("--db", "{tmp}/text.db"), "no SQLite database"),
        (("--command", "no-such-program", "--db", "{tmp}/a.db"), "not a program"),
        (("--command", "python agent.py"), "--command needs --db"),
        (("--durability", "strong"), "durability is 'strong'"),
    ],
)
def test_what_cannot_be_run_ends_with_2_and_one_line(options, words, tmp_path):
    (tmp_path / "text.db").write_text("not a store" * 100)
    result = holdfast("drill", *(option.format(tmp=tmp_path) for option in options))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("holdfast: ") and result.stderr.count("\n") == 1
    assert words in result.stderr


def test_a_wrong_option_ends_with_2():
    assert holdfast("drill", "--kills", "many").exit_code == 2
    assert holdfast("drill", "--kills", 0).exit_code == 2
