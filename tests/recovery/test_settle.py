"""Every class of a step times every state of a call: what history holds, what the model reads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crash_rig import SESSION, Op, damage, leave, scalar, violations
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.journal.messages import Message, message_to_json, text_to_json
from holdfast.recovery import (
    Complete,
    Errored,
    Incomplete,
    RecoveryPolicy,
    SettledStep,
    classify,
    settle,
)

ENDINGS: dict[str, list[Op]] = {
    "complete": [("done",)],
    "errored": [("error", "overloaded")],
    "interrupted": [],
}
CLASS_OF = {"complete": Complete, "errored": Errored, "interrupted": Incomplete}

# What the journal holds of the call, before and after sealing.
OPEN_CALLS: dict[str, list[Op]] = {
    "broken arguments": [("args", "c", '{"path": "/et')],
    "no arguments": [],
    "good arguments": [("args", "c", '{"x": 1}')],
}
SEALED_CALLS: dict[str, list[Op]] = {
    "ready": [],
    "started never": [("start", "c", "never")],
    "started safe": [("start", "c", "safe")],
    "answered": [("start", "c", "never"), ("result", "c", "it is done")],
    "answered without a start": [("result", "c", "it is done")],
}

CANCELED = (
    "Tool execution was interrupted. Output was not received."
    " The tool had not started: it is safe to run it again."
)
IN_DOUBT = (
    "Tool execution was interrupted after it had started."
    " The outcome is unknown: it may have taken effect. Check before running it again."
)
IN_DOUBT_SAFE = (
    "Tool execution was interrupted after it had started."
    " The outcome is unknown: it may have taken effect. It may be run again."
)
# told as, what the model reads, status, synthetic
OUTCOMES: dict[str, tuple[str | None, str, str, str | None]] = {
    "good arguments": ("canceled", CANCELED, "canceled", "canceled"),
    "ready": ("canceled", CANCELED, "canceled", "canceled"),
    "started never": ("in_doubt", IN_DOUBT, "failed", "in_doubt"),
    "started safe": ("in_doubt", IN_DOUBT_SAFE, "failed", "in_doubt"),
    "damaged result": ("in_doubt", IN_DOUBT, "failed", "in_doubt"),
    "answered": (None, "it is done", "success", None),
    "answered without a start": (None, "it is done", "success", None),
}
TOLD = ("canceled", "in_doubt", "resolved", "dropped")


def turn(ending: str, call: list[Op], sealed: list[Op] | None) -> list[Op]:
    script: list[Op] = [("user", "go"), ("begin",), ("text", "I call "), ("call", "c", "run")]
    script += [*call, *ENDINGS[ending]]
    return script if sealed is None else [*script, ("seal",), *sealed]


def recovered(path: Path, **options: Any) -> tuple[SettledStep, list[Any]]:
    """What the report says of the one step, and the entries behind the user's."""
    with holdfast.open(path, **options) as store:
        (step,) = store.recovery.steps
        return step, list(store.session(SESSION).history.entries())[1:]


