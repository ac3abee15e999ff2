"""The exploration: workloads keep every promise, and a broken engine is always found out."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apsw
import pytest

import holdfast
import holdfast.step
from holdfast.journal import StreamJournal
from holdfast.journal.engine.core import Core
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.journal.engine.history import insert_entries
from holdfast.journal.engine.steps import delete_journals
from holdfast.recovery import explore as exploration
from holdfast.recovery import oracle
from holdfast.recovery.explore import Crash, ExplorationReport, check_promises, explore
from holdfast.recovery.explore_command import main
from holdfast.recovery.faults import FaultDisk
from holdfast.recovery.oracle import BrokenPromise, Judge
from holdfast.recovery.recording import LEVELS, Recorder, record, scratch_folder
from holdfast.recovery.settle import Answers
from holdfast.recovery.told import Ack, promised_of
from holdfast.recovery.workloads import WORKLOADS

# 24 explorations: some 20,000 states.
STATES = 850


def chat(path: Path, vfs: str, ack: Any, durability: str = "barrier") -> None:
    """A workload as a user would write it."""
    with holdfast.open(path, vfs=vfs, durability=durability) as store:
        session = store.create_session("s")
        ack("session", 0, 0, "s")
        step = session.begin_step()
        ack("begin", step.step_id, 0, "s")
        for seq, word in enumerate(("one ", "two ", "three "), 1):
            step.append_text(word)
            ack("text", step.step_id, seq, word)
        step.append_done()
        ack("done", step.step_id, 4, None)
        step.commit()
        ack("commit", step.step_id, 4, None)


def words_of(report: ExplorationReport) -> str:
    return "\n".join(violation.what for violation in report.violations)


# --- the promises --------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_every_crash_of_every_workload_keeps_the_promise_of_its_level(
    name: str, level: str
) -> None:
    report = explore(WORKLOADS[name].at(level), budget=STATES, seed=2)
    assert not report.violations, report.summary()
    assert report.states == STATES
    assert report.nested > STATES // 5


def test_without_a_budget_every_crash_point_is_visited_with_every_strategy() -> None:
    def in_a_store_that_is_there(path: Path, vfs: str, ack: Any) -> None:
        holdfast.open(path).close()
        chat(path, vfs, ack)

    report = explore(in_a_store_that_is_there)
    assert not report.violations, report.summary()
    with FaultDisk() as disk, scratch_folder() as folder:
        in_a_store_that_is_there(folder / "store.db", disk.name, Recorder(disk))
        points = range(len(disk.ops) + 1)
        every = sum(1 + len(disk.strategies(at, limit=24)) for at in points)
    assert report.states - report.nested == every


def test_the_same_seed_visits_the_same_states() -> None:
    first, second = (explore(chat, budget=300, seed=5) for _ in range(2))
    assert (first.states, first.nested) == (second.states, second.nested) == (300, second.nested)
    assert first.states_per_second > 0
    assert "300 crash states" in first.summary()


def test_a_level_is_seen_when_a_workload_does_not_tell_it() -> None:
    def at_process(path: Path, vfs: str, ack: Any) -> None:
        chat(path, vfs, ack, "process")

    report = explore(at_process, budget=300)
    assert report.durability == "process"
    assert not report.violations, report.summary()


def test_a_level_that_promises_less_is_found_out_when_held_to_more() -> None:
    report = explore(WORKLOADS["one-stream"].at("process"), budget=600, durability="power")
    assert "lost: " in words_of(report)


def test_a_workload_may_tell_of_its_text_alone() -> None:
    def terse(path: Path, vfs: str, ack: Any) -> None:
        chat(path, vfs, lambda kind, *rest: ack(kind, *rest) if kind == "text" else None)

    assert not explore(terse, budget=500).violations


def test_steps_of_a_journal_on_its_own_stay_in_the_journal(tmp_path: Path) -> None:
    def alone(path: Path, vfs: str, ack: Any) -> None:
        engine = SqliteEngine.open(path, vfs=vfs, durability="power")
        with StreamJournal(engine) as journal:
            step = journal.begin_step("model")
            for seq in range(1, 5):
                step.append_text(f"{seq} ")
                ack("text", step.step_id, seq, f"{seq} ")

    report = explore(alone, budget=500)
    assert not report.violations, report.summary()


def test_marks_of_a_workload_that_the_judge_does_not_know_are_reported() -> None:
    def marked(path: Path, vfs: str, ack: Any) -> None:
        chat(path, vfs, ack)
        ack("coffee", 0, 0, None)

    report = explore(marked, budget=50)
    assert report.not_judged == {"coffee": 1}
    assert "coffee" in report.summary()


# --- a broken engine is found out ----------------------------------------------------------------


@pytest.mark.parametrize("level", ["barrier", "power"])
def test_an_engine_that_never_syncs_is_found_out(
    monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    monkeypatch.setattr(Core, "_level", lambda self, full: self._db.pragma("synchronous", "off"))
    report = explore(WORKLOADS["tools"].at(level), budget=900)
    assert "lost: " in words_of(report)


def test_a_checkpoint_that_is_not_synced_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the end of the file is at stake: what the log no longer has and the database not yet."""
    monkeypatch.setattr(Core, "_level", lambda self, full: self._db.pragma("synchronous", "off"))
    report = explore(WORKLOADS["checkpoints"].at("process"), budget=1500)
    assert report.violations


