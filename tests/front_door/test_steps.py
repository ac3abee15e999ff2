"""Steps of a session: commit, discard, and every way to leave a `with` block."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

import holdfast
from holdfast import (
    ActiveJournal,
    HistoryEntry,
    RecoveryPolicy,
    Session,
    StepClosed,
    Store,
    StoreClosed,
    StoreFull,
    ToolResult,
    UnansweredCalls,
)
from holdfast.recovery import validate
from holdfast.recovery.faults import FaultDisk
from holdfast.recovery.validation import IN_DOUBT_TEXT, NOT_STARTED_TEXT


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with holdfast.open(tmp_path / "a.db", durability="process") as store:
        yield store


@pytest.fixture
def session(store: Store) -> Session:
    return store.create_session("s", provider="openai", model="gpt-4o")


def only_entry(session: Session) -> HistoryEntry:
    (entry,) = session.history.entries()
    return entry


def say(step: ActiveJournal, *calls: str) -> None:
    step.append_text("text")
    for call in calls:
        step.announce_call(call, "tool")
        step.append_args(call, f'{{"of": "{call}"}}')


def is_pruned(store: Store) -> bool:
    stats = store.stats()
    return (stats.journal_events, stats.open_steps, stats.sealed_steps) == (0, 0, 0)


# --- commit -------------------------------------------------------------------------------------


def test_a_step_with_text_gives_one_id(store: Store, session: Session):
    step = session.begin_step()
    step.append_text("a")
    step.append_text("b")
    step.append_done(stop_reason="stop", usage={"in": 1})
    assert step.commit() == [0]
    entry = only_entry(session)
    assert (entry.message.text, entry.status) == ("ab", "complete")
    assert (entry.model_name, entry.stop_reason, entry.usage) == ("gpt-4o", "stop", {"in": 1})
    assert entry.stream_step_id == step.step_id and session.history.has_step_id(step.step_id)
    assert is_pruned(store)


def test_a_step_with_calls_gives_two_ids_and_one_entry_with_all_results(session: Session):
    step = session.begin_step()
    say(step, "c1", "c2", "c3")
    step.append_done()
    step.seal()
    for call in ("c3", "c1", "c2"):
        step.record_result(call, f"of {call}")
    assert step.commit() == [0, 1]
    said, answered = session.history.entries()
    assert [call.id for call in said.message.tool_calls] == ["c1", "c2", "c3"]
    assert answered.message.role == "user"
    assert [r.tool_use_id for r in answered.message.tool_results] == ["c1", "c2", "c3"]
    assert [r.content for r in answered.message.tool_results] == ["of c1", "of c2", "of c3"]


@pytest.mark.parametrize("done", [True, False])
def test_an_empty_step_gives_no_id_and_leaves_no_entry(store: Store, session: Session, done: bool):
    step = session.begin_step()
    if done:
        step.append_done()
    assert step.commit() == []
    assert len(session.history) == 0 and is_pruned(store)
    assert session.add_user("next") == 0


def test_blocks_stand_in_the_order_of_the_stream(session: Session):
    with session.begin_step() as step:
        step.append_text("one")
        step.announce_call("c1", "tool")
        step.append_args("c1", "{}")
        step.append_text("two")
        step.append_opaque("openai", {"id": "x"})
    kinds = [block.type for block in session.history.get_entry(0).message.content]
    assert kinds == ["text", "tool_use", "text", "opaque"]


def test_commit_refuses_calls_without_results_and_can_be_tried_again(session: Session):
    step = session.begin_step()
    say(step, "c1", "c2")
    step.append_done()
    step.seal()
    step.record_result("c1", "x")
    with pytest.raises(UnansweredCalls, match="'c2'") as refused:
        step.commit()
    assert refused.value.call_ids == ("c2",) and len(session.history) == 0
    step.record_result("c2", "y")
    assert step.commit() == [0, 1]


def test_commit_seals_first_and_without_done_it_counts_as_interrupted(session: Session):
    step = session.begin_step()
    step.append_text("so far")
    step.commit()
    assert only_entry(session).status == "interrupted"


def test_a_dropped_call_needs_no_result_and_its_fragment_is_kept(session: Session):
    step = session.begin_step()
    step.append_text("x")
    step.announce_call("c1", "tool")
    step.append_args("c1", '{"half')
    step.append_done()
    assert step.commit() == [0] and step.dropped_calls == ("c1",)
    entry = only_entry(session)
    assert entry.message.tool_calls == []
    assert entry.metadata["dropped_calls"][0]["raw_arguments"] == '{"half'


@pytest.mark.parametrize("end", ["commit", "discard"])
def test_after_its_end_a_step_takes_nothing(session: Session, end: str):
    step = session.begin_step()
    step.append_text("x")
    getattr(step, end)()
    for act in (step.commit, step.discard, step.seal, lambda: step.append_text("y")):
        with pytest.raises(StepClosed):
            act()


def test_discard_says_how_many_events_went_and_leaves_nothing(store: Store, session: Session):
    step = session.begin_step()
    say(step, "c1")
    assert step.discard() == 3
    assert len(session.history) == 0 and is_pruned(store)
    assert session.begin_step().step_id > step.step_id


def test_a_signed_message_names_its_provider_and_model(session: Session):
    with session.begin_step() as step:
        step.append_thinking("hm")
        step.append_signature("sig")
    assert only_entry(session).message.metadata == {"provider": "openai", "model": "gpt-4o"}


def test_the_model_of_a_step_stands_before_the_sessions(session: Session):
    with session.begin_step(model="other") as step:
        step.append_text("x")
    assert only_entry(session).model_name == "other"


def test_a_counter_that_fails_stops_no_commit(store: Store, session: Session):
    class Broken:
        name, exact = "broken", True

        def count_str(self, text: str, /) -> int:
            raise MemoryError

        count_message = count_str

    history = session.history
    working, history.counter = history.counter, Broken()
    with session.begin_step() as step:
        step.append_text("hello")
    assert history.get_entry(0).token_count is None
    history.counter = working
    assert history.total_tokens == history.get_entry(0).token_count
    assert history.get_entry(0).counter == working.name


def test_commit_is_one_transaction(tmp_path: Path):
    """Wherever the disk runs full, the step is in the journal or in history, never half in both."""
    with FaultDisk() as disk, holdfast.open(tmp_path / "b.db", vfs=disk.name) as store:
        session = store.create_session("s")
        for nth in range(1, 30):
            step = session.begin_step()
            say(step, "c1")
            step.append_done()
            step.seal()
            step.record_result("c1", "x" * 3000)
            before = len(session.history)
            disk.fail("write", nth=nth, error="full")
            try:
                step.commit()
            except StoreFull:
                assert len(session.history) == before
                assert store.stats().journal_events == 4
                assert step.commit() == [before, before + 1]
            else:
                break
            assert len(session.history) == before + 2 and store.stats().journal_events == 0
        assert nth > 3


@pytest.mark.parametrize("act", ["commit", "discard"])
def test_an_end_that_was_interrupted_after_it_landed_can_be_asked_again(
    session: Session, monkeypatch: pytest.MonkeyPatch, act: str
):
    step = session.begin_step()
    step.append_text("x")
    step.seal()
    operation = "settle" if act == "commit" else "discard"
    engine: Any = session._engine
    real = getattr(engine, operation)

    def interrupted(*given: Any) -> None:
        real(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, operation, interrupted)
    with pytest.raises(KeyboardInterrupt):
        getattr(step, act)()
    monkeypatch.undo()
    assert getattr(step, act)() == ([0] if act == "commit" else 1)
    assert len(session.history) == (1 if act == "commit" else 0)


# --- leaving a block ----------------------------------------------------------------------------


def test_leaving_normally_appends_done_and_commits(store: Store, session: Session):
    with session.begin_step() as step:
        step.append_text("x")
    assert only_entry(session).status == "complete" and is_pruned(store)


def test_a_terminal_event_that_stands_is_kept(session: Session):
    with session.begin_step() as step:
        step.append_text("x")
        step.append_error("overloaded")
    entry = only_entry(session)
    assert (entry.status, entry.metadata["error"]) == ("errored", "overloaded")


def test_a_block_that_sealed_without_done_stays_interrupted(session: Session):
    with session.begin_step() as step:
        step.append_text("x")
        step.seal()
    assert only_entry(session).status == "interrupted"


def test_a_followed_stream_without_its_end_is_interrupted(session: Session):
    with session.begin_step() as step:
        step.append_text("x")
        step._cut_off = True
    assert only_entry(session).status == "interrupted"


def test_an_exception_is_recorded_as_error_and_goes_on(session: Session):
    with pytest.raises(ValueError, match="bad stream"), session.begin_step() as step:
        step.append_text("so far")
        raise ValueError("bad stream")
    entry = only_entry(session)
    assert (entry.status, entry.message.text) == ("errored", "so far")
    assert entry.metadata["error"] == "ValueError: bad stream"


@pytest.mark.parametrize(
    "interruption", [KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit]
)
def test_an_interruption_means_interrupted_and_goes_on(
    session: Session, interruption: type[BaseException]
):
    with pytest.raises(interruption), session.begin_step() as step:
        step.append_text("so far")
        raise interruption
    entry = only_entry(session)
    assert (entry.status, entry.message.text) == ("interrupted", "so far")
    assert entry.metadata == {"exception": interruption.__name__}


def test_a_generator_that_is_closed_leaves_its_step_interrupted(session: Session):
    def stream() -> Iterator[str]:
        with session.begin_step() as step:
            for piece in "abc":
                step.append_text(piece)
                yield piece

    shown = stream()
    next(shown)
    shown.close()
    assert (only_entry(session).message.text, only_entry(session).status) == ("a", "interrupted")


@pytest.mark.parametrize("error", [ValueError("late"), KeyboardInterrupt("late")])
def test_after_a_terminal_event_the_status_stays_and_the_text_is_a_note(
    session: Session, error: BaseException
):
    with pytest.raises(type(error)), session.begin_step() as step:
        step.append_text("x")
        step.append_done()
        raise error
    entry = only_entry(session)
    assert entry.status == "complete"
    assert entry.metadata == {"exception": f"{type(error).__name__}: late"}


def test_an_exception_without_words_or_with_broken_ones_is_recorded_all_the_same(
    session: Session,
):
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    for error in (ValueError(), Broken(), ValueError("\ud800")):
        for done in (False, True):
            with pytest.raises(type(error)), session.begin_step() as step:
                step.append_text("x")
                if done:
                    step.append_done()
                raise error
    assert [
        entry.metadata.get("error") or entry.metadata["exception"]
        for entry in session.history.entries()
    ] == ["ValueError"] * 2 + ["Broken"] * 2 + ["ValueError: �"] * 2


def test_unanswered_calls_are_answered_as_recovery_does_and_nobody_is_asked(tmp_path: Path):
    asked: list[object] = []

    def resolver(call: object) -> ToolResult | None:
        asked.append(call)
        return None

    policy = RecoveryPolicy(in_doubt_text="may have happened", canceled_text="did not happen")
    with holdfast.open(tmp_path / "b.db", resolver=resolver, policy=policy) as store:
        session = store.create_session("s")
        with session.begin_step() as step:
            say(step, "c1", "c2", "c3")
            step.append_done()
            step.seal()
            step.start_call("c2")
            step.record_result("c3", "real")
        canceled, in_doubt, real = session.history.get_entry(1).message.tool_results
        assert (canceled.content, canceled.synthetic) == ("did not happen", "canceled")
        assert (in_doubt.content, in_doubt.synthetic) == ("may have happened", "in_doubt")
        assert (real.content, real.synthetic) == ("real", None)
        assert canceled.is_error and in_doubt.is_error and not real.is_error
        assert asked == [] and validate(session.messages()).is_valid


def test_by_default_the_words_tell_doubt_from_safety(session: Session):
    with pytest.raises(KeyboardInterrupt), session.begin_step() as step:
        say(step, "c1", "c2")
        step.append_done()
        call, _ = step.seal().tool_calls

        def interrupted(**_: object) -> None:
            raise KeyboardInterrupt

        step.execute(call, interrupted)
    first, second = session.history.get_entry(1).message.tool_results
    assert (first.content, second.content) == (IN_DOUBT_TEXT, NOT_STARTED_TEXT)


def test_a_policy_that_discards_is_for_crashes_only(tmp_path: Path):
    policy = RecoveryPolicy(incomplete="discard", errored="discard")
    with holdfast.open(tmp_path / "b.db", policy=policy) as store:
        session = store.create_session("s")
        with pytest.raises(KeyboardInterrupt), session.begin_step() as step:
            step.append_text("shown")
            raise KeyboardInterrupt
        assert only_entry(session).message.text == "shown"


@pytest.mark.parametrize("end", ["commit", "discard"])
@pytest.mark.parametrize("raises", [False, True])
def test_an_end_inside_the_block_is_the_end(session: Session, end: str, raises: bool):
    def block() -> None:
        with session.begin_step() as step:
            step.append_text("x")
            step.append_done()
            getattr(step, end)()
            if raises:
                raise ValueError("after")

    if raises:
        with pytest.raises(ValueError, match="after") as error:
            block()
        assert not hasattr(error.value, "__notes__")
    else:
        block()
    assert len(session.history) == (1 if end == "commit" else 0)


def test_a_store_closed_inside_the_block_leaves_the_step_to_recovery(tmp_path: Path):
    store = holdfast.open(tmp_path / "b.db")
    with pytest.raises(StoreClosed), store.create_session("s").begin_step() as step:
        step.append_text("so far")
        store.close()
    with pytest.raises(StoreClosed):
        step.append_text("more")
    with holdfast.open(tmp_path / "b.db") as again:
        assert [s.outcome for s in again.recovery.steps] == ["interrupted"]
        assert only_entry(again.session("s")).message.text == "so far"


def test_an_exception_goes_on_with_a_note_when_settling_fails(tmp_path: Path):
    store = holdfast.open(tmp_path / "b.db")
    session = store.create_session("s")
    with pytest.raises(ValueError, match="mine") as raised, session.begin_step() as step:
        step.append_text("so far")
        store.close()
        raise ValueError("mine")
    (note,) = raised.value.__notes__
    assert f"step {step.step_id} could not be settled" in note and "left to recovery" in note
    with holdfast.open(tmp_path / "b.db") as again:
        assert only_entry(again.session("s")).message.text == "so far"


def test_a_step_that_could_not_be_settled_does_not_block_its_session(tmp_path: Path):
    """The handle is gone with its block: the next write settles what it left."""
    with FaultDisk() as disk, holdfast.open(tmp_path / "b.db", vfs=disk.name) as store:
        session = store.create_session("s")
        with pytest.raises(ValueError, match="mine") as raised, session.begin_step() as step:
            step.append_text("so far")
            disk.fail("write", nth=1, error="full", times=20)
            raise ValueError("mine")
        assert "could not be settled" in raised.value.__notes__[0]
        disk.clear_faults()
        with pytest.raises(StepClosed, match="left to recovery"):
            step.append_text("behind it")
        assert session.add_user("next") == 1
        assert [e.message.text for e in session.history.entries()] == ["so far", "next"]


def test_a_clean_end_that_fails_can_be_tried_again(tmp_path: Path):
    with FaultDisk() as disk, holdfast.open(tmp_path / "b.db", vfs=disk.name) as store:
        session = store.create_session("s")
        with pytest.raises(StoreFull), session.begin_step() as step:
            step.append_text("all of it")
            disk.fail("write", nth=1, error="full", times=20)
        disk.clear_faults()
        if step._terminal is None:
            step.append_done()
        assert step.commit() == [0]
        assert only_entry(session).status == "complete"


def test_a_result_that_could_not_be_recorded_in_the_block_is_recorded_at_its_end(tmp_path: Path):
    """The tool has run: to call it in doubt would be a lie as long as its result is at hand."""
    with FaultDisk() as disk, holdfast.open(tmp_path / "b.db", vfs=disk.name) as store:
        session = store.create_session("s")
        with pytest.raises(StoreFull), session.begin_step() as step:
            say(step, "c1")
            step.append_done()
            (call,) = step.seal().tool_calls

            def tool(of: str) -> str:
                disk.fail("write", nth=1, error="full", times=1)
                return f"paid {of}"

            step.execute(call, tool)
        (result,) = session.history.get_entry(1).message.tool_results
        assert (result.content, result.synthetic) == ("paid c1", None)


# --- signals ------------------------------------------------------------------------------------


@pytest.fixture
def alarm() -> Iterator[Callable[[], None]]:
    """Raise KeyboardInterrupt at the next chance, as Ctrl-C does."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, previous)