def check_row(path: Path, ending: str, state: str) -> None:
    told, words, status, synthetic = OUTCOMES[state]
    step, (said, outputs) = recovered(path)
    assert step.outcome == said.status == outputs.status == ending
    assert step.entry_ids == (1, 2)
    assert {name: getattr(step, name) for name in TOLD} == {
        name: (("c",) if name == told else ()) for name in TOLD
    }
    assert said.message.text == "I call "
    assert [call.id for call in said.message.tool_calls] == ["c"]
    (output,) = outputs.message.content
    assert (output.tool_use_id, output.content) == ("c", words)
    assert (str(output.status), output.synthetic) == (status, synthetic)
    assert output.is_error is (synthetic is not None)
    assert said.metadata.get("error") == ("overloaded" if ending == "errored" else None)
    assert violations(path, [], settled=False) == []


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_call_of_an_open_step_with_good_arguments_is_canceled(
    tmp_path: Path, ending: str
) -> None:
    leave(tmp_path / "s.db", turn(ending, OPEN_CALLS["good arguments"], None))
    check_row(tmp_path / "s.db", ending, "good arguments")


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("state", SEALED_CALLS)
def test_a_call_of_a_sealed_step_is_answered_by_how_far_it_came(
    tmp_path: Path, ending: str, state: str
) -> None:
    good = OPEN_CALLS["good arguments"]
    leave(tmp_path / "s.db", turn(ending, good, SEALED_CALLS[state]))
    check_row(tmp_path / "s.db", ending, state)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_result_whose_crc_is_wrong_leaves_its_call_in_doubt_and_is_reported(
    tmp_path: Path, ending: str
) -> None:
    path = tmp_path / "s.db"
    leave(path, turn(ending, OPEN_CALLS["good arguments"], SEALED_CALLS["answered"]))
    damage(path, "UPDATE tool_results SET body = replace(body, 'is done', 'is dead')")
    with holdfast.open(path, recover=False) as store:
        (call,) = classify(store, 1).calls
        assert call.state == "started"
    check_row(path, ending, "damaged result")
    notes = json.loads(scalar(path, "SELECT metadata FROM history_entries WHERE entry_id = 1"))
    (kept,) = notes["damaged_results"]
    assert json.loads(kept)["content"] == "it is dead"
    assert "crc of its result" in " ".join(notes["errors"])


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("sealed", [None, []], ids=["open", "sealed"])
def test_a_call_whose_arguments_never_became_json_is_left_out_and_its_fragment_kept(
    tmp_path: Path, ending: str, sealed: list[Op] | None
) -> None:
    path = tmp_path / "s.db"
    leave(path, turn(ending, OPEN_CALLS["broken arguments"], sealed))
    step, (said,) = recovered(path)
    assert (step.outcome, step.dropped, step.canceled) == (ending, ("c",), ())
    assert said.message.tool_calls == []
    fragment = {"call_id": "c", "name": "run", "raw_arguments": '{"path": "/et'}
    assert said.metadata["dropped_calls"] == [fragment]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("sealed", [None, []], ids=["open", "sealed"])
def test_no_arguments_mean_none_only_once_the_stream_is_done(
    tmp_path: Path, ending: str, sealed: list[Op] | None
) -> None:
    path = tmp_path / "s.db"
    leave(path, turn(ending, OPEN_CALLS["no arguments"], sealed))
    if ending == "complete":
        check_row(path, ending, "ready")
    else:
        step, (said,) = recovered(path)
        assert (step.dropped, said.message.tool_calls) == (("c",), [])


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("sealed", [None, []], ids=["open", "sealed"])
def test_a_step_is_classified_by_its_terminal_event(
    tmp_path: Path, ending: str, sealed: list[Op] | None
) -> None:
    path = tmp_path / "s.db"
    step_id = leave(path, turn(ending, OPEN_CALLS["good arguments"], sealed))
    with holdfast.open(path, recover=False) as store:
        found = classify(store, step_id)
    assert type(found) is CLASS_OF[ending]
    assert (found.step_id, found.session_id, found.model_name) == (1, SESSION, "a-model")
    assert (found.partial_text, found.gap_at) == ("I call ", None)
    (call,) = found.calls
    assert call.state == ("announced" if sealed is None else "ready")
    assert (call.call_id, call.name, call.input) == ("c", "run", {"x": 1})
    assert isinstance(found, Errored) is (getattr(found, "error", None) == "overloaded")


def test_parallel_calls_in_all_states_are_answered_in_call_order_in_one_message(
    tmp_path: Path,
) -> None:
    script: list[Op] = [("user", "go"), ("begin",)]
    for call_id in "abcde":
        script += [("call", call_id, "run"), ("args", call_id, "{}" if call_id != "c" else "{")]
    script += [("done",), ("seal",), ("start", "e", "never"), ("result", "e", "E")]
    script += [("start", "b", "never"), ("start", "d", "safe")]
    leave(tmp_path / "s.db", script)
    step, (said, outputs) = recovered(tmp_path / "s.db")
    assert [call.id for call in said.message.tool_calls] == ["a", "b", "d", "e"]
    assert [(r.tool_use_id, r.synthetic) for r in outputs.message.tool_results] == [
        ("a", "canceled"),
        ("b", "in_doubt"),
        ("d", "in_doubt"),
        ("e", None),
    ]
    assert (step.canceled, step.in_doubt, step.dropped) == (("a",), ("b", "d"), ("c",))


