"""Drills: 500 real kills, and drills that must go red."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.recovery import kills, oracle
from holdfast.recovery.drill import DrillError, run_drill
from holdfast.recovery.drill_judge import Life, judge_agents, judge_program, state_of
from holdfast.recovery.drill_report import DrillReport
from holdfast.recovery.told import Ack

PROGRAM = """
import sys
import holdfast

def resolver(call):
    return holdfast.ToolResult(call.call_id, "looked it up", synthetic="resolved")

with holdfast.open(sys.argv[1] + ".other") as other:
    other.create_session().add_user("a store that the drill does not look at")

with holdfast.open(sys.argv[1], resolver=resolver, durability="process") as store:
    for turn in range(40):
        session = store.create_session()
        session.add_user(f"question {turn}")
        with session.begin_step() as step:
            for index in range(20):
                step.append_text(f"{turn}.{index} ")
            step.announce_call("a", "look")
            step.append_args("a", '{"where": "there"}')
            step.append_done()
            step.execute(step.seal().tool_calls[0], lambda where: where * 9)
        if turn % 4 == 0:
            step = session.begin_step()
            step.append_text("never mind")
            step.discard()
        if turn % 5 == 0:
            store.delete_session(session.id)
"""


def command(folder: Path, source: str, *, name: str = "agent.db") -> str:
    (folder / "program.py").write_text(source)
    return shlex.join([sys.executable, str(folder / "program.py"), str(folder / name)])


# --- drills that must be green ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("durability", "count"), [("process", 200), ("barrier", 200), ("power", 90)]
)
def test_no_kill_breaks_a_promise(durability, count, tmp_path):
    path = tmp_path / "agent.db"
    report = run_drill(path, kills=count, durability=durability, seed=count)
    assert report.violations == [], report.summary()
    assert (report.kills, report.lost, report.doubled) == (count, 0, 0)
    assert report.acked > count
    # The kills have found agents in the midst of everything.
    assert {"opening", "between calls"} < set(report.where)
    assert set(report.where) & set(kills.AIMS)
    assert path.stat().st_size < 2_000_000
    with holdfast.open(path) as store:
        assert store.stats().sessions < 40


def test_no_kill_breaks_a_promise_to_a_users_program(tmp_path):
    """It deletes, discards and resolves: what only it knows to be right is not held against it."""
    path = tmp_path / "agent.db"
    report = run_drill(path, kills=10, command=command(tmp_path, PROGRAM), seed=5)
    assert report.violations == [], report.summary()
    assert report.kills == 10
    assert report.acked > 10
    assert not list(tmp_path.glob(".holdfast-drill*"))


def test_what_a_store_held_before_a_drill_is_as_it_was(tmp_path):
    with holdfast.open(tmp_path / "agent.db") as store:
        store.create_session("drill-1").add_user("mine")
    assert run_drill(tmp_path / "agent.db", kills=5, seed=1).violations == []
    with holdfast.open(tmp_path / "agent.db") as store:
        assert [m.text for m in store.session("drill-1").messages()] == ["mine"]


# --- drills that must be red --------------------------------------------------------------------


def test_an_agent_that_acknowledges_before_it_calls_turns_a_drill_red(tmp_path):
    report = run_drill(tmp_path / "agent.db", kills=150, seed=2, agent="liar")
    assert report.violations
    assert report.lost > 0
    assert f"--seed {report.seed}" in report.summary()


LIAR = '''
import os, sys
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.journal.observers import StoreEvent
import holdfast

def forgetful(self, key, kind, call, content):
    """Acknowledges, and puts nothing on record."""

SqliteEngine.append = forgetful
with holdfast.open(sys.argv[1]) as store:
    for turn in range(1000):
        step = store.create_session().begin_step()
        for index in range(20):
            step.append_text("lost ")
'''


def test_a_store_that_loses_what_a_program_said_turns_a_drill_red(tmp_path):
    told = command(tmp_path, LIAR)
    report = run_drill(tmp_path / "agent.db", kills=3, command=told, seed=2)
    assert report.violations
    assert report.lost > 0
    assert "--command" in report.repeat


FRAGILE = """
import sys
import holdfast

