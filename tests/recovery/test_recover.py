"""The pass: who is recovered and who is left alone, who is asked, what is told, what it costs."""

from __future__ import annotations

import importlib
import logging
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crash_rig import SESSION, Op, damage, leave, scalar, violations

import holdfast
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.journal.engine.rows import NewEntry
from holdfast.journal.engine.steps import event_record
from holdfast.journal.processes import ToolProcess
from holdfast.recovery import RecoveryPolicy, RecoveryReport, SettledStep, recover
from holdfast.recovery.faults import FaultDisk

pass_module = importlib.import_module("holdfast.recovery.recover")

IN_DOUBT: list[Op] = [
    ("user", "go"),
    ("begin",),
    ("call", "a", "run"),
    ("args", "a", '{"x": 1}'),
    ("call", "b", "run"),
    ("args", "b", "{}"),
    ("done",),
    ("seal",),
    ("start", "a", "never"),
    ("start", "b", "never"),
]


def leave_steps(path: Path, *names: str) -> None:
    """One unfinished step in each session."""
    with holdfast.open(path) as store:
        for name in names:
            store.create_session(name).begin_step().append_text(f"words of {name}")


def outputs_of(store: holdfast.Store) -> list[tuple[str, str | None, Any]]:
    message = store.session(SESSION).messages()[-1]
    return [(r.tool_use_id, r.synthetic, r.content) for r in message.tool_results]


# --- who is recovered ---------------------------------------------------------------------------


def test_every_leftover_is_settled_at_open_oldest_first(tmp_path: Path) -> None:
    leave_steps(tmp_path / "s.db", "c", "a", "b")
    with holdfast.open(tmp_path / "s.db") as store:
        report = store.recovery
        assert [(step.step_id, step.session_id) for step in report.steps] == [
            (1, "c"),
            (2, "a"),
            (3, "b"),
        ]
        assert {step.outcome for step in report.steps} == {"interrupted"}
        assert report.skipped == ()
        assert [store.session(name).messages()[0].text for name in "abc"] == [
            f"words of {name}" for name in "abc"
        ]


def test_a_clean_store_has_an_empty_report(tmp_path: Path) -> None:
    leave(tmp_path / "s.db", [("begin",), ("text", "x"), ("commit",)])
    with holdfast.open(tmp_path / "s.db") as store:
        assert store.recovery.is_empty
        assert store.recovery == RecoveryReport()
        assert store.recovery.summary() == "Nothing to recover."


def theft(path: Path) -> list[str]:
    """What a second opening of the store does to a living step of the first."""
    leave_steps(path, "dead")
    problems = []
    with holdfast.open(path, recover=False) as first:
        step = first.create_session("live").begin_step()
        step.append_text("mine ")
        with holdfast.open(path) as second:
            if [s.session_id for s in second.recovery.steps] != ["dead"]:
                problems.append(f"settled: {second.recovery.steps}")
            if second.recovery.skipped != ("live",):
                problems.append(f"skipped: {second.recovery.skipped}")
            try:
                second.session("live").add_user("me too")
                problems.append("a second writer got in")
            except holdfast.SessionBusy:
                pass
        step.append_text("still")
        try:
            step.commit()
        except holdfast.StepClosed:
            problems.append("its own commit was refused")
        words = [message.text for message in first.session("live").messages()]
        if words != ["mine still"]:
            problems.append(f"history: {words}")
    return problems


def test_a_living_step_of_another_store_in_this_process_is_skipped_and_listed(
    tmp_path: Path,
) -> None:
    assert theft(tmp_path / "s.db") == []


def test_a_store_that_ignores_whether_owners_live_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SqliteEngine, "is_alive", lambda *_: False)
    assert len(theft(tmp_path / "s.db")) == 5