@pytest.mark.parametrize("where", ["begin_step", "_tell"])
def test_a_signal_before_the_handle_was_returned_does_not_brick_the_session(
    session: Session,
    alarm: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
):
    owner: Any = session._engine if where == "begin_step" else ActiveJournal
    real = getattr(owner, where)

    def interrupted(*given: Any, **named: Any) -> Any:
        answer = real(*given, **named)
        alarm()
        return answer

    monkeypatch.setattr(owner, where, interrupted)
    try:
        session.begin_step()
        pytest.fail("the signal was lost")
    except KeyboardInterrupt as error:
        monkeypatch.undo()
        # While the traceback still holds every frame, as an interactive session does.
        assert error.__traceback__ is not None
        assert session.add_user("goes on") == 0
        with session.begin_step() as step:
            step.append_text("x")
    assert len(session.history) == 2


def test_a_handle_that_nobody_has_any_more_blocks_nobody(store: Store, session: Session):
    session.begin_step().append_text("lost")
    gc.collect()
    assert not store.sessions()[0].live
    assert session.add_user("next") == 1
    assert session.history.get_entry(0).message.text == "lost"


def test_nothing_else_is_in_the_file_after_all_this(store: Store, session: Session):
    """Every row of the journal has a step, and every step of a session its session."""
    for end in ("commit", "discard"):
        step = session.begin_step()
        say(step)
        getattr(step, end)()
    db = apsw.Connection(str(store.path))
    try:
        for table in ("stream_journal", "tool_calls", "tool_results", "tool_batches"):
            assert db.execute(f"SELECT count(*) FROM {table}").get == 0, table
        states = db.execute("SELECT state FROM step_metadata").fetchall()
        assert states == [("committed",)]
    finally:
        db.close()
