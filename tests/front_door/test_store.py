"""The store as a whole: listing, deleting, purging, copying, watching, reading only, closing."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

import holdfast
from holdfast import (
    Durability,
    ForkedStore,
    HoldfastError,
    InvalidArgument,
    Message,
    ReadOnlyStore,
    SessionNotFound,
    StepBusy,
    Store,
    StoreBusy,
    StoreClosed,
    StoreEvent,
    StoreNotFound,
)

CHILD = """
import sys, holdfast
store = holdfast.open(sys.argv[1])
step = store.session("s").begin_step()
step.append_text("x")
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with holdfast.open(path, durability="process") as store:
        yield store


def ids(store: Store) -> list[str]:
    return [info.id for info in store.sessions()]


def rows(path: Path, table: str) -> int:
    db = apsw.Connection(str(path))
    try:
        return int(db.execute(f"SELECT count(*) FROM {table}").get)
    finally:
        db.close()


def bytes_of(store: Store) -> bytes:
    """What is on disk, read as SQLite reads it: a plain open would drop this process's locks."""
    found = b""
    for name, kind in ((store.path, apsw.SQLITE_OPEN_MAIN_DB), (f"{store.path}-wal", 0)):
        if Path(name).exists():
            flags = [(kind or apsw.SQLITE_OPEN_WAL) | apsw.SQLITE_OPEN_READONLY, 0]
            file = apsw.VFSFile("", str(name), flags)
            found += file.xRead(file.xFileSize(), 0)
            file.xClose()
    return found


# --- opening ------------------------------------------------------------------------------------


def test_a_store_says_where_and_what_it_is(path: Path):
    with holdfast.open(path) as store:
        assert store.path == path and store.durability is Durability.BARRIER
        assert isinstance(store.owner_id, int) and store.recovery.is_empty
    with holdfast.open(str(path), durability=Durability.POWER) as store:
        assert store.durability == "power"


@pytest.mark.parametrize("level", ["process", "barrier", "power"])
def test_every_level_keeps_what_was_said(path: Path, level: str):
    with holdfast.open(path, durability=level) as store:
        session = store.create_session("s")
        session.add_user("q")
        with session.begin_step() as step:
            step.append_text("a")
    with holdfast.open(path, durability=level) as store:
        assert [m.text for m in store.session("s").messages()] == ["q", "a"]


def test_bad_options_open_nothing(path: Path):
    with pytest.raises(ValueError, match="exclusive"):
        holdfast.open(path, exclusive=True, vfs="unix")
    with pytest.raises(ValueError):
        holdfast.open(path, durability="maybe")
    with pytest.raises(StoreNotFound):
        holdfast.open(path, create=False)
    for bad in (":memory:", "file:a.db"):
        with pytest.raises(HoldfastError):
            holdfast.open(bad)
    assert not path.exists()


def test_a_store_is_not_pickled(store: Store):
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(store)


def test_two_openings_are_two_owners(path: Path, store: Store):
    with holdfast.open(path) as second:
        assert second.owner_id != store.owner_id


def test_everything_raises_after_close_and_close_is_idempotent(path: Path):
    store = holdfast.open(path)
    session = store.create_session("s")
    step = session.begin_step()
    step.append_text("x")
    store.close()
    store.close()
    for act in (
        store.sessions,
        store.stats,
        store.create_session,
        lambda: store.session("s"),
        lambda: store.delete_session("s"),
        lambda: store.backup(path.with_name("b.db")),
        lambda: session.add_user("x"),
        session.messages,
        session.begin_step,
        lambda: len(session.history),
        lambda: step.append_text("y"),
        step.seal,
        step.commit,
        step.discard,
    ):
        with pytest.raises(StoreClosed):
            act()
    with holdfast.open(path) as again:
        assert [s.outcome for s in again.recovery.steps] == ["interrupted"]


def test_a_store_in_a_forked_child_touches_nothing(path: Path, store: Store):
    session = store.create_session("s")
    step = session.begin_step()
    step.append_text("parent")
    child = os.fork()
    if child == 0:  # pragma: no cover - in the child
        try:
            for act in (lambda: step.append_text("child"), store.sessions, session.begin_step):
                try:
                    act()
                    os._exit(1)
                except ForkedStore:
                    pass
            store.close()
            os._exit(0)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    step.append_text(" goes on")
    step.commit()
    assert [m.text for m in session.messages()] == ["parent goes on"]


# --- listing ------------------------------------------------------------------------------------