def test_own_living_steps_are_never_touched(tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "s.db") as store:
        step = store.create_session(SESSION).begin_step()
        step.append_text("a")
        report = recover(store)
        assert (report.is_empty, report.skipped) == (True, (SESSION,))
        step.append_text("b")
        step.commit()
        assert store.session(SESSION).messages()[0].text == "ab"


def test_leftovers_are_settled_before_the_next_write_also_after_opening(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with holdfast.open(path) as store:
        store.create_session("a")
        store.create_session("b")
        other = holdfast.open(path)
        other.session("a").begin_step().append_text("left")
        other.session("b").begin_step().append_text("behind")
        other.close()
        store.session("a").add_user("next")
        with store.session("b").begin_step() as step:
            step.append_text("next")
        for name, text in (("a", "left"), ("b", "behind")):
            assert [m.text for m in store.session(name).messages()] == [text, "next"]
        assert [step.session_id for step in store.recovery.steps] == ["a", "b"]


def test_without_recovery_leftovers_stay_and_writes_to_their_session_are_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s.db"
    leave_steps(path, "a")
    with holdfast.open(path, recover=False) as store:
        assert store.recovery.is_empty
        session = store.session("a")
        for write in (lambda: session.add_user("x"), session.begin_step):
            with pytest.raises(holdfast.SessionUnrecovered, match="recover=False"):
                write()
        assert len(session.history) == 0
        store.create_session("b").add_user("fine")
        assert not recover(store).is_empty
        session.add_user("x")
        assert [m.text for m in session.messages()] == ["words of a", "x"]


def test_journals_without_a_session_are_not_the_stores_to_recover(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with holdfast.journal.StreamJournal.open(path) as journal:
        journal.begin_step("m").append_text("alone")
    with holdfast.open(path) as store:
        assert store.recovery.is_empty
    with holdfast.journal.StreamJournal.open(path) as journal:
        assert journal.recover().partial_text == "alone"


def test_dead_owners_that_left_nothing_are_forgotten_and_others_kept(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    leave_steps(path, "a")
    with holdfast.open(path) as living, holdfast.open(path) as store:
        owners = {living.owner_id, store.owner_id}
        assert {row.owner_id for row in store.engine.owners()} == owners


def test_a_pass_that_failed_halfway_can_be_repeated_by_the_same_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed pass had claimed the steps: they belong to a living owner that has no handle."""
    path = tmp_path / "s.db"
    leave_steps(path, "a", "b")
    with holdfast.open(path, recover=False) as store:

        def full(*_: Any) -> None:
            raise holdfast.StoreFull(store.path, "no room")

        with monkeypatch.context() as patch:
            patch.setattr(SqliteEngine, "settle", full)
            with pytest.raises(holdfast.StoreFull):
                recover(store)
        assert [step.outcome for step in recover(store).steps] == ["interrupted"] * 2
    assert violations(path, [[]]) == []


def test_a_resolver_that_interrupts_the_pass_leaves_the_step_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    leave(path, IN_DOUBT)

    def interrupted(call: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        holdfast.open(path, resolver=interrupted)
    with holdfast.open(path) as store:
        assert store.recovery.steps[0].in_doubt == ("a", "b")


# --- the resolver -------------------------------------------------------------------------------


def test_a_resolver_is_asked_for_each_call_in_doubt_and_for_no_other(tmp_path: Path) -> None:
    script = [op for op in IN_DOUBT if op != ("start", "b", "never")]
    leave(tmp_path / "s.db", script)
    asked: list[Any] = []

    def look(call: Any) -> holdfast.ToolResult:
        asked.append(call)
        return holdfast.ToolResult("some other id", "it worked")

    with holdfast.open(tmp_path / "s.db", resolver=look) as store:
        (step,) = store.recovery.steps
        assert (step.resolved, step.in_doubt, step.canceled) == (("a",), (), ("b",))
        assert outputs_of(store)[0] == ("a", "resolved", "it worked")
        assert outputs_of(store)[1][:2] == ("b", "canceled")
    (call,) = asked
    assert (call.call_id, call.name, call.input, call.state) == ("a", "run", {"x": 1}, "started")
    assert (call.step_id, call.session_id, call.position) == (1, SESSION, 0)
    assert call.operation_id.endswith("-0")


def test_a_resolver_that_does_not_know_leaves_the_call_in_doubt(tmp_path: Path) -> None:
    leave(tmp_path / "s.db", IN_DOUBT)
    with holdfast.open(tmp_path / "s.db", resolver=lambda call: None) as store:
        assert store.recovery.steps[0].in_doubt == ("a", "b")
        assert store.recovery.steps[0].errors == ()


def raising(call: Any) -> Any:
    raise ConnectionError("no route")


def badly_made(call: Any) -> Any:
    return holdfast.ToolResult.model_construct(tool_use_id=call.id, content=object())


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (raising, "ConnectionError('no route')"),
        (lambda call: "it worked", "not str"),
        (badly_made, "InvalidMessage"),
    ],
    ids=["raises", "wrong type", "badly made"],
)
def test_a_resolver_that_fails_is_reported_and_stops_nothing(
    tmp_path: Path, wrong: Callable[[Any], Any], words: str
) -> None:
    leave(tmp_path / "s.db", IN_DOUBT)

    def resolver(call: Any) -> Any:
        return wrong(call) if call.id == "a" else holdfast.ToolResult("b", "known")

    with holdfast.open(tmp_path / "s.db", resolver=resolver) as store:
        (step,) = store.recovery.steps
        assert (step.outcome, step.in_doubt, step.resolved) == ("complete", ("a",), ("b",))
        (error,) = step.errors
        assert words in error
        assert [output[:2] for output in outputs_of(store)] == [
            ("a", "in_doubt"),
            ("b", "resolved"),
        ]


def test_a_resolver_is_asked_outside_any_transaction_after_the_claim(tmp_path: Path) -> None:
    """It may use the store, and so may another connection: nobody waits for its answer."""
    path = tmp_path / "s.db"
    leave(path, IN_DOUBT)
    seen: list[Any] = []

    def look(call: Any) -> None:
        with holdfast.open(path) as other:
            seen.append((other.engine.step(1).owner, other.recovery.skipped))  # type: ignore[union-attr]
            other.create_session().add_user("meanwhile")

    with holdfast.open(path, resolver=look) as store:
        assert seen == [(store.owner_id, (SESSION,))] * 2
        assert len(outputs_of(store)) == 2


@pytest.mark.parametrize("write", ["add_user", "begin_step"])
def test_a_resolver_asked_before_a_write_holds_up_no_other_thread(
    tmp_path: Path, write: str
) -> None:
    leave(tmp_path / "s.db", IN_DOUBT)
    meanwhile: list[Any] = []

    def look(call: Any) -> None:
        writer = threading.Thread(target=lambda: store.create_session().add_user("meanwhile"))
        writer.start()
        writer.join(30)
        meanwhile.append(writer.is_alive())

    with holdfast.open(tmp_path / "s.db", recover=False, resolver=look) as store:
        store.recovers = True  # As if the owner had died after this store was opened.
        getattr(store.session(SESSION), write)("next")
        assert meanwhile == [False, False]


def test_two_stores_that_open_at_once_do_not_both_ask(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    leave(path, IN_DOUBT)
    asked: list[str] = []
    inside, go_on = threading.Event(), threading.Event()

    def slow(call: Any) -> None:
        asked.append(call.id)
        inside.set()
        assert go_on.wait(60)

    first = threading.Thread(target=lambda: holdfast.open(path, resolver=slow).close())
    first.start()
    assert inside.wait(60)
    with holdfast.open(path, resolver=slow) as second:
        assert second.recovery.is_empty
        assert second.recovery.skipped == (SESSION,)
    go_on.set()
    first.join()
    assert asked == ["a", "b"]
    assert violations(path, [], settled=False) == []


def test_two_threads_that_recover_one_store_do_not_both_ask(tmp_path: Path) -> None:
    leave(tmp_path / "s.db", IN_DOUBT)
    asked: list[str] = []
    inside, go_on = threading.Event(), threading.Event()

    def slow(call: Any) -> None:
        asked.append(call.id)
        inside.set()
        assert go_on.wait(60)

    with holdfast.open(tmp_path / "s.db", recover=False) as store:
        first = threading.Thread(target=lambda: recover(store, resolver=slow))
        first.start()
        assert inside.wait(60)
        assert recover(store, resolver=slow).is_empty
        go_on.set()
        first.join()
        assert asked == ["a", "b"]
        assert len(outputs_of(store)) == 2


def test_a_resolver_that_died_halfway_is_asked_again_by_the_next_pass(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    asked: list[str] = []

    def look(call: Any) -> holdfast.ToolResult:
        asked.append(call.id)
        return holdfast.ToolResult(call.id, "known")

    with FaultDisk() as disk:
        leave(path, IN_DOUBT)
        with holdfast.open(path, recover=False, vfs=disk.name) as store:
            recover(store, resolver=lambda call: disk.mark("asked") and None)
    (first, _) = [n for n, op in enumerate(disk.ops, 1) if op.label == "asked"]
    crashed = disk.image(first, tmp_path / "crashed")
    with holdfast.open(crashed, resolver=look) as store:
        assert store.recovery.steps[0].resolved == ("a", "b")
    assert asked == ["a", "b"]


def test_recover_uses_the_resolver_and_the_policy_it_is_given(tmp_path: Path) -> None:
    leave(tmp_path / "s.db", IN_DOUBT)
    with holdfast.open(tmp_path / "s.db", recover=False, resolver=raising) as store:
        report = recover(
            store,
            policy=RecoveryPolicy(in_doubt_text="who knows"),
            resolver=lambda call: holdfast.ToolResult("a", "A") if call.id == "a" else None,
        )
        assert (report.steps[0].resolved, report.steps[0].errors) == (("a",), ())
        assert outputs_of(store) == [("a", "resolved", "A"), ("b", "in_doubt", "who knows")]


# --- steps that make recovery fail --------------------------------------------------------------


def leave_poison(path: Path) -> None:
    """An event whose crc is good and whose content makes no sense, between two good steps."""
    leave_steps(path, "a", "bad", "c")
    with holdfast.open(path, recover=False) as store:
        store.engine.append(2 << 32 | 2, "done", None, "no JSON but secret words")


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_step_that_makes_recovery_raise_is_quarantined_and_the_store_opens(
    tmp_path: Path, attempts: int, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    path = tmp_path / "s.db"
    leave_poison(path)
    tries: list[int] = []
    read = pass_module.read_leftover

    def counting(engine: Any, row: Any, **rest: Any) -> Any:
        tries.append(row.step_id)
        return read(engine, row, **rest)

    monkeypatch.setattr(pass_module, "fold", lambda events: None)  # Read it all there.
    monkeypatch.setattr(pass_module, "read_leftover", counting)
    events: list[Any] = []
    policy = RecoveryPolicy(max_attempts=attempts)
    with holdfast.open(path, policy=policy, on_event=events.append) as store:
        outcomes = [step.outcome for step in store.recovery.steps]
        assert outcomes == ["interrupted", "quarantined", "interrupted"]
        bad = store.recovery.steps[1]
        assert (bad.step_id, bad.session_id, bad.entry_ids) == (2, "bad", ())
        assert "JSONDecodeError" in bad.errors[0]
        assert "quarantined" in store.recovery.summary()
        # Its session can go on, and the pass does not come back to it.
        with store.session("bad").begin_step() as step:
            step.append_text("onwards")
        assert recover(store).is_empty
    assert tries.count(2) == attempts
    assert [e.step_id for e in events if e.kind == "damage"] == [2]
    assert "step 2 is quarantined: JSONDecodeError" in caplog.text
    assert scalar(path, "SELECT count(*) FROM stream_journal WHERE step_id = 2") == 2
    assert "JSONDecodeError" in scalar(path, "SELECT problem FROM step_metadata WHERE step_id = 2")
    with holdfast.open(path) as store:
        assert store.recovery.is_empty


def test_a_step_that_cannot_be_written_is_quarantined_and_its_neighbours_are_settled(
    tmp_path: Path,
) -> None:
    """Step 2 stands in history already, so its settling breaks the rule of one place a step."""
    path = tmp_path / "s.db"
    leave_steps(path, "a", "bad", "c")
    damage(
        path,
        "INSERT INTO history_entries (id, role, body, status, created_us, stream_step_id, part,"
        " metadata, crc) VALUES (99 << 32, 'user', '{}', 'complete', 1, 2, 0, '{}', 0)",
    )
    with holdfast.open(path) as store:
        outcomes = [step.outcome for step in store.recovery.steps]
        assert outcomes == ["interrupted", "quarantined", "interrupted"]
        assert store.session("c").messages()[0].text == "words of c"


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_step_over_which_the_process_dies_is_quarantined_in_the_end(
    tmp_path: Path, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only that step: those that were claimed beside it are settled on the way."""
    path = tmp_path / "s.db"
    names = [f"s{n:02}" for n in range(40)]
    leave_steps(path, *names)
    read = pass_module.read_leftover

    class Died(BaseException):
        """Stands for a kill: nothing but the end of the process comes after it."""

    def deadly(engine: Any, row: Any, **rest: Any) -> Any:
        if row.session == "s20":
            raise Died
        return read(engine, row, **rest)

    monkeypatch.setattr(pass_module, "read_leftover", deadly)
    deaths = 0
    while True:
        try:
            store = holdfast.open(path, policy=RecoveryPolicy(max_attempts=attempts))
            break
        except Died:
            deaths += 1
            assert deaths < 50
    assert deaths == 4 * attempts
    quarantined = [s.session_id for s in store.recovery.steps if s.outcome == "quarantined"]
    assert quarantined == ["s20"]
    for name in names:
        words = [m.text for m in store.session(name).messages()]
        assert words == ([] if name == "s20" else [f"words of {name}"])
    store.close()


def test_an_error_of_the_whole_store_quarantines_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.db"
    leave_steps(path, "a")

    def busy(*_: Any, **__: Any) -> None:
        raise holdfast.StoreBusy(path, "locked")

    with monkeypatch.context() as patch:
        patch.setattr(pass_module, "read_leftover", busy)
        with pytest.raises(holdfast.StoreBusy):
            holdfast.open(path)
    with holdfast.open(path) as store:
        assert [step.outcome for step in store.recovery.steps] == ["interrupted"]


def test_a_step_that_can_be_written_at_the_second_try_is_not_quarantined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_steps(tmp_path / "s.db", "a")
    whole, failures = SqliteEngine.settle, iter([ValueError, ValueError])

    def weak(engine: Any, settlements: Any) -> Any:
        for failure in failures:
            raise failure
        return whole(engine, settlements)

    monkeypatch.setattr(SqliteEngine, "settle", weak)
    with holdfast.open(tmp_path / "s.db") as store:
        assert [step.outcome for step in store.recovery.steps] == ["interrupted"]


def test_the_log_of_a_quarantine_does_not_quote_the_transcript(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def quoting(*_: Any, **__: Any) -> None:
        raise ValueError("cannot read: private words")

    leave_steps(tmp_path / "s.db", "a")
    monkeypatch.setattr(pass_module, "read_leftover", quoting)
    with holdfast.open(tmp_path / "s.db") as store:
        assert store.recovery.steps[0].errors == ("ValueError: cannot read: private words",)
    assert "step 1 is quarantined: ValueError" in caplog.text
    assert "private" not in caplog.text


def test_unreadable_text_in_one_step_hides_no_other(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    leave_steps(path, "a", "b", "c")
    damage(
        path,
        "UPDATE stream_journal SET content = CAST(x'fffe' AS TEXT) WHERE step_id = 2",
    )
    with holdfast.open(path) as store:
        assert [s.session_id for s in store.recovery.steps] == ["a", "b", "c"]
        assert store.session("a").messages()[0].text == "words of a"
        assert store.session("c").messages()[0].text == "words of c"
        store.session("b").add_user("onwards")


# --- what is told -------------------------------------------------------------------------------


def test_each_synthetic_output_is_logged_and_counted_without_a_word_of_the_transcript(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script: list[Op] = [("user", "private"), ("begin",), ("text", "private")]
    for call_id in "abc":
        script += [("call", call_id, "run"), ("args", call_id, '{"key": "private"}')]
    script += [("done",), ("seal",), ("start", "b", "never"), ("result", "c", "private")]
    leave(tmp_path / "s.db", script)
    events: list[Any] = []
    with caplog.at_level(logging.DEBUG, "holdfast"):
        holdfast.open(tmp_path / "s.db", on_event=events.append).close()
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == [
        "step 1: call 'a' has a synthetic output: canceled",
        "step 1: call 'b' has a synthetic output: in_doubt",
    ]
    assert "private" not in caplog.text
    told = [(e.kind, e.step_id, e.session_id, e.count) for e in events if e.kind != "sync"]
    assert told[:3] == [
        ("commit", 1, SESSION, 1),
        ("synthetic_output", 1, SESSION, 2),
        ("recovery", None, None, 1),
    ]


def test_an_observer_that_raises_cannot_hurt_a_pass(tmp_path: Path) -> None:
    def observer(event: Any) -> None:
        raise RuntimeError

    leave(tmp_path / "s.db", IN_DOUBT)
    with holdfast.open(tmp_path / "s.db", on_event=observer) as store:
        assert len(store.recovery.steps) == 1


def test_a_summary_says_what_was_found_what_was_done_and_what_is_in_doubt() -> None:
    orphan = ToolProcess(4711, "x")
    report = RecoveryReport(
        steps=(
            SettledStep(7, "a", "complete", (3, 4), canceled=("c1", "c2"), in_doubt=("d",)),
            SettledStep(8, "b", "interrupted", (0,), resolved=("r",), dropped=("x",)),
            SettledStep(9, "c", "empty", orphans=(orphan,), errors=("something is damaged",)),
        ),
        skipped=("d", "e"),
    )
    assert report.summary().splitlines() == [
        "Recovered 3 unfinished step(s):",
        "  step 7 in session a: complete",
        "    canceled, safe to run again: c1, c2",
        "    in doubt, may have taken effect: d",
        "  step 8 in session b: interrupted",
        "    resolved: r",
        "    left out, arguments unfinished: x",
        "  step 9 in session c: empty",
        "    still running: process 4711",
        "    problem: something is damaged",
        "Left alone, in use elsewhere: d, e",
    ]
    assert not report.is_empty


# --- what it costs ------------------------------------------------------------------------------


def cost_of_opening(path: Path, settled: int, unfinished: int) -> tuple[int, int]:
    """Reads and writes of the disk, for a store with so many entries and unfinished steps."""
    with holdfast.open(path) as store:
        body = '{"role":"user","content":[{"type":"text","text":"x","signature":null}]}'
        entry = NewEntry("user", body, 1)
        for name in ("old", "older"):
            store.create_session(name)
            store.engine.add_entries(name, [entry] * (settled // 2))
        for n in range(unfinished):
            store.create_session(f"s{n}").begin_step().append_text("x")
        store.engine.checkpoint()
    with FaultDisk() as disk:
        with holdfast.open(path, vfs=disk.name) as store:
            assert len(store.recovery.steps) == unfinished
        return disk.count("read"), disk.count("write")


def test_settled_entries_cost_nothing(tmp_path: Path) -> None:
    few = cost_of_opening(tmp_path / "few.db", 10, 5)
    many = cost_of_opening(tmp_path / "many.db", 100_000, 5)
    # A larger tree is a few pages deeper: nothing like 10,000 times as many.
    assert many[0] <= few[0] + 40, (few, many)
    assert many[1] <= few[1] + 40, (few, many)


def test_the_work_grows_with_what_is_unfinished(tmp_path: Path) -> None:
    few = cost_of_opening(tmp_path / "few.db", 10, 2)
    many = cost_of_opening(tmp_path / "many.db", 10, 60)
    assert many[1] > few[1]


def leave_one_long_step(path: Path, count: int) -> None:
    with holdfast.open(path, durability="process") as store:
        step = store.create_session(SESSION).begin_step()
        key = step.step_id << 32
        for start in range(1, count + 1, 10_000):
            events = range(start, min(start + 10_000, count + 1))
            store.engine.append_many(
                [event_record(key | seq, "text_delta", None, "word ") for seq in events]
            )


def test_a_long_step_takes_memory_for_its_text_and_not_for_its_deltas(tmp_path: Path) -> None:
    """Its million-delta sister is in benchmarks/recovery.py; the ratio is the same."""
    count = 100_000
    leave_one_long_step(tmp_path / "s.db", count)
    with holdfast.open(tmp_path / "s.db", recover=False) as store:
        tracemalloc.start()
        recover(store)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        (message,) = store.session(SESSION).messages()
    assert message.text == "word " * count
    # Half a megabyte of text, a few copies of it, and a page of events; the deltas alone are 8 MB.
    assert peak < 6 * len(message.text) + (2 << 20), peak


def test_many_large_steps_are_not_all_held_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_module, "BYTES_A_COMMIT", 100_000)
    with holdfast.open(tmp_path / "s.db", durability="process") as store:
        for n in range(10):
            store.create_session(f"s{n}").begin_step().append_text("x" * 60_000)
    sizes: list[int] = []
    whole = SqliteEngine.settle

    def watched(engine: Any, settlements: Any) -> Any:
        sizes.append(len(settlements))
        return whole(engine, settlements)

    monkeypatch.setattr(SqliteEngine, "settle", watched)
    with holdfast.open(tmp_path / "s.db") as store:
        assert len(store.recovery.steps) == 10
    assert sizes == [2] * 5


def test_small_steps_share_transactions(tmp_path: Path) -> None:
    leave_steps(tmp_path / "s.db", *[f"s{n}" for n in range(100)])
    events: list[Any] = []
    with holdfast.open(tmp_path / "s.db", on_event=events.append) as store:
        assert len(store.recovery.steps) == 100
    # Registering, claiming, settling, forgetting the dead owner, and leaving.
    assert sum(event.kind == "sync" for event in events) <= 6


def test_what_is_read_ahead_is_bounded_and_the_rest_is_read_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_steps(tmp_path / "s.db", "a", "b", "c")
    monkeypatch.setattr("holdfast.journal.engine.leftovers.CHARACTERS_A_READ", 15)
    with holdfast.open(tmp_path / "s.db", recover=False) as store:
        assert list(store.engine.small_streams([1, 2, 3])) == [1]
        recover(store)
        assert [store.session(name).messages()[0].text for name in "abc"] == [
            f"words of {name}" for name in "abc"
        ]


def test_nobody_discards_the_steps_of_another(tmp_path: Path) -> None:
    leave_steps(tmp_path / "s.db", "a")
    with holdfast.open(tmp_path / "s.db", recover=False) as store:
        assert store.engine.discard_many([1]) == []
        assert [step.outcome for step in recover(store).steps] == ["interrupted"]
