"""Transactions: one an operation, all or nothing, and refused when nothing may be written."""

from __future__ import annotations

import threading

import pytest

import holdfast
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.journal.engine.rows import (
    NewEntry,
    NewSession,
    SealedCall,
    Settlement,
    SummaryRow,
)
from holdfast.journal.engine.steps import event_record

CALL = SealedCall(0, "c", "tool", "ready")
SUMMARY = SummaryRow(0, 0, 1, "short", 1, 2, 3, "me", True)


class Counted:
    """An engine whose commits are counted."""

    def __init__(self, path):
        self.engine = SqliteEngine.open(path)
        self.commits = 0
        self.engine._db.set_commit_hook(self._count)

    def _count(self):
        self.commits += 1
        return False


@pytest.fixture
def counted(tmp_path):
    counted = Counted(tmp_path / "a.db")
    yield counted
    counted.engine.close()


def entry(text="{}", **more):
    return NewEntry("user", text, 1, **more)


def prepared(engine, steps):
    """A session with two entries, a step of it, and one of nobody, open and sealed."""
    engine.create_session(NewSession("s", 1))
    engine.add_entries("s", [entry(), entry()])
    step = engine.begin_step(session="s", kind="step", model_name=None, nonce="n")
    loose = steps.begin(engine)
    steps.append(engine, step, 1)
    engine.seal(loose, last_seq=0, status="complete", stop_reason=None, usage=None, calls=[CALL])
    return step, loose