def test_a_delta_that_is_shown_before_its_commit_is_found_out() -> None:
    def hasty(path: Path, vfs: str, ack: Any) -> None:
        with holdfast.open(path, vfs=vfs) as store:
            session = store.create_session("s")
            ack("session", 0, 0, "s")
            step = session.begin_step()
            ack("begin", step.step_id, 0, "s")
            for seq in range(1, 4):
                ack("text", step.step_id, seq, f"{seq} ")
                step.append_text(f"{seq} ")

    report = explore(hasty, faults=("kill",))
    assert "lost: text '1 '" in words_of(report)


def test_history_and_journal_in_two_transactions_are_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def settle(self: SqliteEngine, settlements: Sequence[Any]) -> list[list[int]]:
        ids = []
        for one in settlements:
            row = self.step(one.step_id)
            assert row is not None and row.session is not None
            ids.append(self.write(lambda c: insert_entries(c, row.session or "", one.entries)))  # noqa: B023

            def prune(cursor: apsw.Cursor, step_id: int = one.step_id) -> None:
                cursor.execute(
                    "UPDATE step_metadata SET state = 'committed' WHERE step_id = ?", (step_id,)
                )
                delete_journals(cursor, [step_id])

            self.write(prune)
        return ids

    monkeypatch.setattr(SqliteEngine, "settle", settle)
    report = explore(WORKLOADS["commit-and-prune"], faults=("kill",), budget=1500)
    assert report.violations


def test_calls_that_are_left_without_an_output_are_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answers_on_record(leftover: Any, *_: Any) -> Answers:
        return Answers([leftover.results[at] for at in sorted(leftover.results)])

    module = importlib.import_module("holdfast.recovery.recover")
    monkeypatch.setattr(module, "answer_calls", answers_on_record)
    monkeypatch.setattr(holdfast.step, "answer_calls", answers_on_record)
    report = explore(WORKLOADS["tools"], faults=("kill",), budget=600)
    assert "have no outputs" in words_of(report)