# --- words and policies -------------------------------------------------------------------------


def test_the_words_can_be_chosen(tmp_path: Path) -> None:
    policy = RecoveryPolicy(
        canceled_text="nicht begonnen", in_doubt_text="ungewiss", in_doubt_safe_text="noch einmal"
    )
    script: list[Op] = [("user", "go"), ("begin",)]
    for call_id in "abc":
        script += [("call", call_id, "run"), ("args", call_id, "{}")]
    script += [("seal",), ("start", "b", "never"), ("start", "c", "safe")]
    leave(tmp_path / "s.db", script)
    _, (_, outputs) = recovered(tmp_path / "s.db", policy=policy)
    words = [result.content for result in outputs.message.tool_results]
    assert words == ["nicht begonnen", "ungewiss", "noch einmal"]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("discards", [(), ("incomplete",), ("errored",), ("incomplete", "errored")])
def test_a_policy_discards_the_classes_it_names_and_no_other(
    tmp_path: Path, ending: str, discards: tuple[str, ...]
) -> None:
    path = tmp_path / "s.db"
    leave(path, turn(ending, OPEN_CALLS["good arguments"], None))
    policy = RecoveryPolicy(**dict.fromkeys(discards, "discard"))  # type: ignore[arg-type]
    step, entries = recovered(path, policy=policy)
    gone = {"interrupted": "incomplete", "errored": "errored"}.get(ending) in discards
    assert step.outcome == ("discarded" if gone else ending)
    assert len(entries) == (0 if gone else 2)
    assert scalar(path, "SELECT count(*) FROM stream_journal") == 0
    assert scalar(path, "SELECT count(*) FROM step_metadata") == (0 if gone else 1)