OPERATIONS = {
    "append": lambda e, step, loose: e.append(step << 32 | 2, "text_delta", None, "x"),
    "append, no UTF-8": lambda e, step, loose: e.append(step << 32 | 2, "text", None, "\ud800"),
    "append_many": lambda e, step, loose: e.append_many(
        [event_record(step << 32 | seq, "text_delta", None, "x") for seq in range(2, 40)]
    ),
    "begin_step": lambda e, step, loose: e.begin_step(
        session=None, kind="step", model_name="m", nonce="x"
    ),
    "begin_batch": lambda e, step, loose: e.begin_batch(
        model_name="m",
        nonce="x",
        assistant_text="t",
        announce=[("call", 0, '["c", "tool"]')],
        calls=[CALL],
    ),
    "seal": lambda e, step, loose: e.seal(
        step, last_seq=1, status="complete", stop_reason="s", usage=None, calls=[CALL]
    ),
    "settle": lambda e, step, loose: e.settle(
        [Settlement(step, e.owner_id, (entry(stream_step_id=step, part=0),), "complete")]
    ),
    "discard": lambda e, step, loose: e.discard(step),
    "claim": lambda e, step, loose: e.claim(step, dead_owner=e.owner_id),
    "claim_many": lambda e, step, loose: e.claim_many([(step, e.owner_id), (loose, e.owner_id)]),
    "quarantine": lambda e, step, loose: e.quarantine(step, "why"),
    "start_call": lambda e, step, loose: e.start_call(loose, CALL, replay="never"),
    "record_process": lambda e, step, loose: e.record_process(loose, 0, pid=1, started="x"),
    "put_result": lambda e, step, loose: e.put_result(loose, CALL, "{}"),
    "pop_entry": lambda e, step, loose: e.pop_entry("s", 1),
    "set_token_counts": lambda e, step, loose: e.set_token_counts("s", [(0, 5, "c"), (1, 6, "c")]),
    "add_summary": lambda e, step, loose: e.add_summary("s", SUMMARY, lambda count: None),
    "create_session": lambda e, step, loose: e.create_session(
        NewSession("t", 1), [entry(), entry()], [SUMMARY]
    ),
    "delete_session": lambda e, step, loose: e.delete_session("s", expect=step),
    "forget_owners": lambda e, step, loose: e.forget_owners([98, 99]),
    "register_owner": lambda e, step, loose: e.register_owner(),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_exactly_one_transaction(counted, steps, name):
    engine = counted.engine
    step, loose = prepared(engine, steps)
    owner, before = engine.owner_id, counted.commits
    OPERATIONS[name](engine, step, loose)
    assert counted.commits - before == 1
    engine._lock_file.release(engine.owner_id)
    engine.owner_id = owner


def state(engine):
    """Every row of every table."""
    db = engine._db
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    return {table: db.execute(f"SELECT * FROM {table}").fetchall() for table in tables}


class Cut(BaseException):
    """Raised in the middle of an operation."""


@pytest.mark.parametrize("name", [name for name in OPERATIONS if "append" not in name])
def test_an_operation_that_is_cut_at_its_commit_leaves_nothing(counted, steps, name):
    engine = counted.engine
    step, loose = prepared(engine, steps)
    before = state(engine)

    def cut():
        raise Cut

    engine._db.set_commit_hook(cut)
    with pytest.raises(Cut):
        OPERATIONS[name](engine, step, loose)
    engine._db.set_commit_hook(None)
    assert not engine._db.in_transaction
    assert state(engine) == before
    OPERATIONS[name](engine, step, loose)  # And it can be done again.


def test_what_work_raises_undoes_the_transaction_and_goes_on(counted, steps):
    engine = counted.engine

    def work(cursor):
        cursor.execute("UPDATE step_counter SET next_step_id = 99")
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        engine.write(work)
    assert steps.begin(engine) == 1


def test_a_ctrl_c_inside_a_transaction_undoes_it_and_the_store_works_on(counted, steps):
    engine = counted.engine

    def work(cursor):
        cursor.execute("UPDATE step_counter SET next_step_id = 99")
        signal_now()

    def signal_now():
        import os
        import signal

        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        engine.write(work)
    assert not engine._db.in_transaction
    assert steps.begin(engine) == 1


def test_a_closed_engine_refuses_everything(tmp_path, steps):
    engine = SqliteEngine.open(tmp_path / "a.db")
    step = steps.begin(engine)
    engine.close()
    engine.close()
    for use in (
        lambda: steps.append(engine, step, 1),
        lambda: engine.append_many([]),
        lambda: engine.last_event(step),
        lambda: list(engine.events(step)),
        engine.counts,
        engine.owners,
        engine.purge,
        lambda: engine.is_alive(1),
        lambda: engine.back_up(tmp_path / "b.db"),
    ):
        with pytest.raises(holdfast.StoreClosed, match="open it again"):
            use()
    assert not (tmp_path / "b.db").exists()


def test_a_reader_is_not_held_up_by_a_transaction_of_another_thread(tmp_path, steps):
    engine = SqliteEngine.open(tmp_path / "a.db")
    step = steps.begin(engine)
    steps.append(engine, step, 1, "seen")
    inside, done = threading.Event(), threading.Event()

    def work(cursor):
        cursor.execute("DELETE FROM stream_journal")
        inside.set()
        assert done.wait(30)

    thread = threading.Thread(target=lambda: engine.write(work))
    thread.start()
    assert inside.wait(30)
    assert steps.texts(engine, step) == ["seen"]
    done.set()
    thread.join()
    assert steps.texts(engine, step) == []
    engine.close()


def test_many_threads_read_through_one_engine(tmp_path, steps):
    engine = SqliteEngine.open(tmp_path / "a.db")
    step = steps.begin(engine)
    for seq in range(1, 101):
        steps.append(engine, step, seq)
    errors: list[BaseException] = []

    def work():
        try:
            for _ in range(30):
                assert len(steps.texts(engine, step)) == 100
                assert engine.counts().journal_events == 100
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    engine.close()


def test_closing_while_others_read_ends_in_a_typed_error(tmp_path, steps):
    engine = SqliteEngine.open(tmp_path / "a.db")
    step = steps.begin(engine)
    steps.append(engine, step, 1)
    errors: list[BaseException] = []
    started = threading.Event()

    def work():
        try:
            while True:
                steps.texts(engine, step)
                started.set()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert started.wait(30)
    engine.close()
    for thread in threads:
        thread.join()
    assert {type(error) for error in errors} == {holdfast.StoreClosed}
    assert len(errors) == 4


def test_an_event_that_stands_with_other_content_is_never_overwritten(tmp_path, steps):
    engine = SqliteEngine.open(tmp_path / "a.db")
    step = steps.begin(engine)
    steps.append(engine, step, 1, "first")
    steps.append(engine, step, 1, "first")  # The same again: it is there.
    with pytest.raises(holdfast.StoreCorrupt, match="event 1"):
        steps.append(engine, step, 1, "second")
    assert steps.texts(engine, step) == ["first"]
    engine.close()