with holdfast.open(sys.argv[1]) as store:
    if store.sessions():
        sys.exit("I did not expect to be killed")
    while True:
        store.create_session()
"""


def test_a_program_that_does_not_survive_its_own_crash_turns_a_drill_red(tmp_path):
    report = run_drill(tmp_path / "agent.db", kills=25, command=command(tmp_path, FRAGILE), seed=8)
    assert report.kills < 25
    assert "I did not expect to be killed" in report.violations[0]


# --- the judge, on files that are wrong ---------------------------------------------------------


@pytest.fixture
def settled(tmp_path):
    """A store in which one agent has lived, and what it was told."""
    path = tmp_path / "agent.db"
    with holdfast.open(path) as store:
        session = store.create_session("s")
        session.add_user("question")
        step = session.begin_step()
        step.append_text("one ")
        step.append_text("two ")
        step.announce_call("a", "tool")
        step.append_args("a", "{}")
        step.append_done()
        step.seal()
        step.start_call("a")
        step.record_result("a", "answer")
        step.commit()
    acks = [
        Ack("session", 0, 0, "s"),
        Ack("user", 0, 0, ["s", "question"]),
        Ack("begin", 1, 0, "s"),
        Ack("text", 1, 1, "one "),
        Ack("text", 1, 2, "two "),
        Ack("call", 1, 3, ["a", "tool"]),
        Ack("args", 1, 4, ["a", "{}"]),
        Ack("done", 1, 5),
        Ack("seal", 1, 5),
        Ack("start", 1, 5, "a"),
        Ack("result", 1, 5, ["a", "answer"]),
        Ack("commit", 1, 5),
    ]
    return oracle.read_store(path), acks


def both(found, acks):
    """The verdicts of both judges on one life."""
    own = judge_agents({}, found, [Life(1, ("s",), list(acks))])
    return own, judge_program({}, found, Life(1, (), list(acks)))


def test_a_file_that_holds_what_was_promised_is_found_good(settled):
    found, acks = settled
    for verdict in both(found, acks):
        assert (verdict.problems, verdict.lost, verdict.doubled) == ([], 0, 0)


def test_one_call_under_way_may_be_on_record_and_no_other(settled):
    found, acks = settled
    for number, ack in enumerate(acks):
        life = Life(1, ("s",), acks[:number], under_way=ack)
        rest_has_no_effect = all(a.kind in ("begin", "seal", "commit") for a in acks[number + 1 :])
        assert (judge_agents({}, found, [life]).problems == []) is rest_has_no_effect


def test_a_piece_that_is_not_there_is_lost(settled):
    found, acks = settled
    more = [*acks[:5], Ack("text", 1, 9, "three "), *acks[5:]]
    for verdict in both(found, more):
        assert verdict.problems
        assert (verdict.lost, verdict.doubled) == (1, 0)


def test_a_piece_that_is_there_twice_is_doubled(settled):
    found, acks = settled
    entries = [
        (*row[:2], row[2].replace("two ", "two two "), *row[3:]) if row[1] == "assistant" else row
        for row in found.entries
    ]
    twice = oracle.Found(**{**_fields(found), "entries": entries})
    for verdict in both(twice, acks):
        assert verdict.problems
        assert (verdict.lost, verdict.doubled) == (0, 1)


def test_a_lost_result_or_start_is_seen(settled):
    found, acks = settled
    without = [ack for ack in acks if ack.kind not in ("start", "result")]
    for other in ([Ack("start", 1, 5, "a")], [Ack("result", 1, 5, ["a", "another answer"])]):
        verdict = judge_agents({}, found, [Life(1, ("s",), [*without, *other])])
        assert verdict.problems


def test_a_session_that_nobody_touched_must_be_as_it_was(settled):
    found, acks = settled
    other = {"other": (("user", "kept"),)}
    assert judge_agents(other, found, [Life(1, ("s",), acks)]).problems
    before = state_of(found)
    changed = {"s": (*before["s"], ("user", "more"))}
    assert judge_agents(changed, found, []).problems
    assert judge_agents(before, found, []).problems == []


def test_a_program_may_have_been_deleting_one_session_but_not_two(settled):
    found, acks = settled
    gone = {"x": (("user", "a"),)}
    one = judge_program(gone, found, Life(1, (), acks))
    assert one.problems == [] and [kind for kind, _ in one.suspects] == ["delete"]
    two = judge_program(gone | {"y": ()}, found, Life(1, (), acks))
    assert two.problems


def test_a_program_may_settle_by_itself_what_it_found_but_not_change_it(settled):
    found, _ = settled
    item = state_of(found)["s"][1]
    doubt = (*item[:4], (("a", "", True, "in_doubt"),))
    before = {"s": (("user", "question"), doubt)}
    assert judge_program(before, found, Life(1), [1]).problems == []
    assert judge_program(before, found, Life(1)).problems
    discarded = {"s": (*before["s"], ("step", 2, "errored", (("text", "x", None),), ()))}
    assert judge_program(discarded, found, Life(1), [1, 2]).problems == []
    changed = {"s": (("user", "question"), (*item[:3], (("text", "one ", None),), ()))}
    assert judge_program(changed, found, Life(1), [1]).problems


def test_an_acknowledgement_that_comes_twice_is_noticed(settled):
    found, acks = settled
    for verdict in both(found, [*acks[:5], acks[4], *acks[5:]]):
        assert "acknowledged twice" in verdict.problems[0]


def test_a_session_of_another_process_of_the_program_may_grow_but_not_shrink(settled):
    found, _ = settled
    items = state_of(found)["s"]
    assert judge_program({"s": ()}, found, Life(1)).problems == []
    assert judge_program({"s": (*items, items[0], items[0])}, found, Life(1)).problems


def _fields(found):
    return {name: getattr(found, name) for name in found.__slots__}


# --- what cannot be run -------------------------------------------------------------------------


def test_a_drill_that_cannot_be_run_says_why(tmp_path):
    (tmp_path / "text.db").write_text("not a store" * 100)
    for path, options, words in (
        (tmp_path / "gone" / "a.db", {}, "there is no folder"),
        (tmp_path, {}, "is a folder"),
        (tmp_path / "text.db", {}, "text.db: this file is no SQLite database"),
        (tmp_path / "a.db", {"command": "no-such-program"}, "not a program that can be run"),
        (tmp_path / "a.db", {"command": "  "}, "the command is empty"),
        (tmp_path / "a.db", {"command": "'"}, "cannot be read"),
        (tmp_path / "a.db", {"command": [sys.executable, "-c", "pass"]}, "never opened"),
        (tmp_path / "a.db", {"command": [sys.executable, "-c", "1/0"]}, "ZeroDivisionError"),
    ):
        with pytest.raises(DrillError, match=words):
            run_drill(path, kills=1, **options)
    assert (tmp_path / "text.db").read_text() == "not a store" * 100


def test_the_report_is_a_table_and_json():
    report = DrillReport("a b.db", "power", 9, 4, command="python x.py", kills=4, seconds=0.5)
    report.recovery_seconds = [0.001, 0.002, 0.1]
    assert "kills" in report.summary() and "8 a second" in report.summary()
    facts = json.loads(report.to_json())
    assert facts["ok"] is True
    assert (facts["recovery_p50_ms"], facts["recovery_p99_ms"]) == (2.0, 100.0)
    report.violations.append("after kill 3: gone")
    assert report.accusation() == [
        "VIOLATION after kill 3: gone",
        "repeat: holdfast drill --db 'a b.db' --command 'python x.py' --kills 4"
        " --durability power --seed 9",
    ]