def test_a_new_session_is_listed_before_it_has_an_entry(store: Store):
    store.create_session("s", title="T", provider="p", model="m")
    (info,) = store.sessions()
    assert (info.id, info.title, info.provider, info.model) == ("s", "T", "p", "m")
    assert (info.entries, info.tokens, info.live, info.interrupted) == (0, 0, False, False)
    assert info.created_at == info.updated_at and info.created_at.tzinfo is not None


def test_the_last_changed_comes_first_whatever_the_clock_says(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    for name in "abc":
        store.create_session(name)
    assert ids(store) == ["c", "b", "a"]
    # The clock goes backwards.
    monkeypatch.setattr("holdfast.history.full_history.now_us", lambda: 1)
    store.session("a").add_user("x")
    assert ids(store) == ["a", "c", "b"]
    store.session("b").history.push(Message.user("y"), 3)
    assert ids(store) == ["b", "a", "c"]
    with store.session("c").begin_step() as step:
        step.append_text("x")
    assert ids(store) == ["c", "b", "a"]
    store.session("a").history.add_summary(0, 1, "s")
    assert ids(store) == ["a", "c", "b"]


def test_an_update_never_goes_back_in_time(store: Store, monkeypatch: pytest.MonkeyPatch):
    session = store.create_session()
    created = store.sessions()[0].updated_at
    monkeypatch.setattr("holdfast.history.full_history.now_us", lambda: 1)
    session.add_user("x")
    assert store.sessions()[0].updated_at == created


def test_counters_are_those_of_the_rows(store: Store):
    session = store.create_session("s")
    session.history.push(Message.user("a"), 5)
    last = session.history.push(Message.user("b"), 7)
    with session.begin_step() as step:
        step.append_text("x")
    assert store.sessions()[0].entries == 3
    assert store.sessions()[0].tokens == session.history.total_tokens
    assert session.history.pop_if_last(last) is None


def test_a_session_is_live_while_a_living_owner_has_a_step_in_it(path: Path, store: Store):
    session = store.create_session("s")
    step = session.begin_step()
    step.append_text("x")
    with holdfast.open(path) as other, holdfast.open(path, read_only=True) as reader:
        for view in (store, other, reader):
            assert (view.sessions()[0].live, view.sessions()[0].interrupted) == (True, False)
    step.commit()  # Without done: it was cut off.
    assert (store.sessions()[0].live, store.sessions()[0].interrupted) == (False, True)
    session.add_user("go on")
    assert not store.sessions()[0].interrupted


def test_a_reader_sees_who_lives_in_another_process(path: Path):
    with holdfast.open(path) as store:
        store.create_session("s")
    with holdfast.open(path, read_only=True) as reader:
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as child:
            try:
                assert child.stdout is not None
                assert child.stdout.readline() == b"ready\n"
                assert (reader.sessions()[0].live, reader.sessions()[0].interrupted) == (
                    True,
                    False,
                )
            finally:
                child.send_signal(signal.SIGKILL)
        assert (reader.sessions()[0].live, reader.sessions()[0].interrupted) == (False, True)


def test_ten_thousand_sessions_are_listed_from_one_table(path: Path, store: Store):
    for number in range(10_000):
        store.engine.create_session(_new_session(number))
    listed = store.sessions()
    assert len(listed) == 10_000 and listed[0].id == "s9999" and listed[-1].id == "s0"
    plan = _plan(path, "SELECT * FROM sessions ORDER BY changed DESC")
    assert "sessions_by_change" in plan and "SORT" not in plan.upper().replace("SESSIONS", "")


def _new_session(number: int) -> object:
    from holdfast.journal.engine.rows import NewSession

    return NewSession(f"s{number}", number)


def _plan(path: Path, statement: str) -> str:
    db = apsw.Connection(str(path))
    try:
        found = db.execute(f"EXPLAIN QUERY PLAN {statement}").fetchall()
        return " ".join(str(row[3]) for row in found)
    finally:
        db.close()


# --- deleting -----------------------------------------------------------------------------------


def test_deleting_removes_every_row_of_the_session_and_none_of_another(path: Path, store: Store):
    for name in ("gone", "kept"):
        session = store.create_session(name)
        session.add_user("x")
        with session.begin_step() as step:
            step.append_text("x")
            step.announce_call("c1", "t")
            step.append_args("c1", "{}")
        session.history.add_summary(0, 2, "s")
    store.delete_session("gone")
    assert ids(store) == ["kept"]
    with pytest.raises(SessionNotFound):
        store.session("gone")
    for table, left in (
        ("sessions", 1),
        ("history_entries", 3),
        ("summaries", 1),
        ("step_metadata", 1),
        ("stream_journal", 0),
        ("tool_calls", 0),
        ("tool_results", 0),
    ):
        assert rows(path, table) == left, table


def test_deleting_removes_the_journal_of_a_dead_owner_too(path: Path):
    with holdfast.open(path) as store:
        step = store.create_session("s").begin_step()
        step.append_text("left")
        step.announce_call("c1", "t")
        step.append_args("c1", "{}")
        step.append_done()
        step.seal()
        step.start_call("c1")
        step.record_result("c1", "x")
    with holdfast.open(path, recover=False) as store:
        assert rows(path, "stream_journal") == 4 and rows(path, "tool_results") == 1
        store.delete_session("s")
        for table in ("stream_journal", "tool_calls", "tool_results", "step_metadata", "sessions"):
            assert rows(path, table) == 0, table


def test_a_session_with_an_open_step_is_not_deleted(store: Store):
    session = store.create_session("s")
    step = session.begin_step()
    step.append_text("x")
    with pytest.raises(StepBusy, match="nothing was removed"):
        store.delete_session("s")
    assert step.commit() == [0]
    store.delete_session("s")
    assert ids(store) == []


def test_an_id_that_was_deleted_can_be_given_again(store: Store):
    store.create_session("s").add_user("old")
    store.delete_session("s")
    assert store.create_session("s").messages() == []


def test_a_purge_leaves_no_trace_on_disk(store: Store):
    secret = "the-combination-is-1234"
    session = store.create_session("s")
    for _ in range(20):
        session.add_user(secret)
    store.create_session("kept").add_user("kept-text")
    assert secret.encode() in bytes_of(store)
    store.delete_session("s", purge=True)
    left = bytes_of(store)
    assert secret.encode() not in left and b"kept-text" in left


def test_a_reader_that_keeps_old_text_is_told(path: Path, store: Store):
    store.create_session("s").add_user("secret")
    reader = apsw.Connection(str(path))
    cursor = reader.cursor()
    cursor.execute("BEGIN")
    cursor.execute("SELECT count(*) FROM sessions").fetchall()
    store.engine._db.set_busy_timeout(50)  # How long it waits for the reader is no matter here.
    with pytest.raises(StoreBusy, match=r"'s' is deleted.*purge"):
        store.delete_session("s", purge=True)
    assert ids(store) == []
    reader.close()
    store.purge()
    assert b"secret" not in bytes_of(store)


# --- numbers and copies -------------------------------------------------------------------------


def test_stats_count_what_there_is(store: Store):
    session = store.create_session("a")
    session.add_user("x")
    sealed = session.begin_step()
    sealed.append_text("x")
    sealed.seal()
    opened = store.create_session("b").begin_step()
    opened.append_text("x")
    opened.append_text("y")
    stats = store.stats()
    assert (stats.sessions, stats.entries, stats.open_steps, stats.sealed_steps) == (2, 1, 1, 1)
    assert stats.journal_events == 3 and stats.bytes > 0 and stats.wal_bytes > 0


def test_a_backup_of_a_living_store_is_a_store_without_owners(tmp_path: Path, store: Store):
    session = store.create_session("s")
    session.add_user("q")
    step = session.begin_step()
    step.append_text("so far")
    store.backup(tmp_path / "copy.db")
    assert rows(tmp_path / "copy.db", "owners") == 0
    step.append_text(", and on")
    assert step.commit() == [1]
    with holdfast.open(tmp_path / "copy.db") as copy:
        assert [s.outcome for s in copy.recovery.steps] == ["interrupted"]
        assert [m.text for m in copy.session("s").messages()] == ["q", "so far"]
    assert [m.text for m in session.messages()] == ["q", "so far, and on"]


@pytest.mark.parametrize(
    "option", [{"policy": "keep"}, {"resolver": 3}, {"on_event": "x"}, {"vfs": "none-such"}]
)
def test_an_option_that_only_a_crash_would_use_is_checked_at_once(tmp_path: Path, option):
    for read_only in (False, True):
        with pytest.raises(InvalidArgument, match=next(iter(option))):
            holdfast.open(tmp_path / "new.db", read_only=read_only, **option)
    assert list(tmp_path.iterdir()) == []


def test_a_backup_replaces_nothing(tmp_path: Path, store: Store):
    (tmp_path / "there").write_text("mine")
    for target in (tmp_path / "there", store.path):
        with pytest.raises(InvalidArgument):
            store.backup(target)
    assert (tmp_path / "there").read_text() == "mine"
    store.create_session("s")


def test_a_backup_beside_a_busy_writer_is_one_moment(tmp_path: Path, store: Store):
    session = store.create_session("s")
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            with session.begin_step() as step:
                step.append_text("x" * 500)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(5):
            store.backup(tmp_path / f"{number}.db")
    finally:
        stop.set()
        writer.join()
    for number in range(5):
        with holdfast.open(tmp_path / f"{number}.db") as copy:
            (info,) = copy.sessions()
            assert info.entries == sum(1 for _ in copy.session("s").history.entries())


# --- watching -----------------------------------------------------------------------------------


def test_on_event_is_told_of_what_happens(path: Path):
    told: list[StoreEvent] = []
    with holdfast.open(path, on_event=told.append) as store:
        session = store.create_session("s")
        session.add_user("q")
        with session.begin_step() as step:
            step.append_text("a")
            step.announce_call("c1", "t")
            step.append_args("c1", "{}")
        left = session.begin_step()
        left.append_text("left")
    kinds = {event.kind for event in told}
    assert {"session", "add", "begin", "append", "seal", "commit", "sync", "checkpoint"} <= kinds
    assert "synthetic_output" in kinds
    (committed,) = [event for event in told if event.kind == "commit"]
    assert (committed.step_id, committed.session_id) == (step.step_id, "s")
    told.clear()
    with holdfast.open(path, on_event=told.append):
        recovered = [event for event in told if event.kind == "recovery"]
        assert [event.count for event in recovered] == [1]


def test_a_watcher_cannot_hurt_the_store(path: Path):
    def broken(event: StoreEvent) -> None:
        raise RuntimeError(event.kind)

    with holdfast.open(path, on_event=broken) as store:
        session = store.create_session("s")
        session.add_user("q")
        with session.begin_step() as step:
            step.append_text("a")
        assert [m.text for m in session.messages()] == ["q", "a"]
        store.delete_session("s")


# --- reading only -------------------------------------------------------------------------------


def test_a_reader_reads_and_writes_nothing(path: Path):
    with holdfast.open(path) as store:
        session = store.create_session("s")
        session.add_user("q")
        session.begin_step().append_text("left")
    before = path.read_bytes()
    with holdfast.open(path, read_only=True) as reader:
        assert reader.owner_id is None and reader.recovery.is_empty
        session = reader.session("s")
        assert [m.text for m in session.messages()] == ["q"]
        assert ids(reader) == ["s"] and reader.sessions()[0].interrupted
        assert reader.stats().open_steps == 1
        for act in (
            lambda: reader.create_session("t"),
            lambda: session.add_user("x"),
            session.begin_step,
            lambda: reader.delete_session("s"),
            reader.purge,
            session.repair,
            lambda: session.history.pop_if_last(0),
            lambda: session.history.add_summary(0, 1, "x"),
        ):
            with pytest.raises(ReadOnlyStore):
                act()
    assert path.read_bytes() == before


def test_a_reader_beside_a_writer_sees_what_is_committed(path: Path, store: Store):
    session = store.create_session("s")
    with holdfast.open(path, read_only=True) as reader:
        view = reader.session("s")
        session.add_user("one")
        assert [m.text for m in view.messages()] == ["one"]
        session.add_user("two")
        assert len(view.history) == 2


# --- names --------------------------------------------------------------------------------------


def test_every_public_name_is_there_and_nothing_is_loaded_for_it():
    code = (
        "import sys, holdfast\n"
        "heavy = {'apsw', 'pydantic', 'tiktoken', 'holdfast.store'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert all(getattr(holdfast, name) for name in holdfast.__all__)\n"
        "assert {'open', 'journal', 'Store'} <= set(dir(holdfast))\n"
        "assert holdfast.recovery.recover and holdfast.history.export_history\n"
        "assert 'tiktoken' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_type_checkers_are_told_the_same_names():
    import ast
    import inspect

    tree = ast.parse(inspect.getsource(holdfast))
    told = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("holdfast.")
        for alias in node.names
    } - {"*"}
    errors = set(holdfast._NAMES["journal.errors"].split())
    assert told | errors == set(holdfast.__all__)


def test_no_error_is_missing_from_the_front_door():
    from holdfast.journal import errors

    assert set(errors.__all__) <= set(holdfast.__all__)


def test_the_logger_is_silent_until_a_program_asks() -> None:
    handlers = logging.getLogger("holdfast").handlers
    assert any(isinstance(handler, logging.NullHandler) for handler in handlers)