def test_a_discarded_step_still_says_what_may_have_taken_effect(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    leave(path, turn("interrupted", OPEN_CALLS["good arguments"], [("start", "c", "never")]))
    asked: list[Any] = []
    events: list[Any] = []
    with holdfast.open(
        path,
        policy=RecoveryPolicy(incomplete="discard"),
        resolver=lambda call: asked.append(call),
        on_event=events.append,
    ) as store:
        (step,) = store.recovery.steps
        assert len(store.session(SESSION).history) == 1
    assert (step.outcome, step.in_doubt, step.entry_ids) == ("discarded", ("c",), ())
    assert asked == []  # Nothing would be done with the answer.
    assert [e.kind for e in events if e.step_id] == ["discard"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"incomplete": "ask"},
        {"errored": "maybe"},
        {"max_attempts": 0},
        {"max_attempts": "3"},
        {"canceled_text": " "},
        {"in_doubt_text": None},
        {"in_doubt_safe_text": ""},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RecoveryPolicy(**wrong)


# --- content ------------------------------------------------------------------------------------


def test_a_step_without_content_leaves_no_entry(tmp_path: Path) -> None:
    leave(tmp_path / "s.db", [("user", "go"), ("begin",), ("text", ""), ("done",)])
    step, entries = recovered(tmp_path / "s.db")
    assert (step.outcome, step.entry_ids, entries) == ("empty", (), [])
    assert violations(tmp_path / "s.db", [[["user", "go"]]]) == []


def test_what_a_step_without_an_entry_left_stays_in_its_row(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    leave(path, [("user", "go"), ("begin",), ("call", "c", "run"), ("args", "c", '{"half')])
    step, entries = recovered(path)
    assert (step.outcome, step.dropped, entries) == ("empty", ("c",), [])
    kept = json.loads(scalar(path, "SELECT problem FROM step_metadata"))
    assert kept["dropped_calls"][0]["raw_arguments"] == '{"half'


def test_interrupted_thinking_without_a_signature_is_kept_and_never_sent(tmp_path: Path) -> None:
    leave(
        tmp_path / "s.db",
        [("user", "go"), ("begin",), ("think", "secret plan"), ("text", "Hello")],
    )
    with holdfast.open(tmp_path / "s.db") as store:
        session = store.session(SESSION)
        kept = [block.type for block in session.history.get_entry(1).message.content]
        sent = [block.type for block in session.messages()[1].content]
    assert (kept, sent) == (["thinking", "text"], ["text"])


def test_no_badge_is_glued_into_the_content(tmp_path: Path) -> None:
    leave(tmp_path / "s.db", [("user", "go"), ("begin",), ("text", "Hel")])
    _, (said,) = recovered(tmp_path / "s.db")
    assert (said.message.text, said.status, said.message.metadata) == ("Hel", "interrupted", {})


def test_a_signature_keeps_the_provider_and_model_it_belongs_to(tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "s.db") as store:
        session = store.create_session(SESSION, provider="anthropic", model="opus")
        step = session.begin_step()
        step.append_thinking("hm")
        step.append_signature("sig")
    with holdfast.open(tmp_path / "s.db") as store:
        (message,) = store.session(SESSION).messages()
    assert message.metadata == {"provider": "anthropic", "model": "opus"}


@given(st.text(st.characters(exclude_categories=())))
def test_the_short_way_to_json_gives_the_same_bytes(text: str) -> None:
    assert text_to_json("assistant", text) == message_to_json(Message.assistant(text))


def test_a_recovered_text_is_stored_as_a_clean_commit_stores_it(tmp_path: Path) -> None:
    turn: list[Op] = [("begin",), ("text", 'Hé "\ud83d'), ("text", "\ude00\x00\n"), ("done",)]
    leave(tmp_path / "a.db", [*turn, ("commit",)])
    leave(tmp_path / "b.db", turn)
    holdfast.open(tmp_path / "b.db").close()
    sql = "SELECT body || status || stop_reason || metadata FROM history_entries"
    assert scalar(tmp_path / "a.db", sql) == scalar(tmp_path / "b.db", sql)


# --- damage -------------------------------------------------------------------------------------

TEXTS: list[Op] = [("user", "go"), ("begin",), *[("text", f"w{n} ") for n in range(1, 7)]]


@pytest.mark.parametrize("sealed", [[], [("done",), ("seal",)]], ids=["open", "sealed"])
@pytest.mark.parametrize(
    "harm",
    [
        "DELETE FROM stream_journal WHERE seq = 4",
        "UPDATE stream_journal SET content = 'evil' WHERE seq = 4",
        "UPDATE stream_journal SET event_type = 'thinking_delta' WHERE seq = 4",
    ],
    ids=["gap", "content", "kind"],
)
def test_behind_a_damaged_event_the_prefix_is_kept_and_the_rest_is_in_metadata(
    tmp_path: Path, harm: str, sealed: list[Op]
) -> None:
    path = tmp_path / "s.db"
    leave(path, [*TEXTS, *sealed])
    damage(path, harm)
    step, (said,) = recovered(path)
    assert said.message.text == "w1 w2 w3 "
    assert said.status == step.outcome == "interrupted"
    assert said.metadata["gap_at"] == 4
    assert said.metadata["behind_gap"].endswith("w5 w6 ")
    assert "event 4 is missing or damaged" in " ".join(step.errors)


def test_a_damaged_first_event_loses_no_words(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    leave(path, TEXTS)
    damage(path, "DELETE FROM stream_journal WHERE seq = 1")
    step, entries = recovered(path)
    assert (step.outcome, entries) == ("empty", [])
    assert "event 1" in " ".join(step.errors)
    kept = json.loads(scalar(path, "SELECT problem FROM step_metadata"))
    assert kept["behind_gap"] == "w2 w3 w4 w5 w6 "


def test_a_sealed_step_that_lost_its_last_event_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    leave(path, [*TEXTS, ("seal",)])
    damage(path, "DELETE FROM stream_journal WHERE seq = 6")
    step, (said,) = recovered(path)
    assert said.message.text == "w1 w2 w3 w4 w5 "
    assert said.metadata["gap_at"] == 6
    assert len(step.errors) == 1


@pytest.mark.parametrize("seq", [2, 3], ids=["its announcement", "its arguments"])
def test_a_result_whose_call_is_damaged_is_kept_for_people_and_never_an_orphan(
    tmp_path: Path, seq: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s.db"
    leave(path, turn("complete", OPEN_CALLS["good arguments"], SEALED_CALLS["answered"]))
    damage(path, "DELETE FROM stream_journal WHERE seq = ?", seq)
    events: list[Any] = []
    step, entries = recovered(path, on_event=events.append)
    (said,) = entries
    assert said.message.tool_calls == []
    (kept,) = said.metadata["lost_results"]
    assert (kept["tool_use_id"], kept["content"]) == ("c", "it is done")
    assert any("it was answered" in error for error in step.errors)
    assert [e.count for e in events if e.kind == "orphan_output"] == [1]
    assert "is an orphan" in caplog.text
    assert violations(path, [], settled=False) == []


@pytest.mark.parametrize("seq", [2, 3], ids=["its announcement", "its arguments"])
def test_a_started_call_whose_events_are_damaged_is_still_told_as_in_doubt(
    tmp_path: Path, seq: int
) -> None:
    path = tmp_path / "s.db"
    leave(path, turn("complete", OPEN_CALLS["good arguments"], SEALED_CALLS["started never"]))
    damage(path, "DELETE FROM stream_journal WHERE seq = ?", seq)
    step, _ = recovered(path)
    assert step.in_doubt == ("c",)
    assert any("it was started" in error for error in step.errors)


def test_an_event_of_an_unknown_kind_is_passed_over_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with holdfast.open(path) as store:
        step = store.create_session(SESSION).begin_step()
        step.append_text("a")
        store.engine.append(step.step_id << 32 | 2, "hologram", None, "?")
        store.engine.append(step.step_id << 32 | 3, "text_delta", None, "b")
    with holdfast.open(path) as store:
        (settled,) = store.recovery.steps
        assert store.session(SESSION).messages()[0].text == "ab"
    assert "hologram" in " ".join(settled.errors)


# --- child processes ----------------------------------------------------------------------------


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def leave_with_process(path: Path, pid: int) -> None:
    with holdfast.open(path) as store:
        session = store.create_session(SESSION)
        session.add_user("go")
        step = session.begin_step()
        step.announce_call("c", "run")
        step.append_args("c", "{}")
        step.append_done()
        step.seal()
        step.start_call("c")
        step.record_process("c", pid)


def test_a_child_that_still_runs_is_reported_and_left_alone(
    tmp_path: Path, child: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    leave_with_process(tmp_path / "s.db", child.pid)
    step, _ = recovered(tmp_path / "s.db")
    assert [orphan.pid for orphan in step.orphans] == [child.pid]
    assert step.in_doubt == ("c",)
    assert f"process {child.pid} still runs" in caplog.text
    assert child.poll() is None


def test_a_hook_may_end_a_child_that_still_runs(
    tmp_path: Path, child: subprocess.Popen[bytes]
) -> None:
    leave_with_process(tmp_path / "s.db", child.pid)
    ended: list[Any] = []
    policy = RecoveryPolicy(orphan_hook=lambda call: ended.append(call.process.end()))  # type: ignore[union-attr]
    step, _ = recovered(tmp_path / "s.db", policy=policy)
    assert ended == [True]
    assert child.wait(60) == -9
    assert step.in_doubt == ("c",)


def test_a_reused_pid_is_no_orphan_and_cannot_be_ended(
    tmp_path: Path, child: subprocess.Popen[bytes]
) -> None:
    path = tmp_path / "s.db"
    leave_with_process(path, child.pid)
    damage(path, "UPDATE tool_calls SET process_started = process_started || '1'")
    told: list[Any] = []
    with holdfast.open(path, recover=False) as store:
        (call,) = classify(store, 1).calls
        assert call.process is not None
        assert call.process.end() is False
    step, _ = recovered(path, policy=RecoveryPolicy(orphan_hook=told.append))
    assert (step.orphans, told, child.poll()) == ((), [], None)


def test_a_child_that_has_ended_is_no_orphan(
    tmp_path: Path, child: subprocess.Popen[bytes]
) -> None:
    leave_with_process(tmp_path / "s.db", child.pid)
    child.kill()
    child.wait()
    step, _ = recovered(tmp_path / "s.db")
    assert (step.orphans, step.in_doubt) == ((), ("c",))


def test_a_hook_that_raises_is_reported_and_stops_nothing(
    tmp_path: Path, child: subprocess.Popen[bytes]
) -> None:
    def hook(call: Any) -> None:
        raise RuntimeError("no")

    leave_with_process(tmp_path / "s.db", child.pid)
    step, _ = recovered(tmp_path / "s.db", policy=RecoveryPolicy(orphan_hook=hook))
    assert (step.outcome, len(step.orphans)) == ("complete", 1)
    assert "RuntimeError('no')" in " ".join(step.errors)


# --- settle by hand, and the clean path ---------------------------------------------------------


def test_settle_settles_the_one_step_it_is_given(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with holdfast.open(path) as store:
        for name in "ab":
            store.create_session(name).begin_step().append_text(name)
    with holdfast.open(path, recover=False) as store:
        settled = settle(store, 2)
        assert (settled.step_id, settled.session_id, settled.outcome) == (2, "b", "interrupted")
        assert store.session("b").messages()[0].text == "b"
        assert len(store.session("a").history) == 0
        discarded = settle(store, 1, policy=RecoveryPolicy(incomplete="discard"))
        assert discarded.outcome == "discarded"


def test_settle_refuses_a_step_whose_owner_lives(tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "s.db") as store:
        step = store.create_session(SESSION).begin_step()
        with (
            holdfast.open(tmp_path / "s.db") as other,
            pytest.raises(holdfast.StepBusy, match="alive"),
        ):
            settle(other, step.step_id)
        with pytest.raises(holdfast.StepBusy, match="alive"):
            settle(store, step.step_id)
        step.append_text("still mine")
        step.commit()


def test_settle_and_classify_refuse_a_step_that_is_not_unfinished(tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "s.db") as store:
        step = store.create_session(SESSION).begin_step()
        step.append_text("x")
        step.commit()
        for refuse in (settle, classify):
            with pytest.raises(holdfast.StepClosed, match="committed"):
                refuse(store, step.step_id)
            with pytest.raises(holdfast.StepClosed, match="unknown"):
                refuse(store, 99)


@pytest.mark.parametrize("how", ["exception", "interrupt", "normal", "crash"])
def test_a_block_left_early_answers_calls_with_the_words_of_recovery(
    tmp_path: Path, how: str
) -> None:
    """One function settles: the words, the order and the pairing are the same by every way."""
    path = tmp_path / "s.db"

    def work(step: Any) -> None:
        for call_id in "abc":
            step.announce_call(call_id, "run")
            step.append_args(call_id, "{}")
        step.append_done()
        step.seal()
        step.start_call("b")
        step.start_call("c", replay="safe")

    with holdfast.open(path) as store:
        session = store.create_session(SESSION)
        error = {"exception": ValueError("x"), "interrupt": KeyboardInterrupt()}.get(how)
        if how == "crash":
            work(session.begin_step())
        elif error is None:
            with session.begin_step() as step:
                work(step)
        else:
            with pytest.raises(type(error)), session.begin_step() as step:
                work(step)
                raise error
    with holdfast.open(path) as store:
        said, outputs = store.session(SESSION).messages()
    assert [c.id for c in said.tool_calls] == ["a", "b", "c"]
    words = [result.content for result in outputs.tool_results]
    assert words == [CANCELED, IN_DOUBT, IN_DOUBT_SAFE]
    assert violations(path, [], settled=False) == []


def test_a_policy_may_be_given_by_position():
    policy = holdfast.RecoveryPolicy("discard", "keep", "not begun", "unknown", 5)
    assert (policy.incomplete, policy.canceled_text) == ("discard", "not begun")
    assert (policy.in_doubt_text, policy.max_attempts) == ("unknown", 5)
