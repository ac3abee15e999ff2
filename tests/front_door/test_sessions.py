"""Sessions: ids, one writer at a time across stores and processes, and what is legal to send."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import (
    InvalidArgument,
    InvalidMessage,
    InvalidSessionId,
    Message,
    MessageId,
    Session,
    SessionBusy,
    SessionExists,
    SessionNotFound,
    SessionUnrecovered,
    StepBusy,
    StepClosed,
    Store,
    Text,
    Thinking,
    ToolUse,
)
from holdfast.recovery import recover, settle, validate
from holdfast.session_ids import make_session_id

# A process of its own that opens a step, says so, and does as it is told from then on.
CHILD = """
import sys, holdfast
store = holdfast.open(sys.argv[1])
session = store.session("s")
step = session.begin_step()
step.append_text("from the child")
print(step.step_id, flush=True)
for line in sys.stdin:
    match line.strip():
        case "commit": print(step.commit(), flush=True)
        case "close": store.close(); print("closed", flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with holdfast.open(path, durability="process") as store:
        yield store


@pytest.fixture
def session(store: Store) -> Session:
    return store.create_session("s")


@contextmanager
def child(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A living process with a step open in session `s`."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline().strip().isdigit()
            yield process
        finally:
            process.kill()


def tell(process: subprocess.Popen[str], word: str) -> str:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(word + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def texts(session: Session) -> list[str]:
    return [message.text for message in session.messages()]


# --- ids ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("id", ["a", "0", "A-b_c.d", "x" * 128, "1.2.3", "a-", "a_", "a."])
def test_an_id_of_plain_characters_is_taken(store: Store, id: str):
    assert store.create_session(id).id == id
    assert store.session(id).id == id


@pytest.mark.parametrize(
    "id",
    [
        "",
        "x" * 129,
        "..",
        "a..b",
        ".a",
        "-a",
        "_a",
        "a/b",
        "a\\b",
        "/etc",
        "a b",
        "a\n",
        "a\0b",
        "é",
        "٣",
        "a:b",
        "~a",
        7,
        b"a",
        ["a"],
    ],
)
def test_an_id_that_could_leave_its_folder_is_refused(store: Store, id: Any):
    for act in (store.create_session, store.session, store.delete_session):
        with pytest.raises(InvalidSessionId, match="nothing was written") as refused:
            act(id)
        assert isinstance(refused.value, ValueError)
    assert store.sessions() == []


def test_made_ids_sort_by_time_and_are_ids(store: Store):
    made = [make_session_id() for _ in range(200)]
    stamps = [id.split("-")[0] for id in made]
    assert stamps == sorted(stamps) and len(set(made)) == 200
    assert store.create_session(made[0]).id == made[0]


def test_an_id_is_given_once(store: Store, session: Session):
    session.add_user("x")
    with pytest.raises(SessionExists, match="'s'"):
        store.create_session("s")
    assert len(session.history) == 1


def test_a_session_that_is_not_there_is_told(store: Store):
    with pytest.raises(SessionNotFound, match="'none'"):
        store.session("none")
    with pytest.raises(SessionNotFound, match="'none'"):
        store.delete_session("none")


@pytest.mark.parametrize("bad", [{"model": 7}, {"title": b"x"}, {"metadata": {"a": {1}}}])
def test_bad_facts_are_refused_and_make_no_session(store: Store, bad: dict[str, Any]):
    with pytest.raises(InvalidArgument, match=next(iter(bad))):
        store.create_session("s", **bad)
    assert store.sessions() == []


def test_facts_hold_any_text(store: Store):
    store.create_session("s", title="\ud800 é", metadata={"k": "\udfff"})
    assert store.sessions()[0].title == "� é"


# --- adding -------------------------------------------------------------------------------------


def test_what_is_added_is_there_in_order(session: Session):
    assert session.add_system("be brief") == 0
    assert session.add_user("hello") == 1
    assert session.add(Message.assistant("hi")) == 2
    roles = [(message.role, message.text) for message in session.messages()]
    assert roles == [("system", "be brief"), ("user", "hello"), ("assistant", "hi")]


def test_an_added_message_survives_a_killed_process(path: Path):
    code = (
        "import sys, os, signal, holdfast\n"
        "holdfast.open(sys.argv[1]).create_session('s').add_user('kept')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == -signal.SIGKILL
    with holdfast.open(path) as store:
        assert texts(store.session("s")) == ["kept"]


@pytest.mark.parametrize("text", ["", None, 7, ["x"]])
def test_an_empty_or_foreign_text_is_refused(session: Session, text: Any):
    for act in (session.add_user, session.add_system):
        with pytest.raises(InvalidMessage):
            act(text)
    with pytest.raises(InvalidMessage):
        session.add(text)
    assert len(session.history) == 0


def test_a_session_is_not_pickled(session: Session):
    for what in (session, session.begin_step()):
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(what)


# --- one writer ---------------------------------------------------------------------------------


def test_an_open_step_of_this_store_is_named(store: Store, session: Session):
    step = session.begin_step()
    for act in (session.begin_step, lambda: session.add_user("x")):
        with pytest.raises(StepBusy, match=f"step {step.step_id}: is open in session 's'") as busy:
            act()
        assert busy.value.step_id == step.step_id
    assert store.create_session("other").add_user("x") == 0
    step.discard()
    assert session.add_user("now") == 0


def test_another_store_of_this_process_is_told_apart(path: Path, session: Session):
    step = session.begin_step()
    with holdfast.open(path) as second:
        assert second.recovery.is_empty and second.recovery.skipped == ("s",)
        for act in (
            second.session("s").begin_step,
            lambda: second.session("s").add_user("x"),
            lambda: second.delete_session("s"),
        ):
            with pytest.raises(SessionBusy, match="this process, another Store"):
                act()
        step.append_text("mine")
        assert step.commit() == [0]
        assert second.session("s").add_user("x") == 1


def test_another_process_is_named_by_pid_and_host(path: Path, store: Store, session: Session):
    with child(path) as process:
        for act in (
            session.begin_step,
            lambda: session.add_user("x"),
            lambda: store.delete_session("s"),
        ):
            with pytest.raises(SessionBusy, match=f"pid {process.pid} on {socket.gethostname()}"):
                act()
        assert store.sessions()[0].live and not store.sessions()[0].interrupted
        assert tell(process, "commit") == "[0]"
        assert session.add_user("my turn") == 1
    assert texts(session) == ["from the child", "my turn"]


def test_readers_are_never_blocked(path: Path, store: Store, session: Session):
    session.add_user("question")
    with child(path):
        assert texts(session) == ["question"]
        assert len(session.history) == 1 and store.sessions()[0].entries == 1
        with holdfast.open(path, read_only=True) as reader:
            assert texts(reader.session("s")) == ["question"]


def test_a_killed_processs_step_is_settled_before_the_next_write(
    path: Path, store: Store, session: Session
):
    with child(path) as process:
        process.kill()
        process.wait()
        assert session.add_user("after") == 1
    assert [(e.message.text, e.status) for e in session.history.entries()] == [
        ("from the child", "interrupted"),
        ("after", "complete"),
    ]
    (settled,) = store.recovery.steps
    assert (settled.session_id, settled.outcome, settled.entry_ids) == ("s", "interrupted", (0,))


def test_a_stopped_process_is_alive(path: Path, store: Store, session: Session):
    with child(path) as process:
        os.kill(process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(SessionBusy):
                session.begin_step()
        finally:
            os.kill(process.pid, signal.SIGCONT)


def test_the_step_of_a_store_that_was_closed_is_anybodys(
    path: Path, store: Store, session: Session
):
    with child(path) as process:
        assert tell(process, "close") == "closed"
        assert session.add_user("after") == 1
        assert texts(session) == ["from the child", "after"]


def test_a_store_that_does_not_recover_says_what_is_in_the_way(path: Path):
    with holdfast.open(path) as store:
        store.create_session("s").begin_step().append_text("left")
    with holdfast.open(path, recover=False) as store:
        assert store.recovery.is_empty
        session = store.session("s")
        for act in (session.begin_step, lambda: session.add_user("x")):
            with pytest.raises(SessionUnrecovered, match=r"holdfast\.recovery\.recover"):
                act()
        assert store.sessions()[0].interrupted and not store.sessions()[0].live
        assert len(recover(store).steps) == 1
        assert session.add_user("x") == 1


def test_a_step_is_used_from_several_threads(session: Session):
    step = session.begin_step()
    threads = [
        threading.Thread(target=lambda: [step.append_text("x") for _ in range(50)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    step.commit()
    assert texts(session) == ["x" * 200]


def test_one_of_many_threads_gets_the_step(session: Session):
    outcomes: list[object] = []

    def begin() -> None:
        try:
            outcomes.append(session.begin_step())
        except StepBusy as error:
            outcomes.append(error)

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(outcome, StepBusy) for outcome in outcomes) == 7


# --- what is legal to send ----------------------------------------------------------------------


def test_a_call_without_an_output_gets_one_in_its_place(session: Session):
    session.add_user("go")
    session.add(Message("assistant", [ToolUse("c1", "look", {})]))
    session.add_user("and?")
    assert not validate([e.message for e in session.history.entries()]).is_valid
    sent = session.messages()
    assert validate(sent).is_valid
    assert [r.tool_use_id for r in sent[2].tool_results] == ["c1"]
    assert len(session.history) == 3  # A view: what is stored is as it was.


def test_thinking_that_was_cut_off_unsigned_is_stored_and_not_sent(session: Session):
    with pytest.raises(KeyboardInterrupt), session.begin_step() as step:
        step.append_thinking("signed")
        step.append_signature("sig")
        step.append_text("words")
        step.append_thinking("cut of")
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt), session.begin_step() as step:
        step.append_thinking("only this")
        raise KeyboardInterrupt
    assert len(session.history.get_entry(0).message.content) == 3
    assert session.history.get_entry(1).message.content == [Thinking("only this")]
    (sent,) = session.messages()
    assert sent.content == [Thinking("signed", "sig"), Text("words")]


def test_repair_stores_what_is_legal(session: Session):
    session.add_user("go")
    session.history.push(Message("assistant", [ToolUse("c1", "look", {})]), 5)
    session.history.push(Message.user("and?"), 7)
    report = session.repair()
    assert not report.is_valid
    stored = [entry.message for entry in session.history.entries()]
    assert validate(stored).is_valid and stored == session.messages()
    assert session.history.get_entry(1).token_count == 5
    assert session.repair().is_valid


def test_repair_keeps_what_is_known_of_the_messages_behind(session: Session):
    session.add(Message("assistant", [ToolUse("c1", "look", {})]))
    with session.begin_step(model="m") as step:
        step.append_text("later")
        step.append_done(stop_reason="end", usage={"in": 1})
    before = session.history.get_entry(1)
    session.repair()
    after = session.history.get_entry(2)
    assert after.message == before.message
    for fact in ("status", "stream_step_id", "model_name", "stop_reason", "usage", "created_at"):
        assert getattr(after, fact) == getattr(before, fact), fact


def test_repair_does_not_wait_for_an_open_step(session: Session):
    session.add(Message("assistant", [ToolUse("c1", "look", {})]))
    step = session.begin_step()
    with pytest.raises(StepBusy):
        session.repair()
    step.discard()
    assert not session.repair().is_valid


def test_repair_removes_nothing_that_was_added_meanwhile(
    session: Session, monkeypatch: pytest.MonkeyPatch
):
    """The count was taken after the entries were read: what came between was deleted."""
    session.add(Message("assistant", [ToolUse("c1", "look", {})]))
    real = holdfast.repair.normalize
    once = iter([True])

    def meanwhile(messages: list[Message]) -> list[Message]:
        if next(once, False):
            session.add_user("meanwhile")
        return real(messages)

    monkeypatch.setattr("holdfast.repair.normalize", meanwhile)
    session.repair()
    assert session.history.entries()[-1].message.text == "meanwhile"


def test_a_writer_waits_for_another_store_that_recovers_the_session(tmp_path: Path) -> None:
    """Two stores opened at once after a crash: the slower one saw SessionBusy, though nobody had a
    step open; it waits for the quicker one's recovery now."""
    path = tmp_path / "a.db"
    with holdfast.open(path) as store:
        step = store.create_session("s").begin_step()
        step.announce_call("c", "tool")
        step.append_done()
        step.seal()
        step.start_call("c")
    asked, may_answer = threading.Event(), threading.Event()

    def slow(call: holdfast.RecoveredCall) -> None:
        asked.set()
        assert may_answer.wait(30)

    def recover_elsewhere() -> None:
        with holdfast.open(path, resolver=slow):
            pass

    elsewhere = threading.Thread(target=recover_elsewhere)
    elsewhere.start()
    assert asked.wait(30)
    with holdfast.open(path) as store:
        assert store.recovery.skipped == ("s",)
        threading.Timer(0.05, may_answer.set).start()
        assert store.session("s").add_user("and then?") == 2
    elsewhere.join()


def test_a_handle_of_a_deleted_session_never_writes_into_its_namesake(store: Store):
    old = store.create_session("s")
    old.add(Message("assistant", [ToolUse("c", "look", {})]))
    store.delete_session("s")
    new = store.create_session("s")
    new.add_user("of the new one")
    for act in (
        lambda: old.add_user("x"),
        lambda: old.history.push_with_step_id(Message.assistant("x"), 1, 7),
        lambda: old.history.pop_if_last(MessageId(0)),
        lambda: old.history.add_summary(0, 1, "x"),
        lambda: old.begin_step(),
        lambda: old.repair(),
        lambda: old.messages(),
    ):
        with pytest.raises(SessionNotFound):
            act()
    assert [message.text for message in new.messages()] == ["of the new one"]
    assert len(new.history) == 1


def test_a_model_name_that_is_no_utf_8_is_kept_as_far_as_it_is_one(store: Store):
    with store.create_session("s").begin_step("m\ud800") as step:
        step.append_text("x")
    assert step.model_name == "m\ufffd"
    assert store.session("s").history.get_entry(0).model_name == "m\ufffd"


def test_a_step_that_somebody_else_has_settled_is_not_told_as_committed(store: Store, path: Path):
    """As when the lock file is deleted under a living owner: what came behind it is not there."""
    step = store.create_session("s").begin_step()
    step.append_text("kept")
    with holdfast.open(path) as thief:
        assert thief.engine.claim(step.step_id, dead_owner=store.owner_id or 0)
        settle(thief, step.step_id)
        step.append_text("and lost")
        with pytest.raises(StepClosed, match="somebody else"):
            step.commit()
        assert [message.text for message in thief.session("s").messages()] == ["kept"]