def test_a_recovery_that_is_no_longer_safe_when_it_dies_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The recovery discards first and writes history after it: only its own crash shows that."""
    plain = SqliteEngine.settle

    def settle(self: SqliteEngine, settlements: Sequence[Any]) -> Any:
        self.write(lambda c: delete_journals(c, [one.step_id for one in settlements]))
        return plain(self, settlements)

    # While the workload runs all is well.
    run = record

    def recorded(*args: Any, **options: Any) -> Any:
        try:
            return run(*args, **options)
        finally:
            monkeypatch.setattr(SqliteEngine, "settle", settle)

    monkeypatch.setattr(exploration, "record", recorded)
    report = explore(WORKLOADS["one-stream"], faults=("kill",), budget=900)
    assert report.violations
    assert all(violation.then is not None for violation in report.violations)


def test_a_violation_prints_a_command_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(Core, "_level", lambda self, full: self._db.pragma("synchronous", "off"))
        report = explore(WORKLOADS["tools"].at("power"), budget=400, seed=3)
        lost = report.violations[0]
        assert lost.crash.loss == "power"
        assert str(lost.crash.at) in lost.operation
        command = shlex.split(lost.command)
        assert command[:3] == ["python", "-m", "holdfast.recovery.explore"]
        assert main(command[3:]) == 1
        assert lost.what in capsys.readouterr().out
    assert main(command[3:]) in (0, 2)  # with syncs the trace is another


def test_a_crash_in_a_recovery_can_be_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--workload recovery --durability barrier --at 60 --loss kill".split()
    assert main([*options, "--then-at", "9", "--then-loss", "power"]) == 0
    assert "recovery" in capsys.readouterr().out


def test_the_command_explores_as_many_states_as_it_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main("--workload migration --states 450 --seed 9".split()) == 0
    assert "450" in capsys.readouterr().out


# --- checks of one's own -------------------------------------------------------------------------


def test_a_check_of_ones_own_gets_the_acknowledgements_and_the_recovered_store() -> None:
    def check(acks: Sequence[Ack], store: holdfast.Store) -> str | None:
        told = "".join(ack.data for ack in acks if ack.kind == "text")
        names = [info.id for info in store.sessions()]
        found = "".join(m.text for m in store.session("s").messages()) if names else ""
        return None if found.startswith(told) else f"told {told!r}, found {found!r}"

    assert not explore(chat, check, faults=("kill",)).violations


@pytest.mark.parametrize("complaint", ["raises", "says no", "lists"])
def test_a_check_complains_by_raising_or_by_what_it_returns(complaint: str) -> None:
    def check(acks: Sequence[Ack], store: holdfast.Store) -> object:
        if complaint == "raises":
            raise AssertionError("not good")
        return False if complaint == "says no" else ["not good"]

    report = explore(chat, check, faults=("kill",), budget=10)
    assert len(report.violations) == report.states


def test_check_promises_serves_in_a_test_of_ones_own(tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "a.db") as store:
        step = store.create_session("s").begin_step()
        told = [("session", 0, 0, "s"), ("begin", step.step_id, 0, "s")]
        for seq, word in enumerate(("one ", "two ", "three "), 1):
            step.append_text(word)
            told.append(("text", step.step_id, seq, word))
    with holdfast.open(tmp_path / "a.db") as store:
        check_promises(told, store)
        check_promises(told[:-1], store)  # the call that was under way may be there
        with pytest.raises(BrokenPromise, match="lost: text 'four '"):
            check_promises([*told, ("text", 1, 4, "four ")], store)
        with pytest.raises(BrokenPromise, match="no state that there ever was"):
            check_promises([*told[:-1], ("text", 1, 3, "drei ")], store)


# --- the judge -----------------------------------------------------------------------------------


def test_the_judge_knows_what_each_level_promises() -> None:
    acks = [Ack("begin", 1, 0, "s"), Ack("text", 1, 1, "a"), Ack("append_text", 1, 2, "b")]
    promised = promised_of
    assert promised(acks, loss="kill", durability="process") == 3
    assert promised(acks, loss="power", durability="power") == 3
    assert promised(acks, loss="power", durability="barrier") == 1
    assert promised(acks, loss="power", durability="process") == 0


def test_the_judge_reads_the_rows_and_not_the_product(tmp_path: Path) -> None:
    with FaultDisk() as disk:
        recorder = Recorder(disk)
        WORKLOADS["tools"](tmp_path / "w" / "a.db", disk.name, recorder)
    with holdfast.open(tmp_path / "w" / "a.db"):
        pass
    found = oracle.read_store(tmp_path / "w" / "a.db")
    assert not oracle.faults_of(found)
    assert len(recorder.acks) in Judge(recorder.acks).places(found)


def test_a_crash_reads_as_it_is_typed() -> None:
    assert Crash(7, "kill").options() == "--at 7 --loss kill"
    assert Crash(7, "power", "drop:3").options("then-") == (
        "--then-at 7 --then-loss power --then-keep drop:3"
    )
