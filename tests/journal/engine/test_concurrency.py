"""Many at once: processes that open, processes that write, threads, and signals in between."""

from __future__ import annotations

import random
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import holdfast
from holdfast.journal import StreamJournal
from holdfast.journal.engine import connection, core
from holdfast.journal.engine.engine import SqliteEngine

PACKAGE = str(Path(holdfast.__file__).parent)


def test_thirty_two_processes_open_a_new_store_at_the_same_moment(tmp_path, fork):
    path = tmp_path / "new" / "a.db"
    start = time.time() + 0.5

    def work(child):
        time.sleep(max(0.0, start - time.time()))
        engine = SqliteEngine.open(path)
        child.tell(engine.owner_id)
        engine.close()

    children = [fork(work) for _ in range(32)]
    assert [child.join() for child in children] == [0] * 32
    assert sorted(child.hear() for child in children) == list(range(1, 33))


def test_eight_processes_write_at_once_and_lose_nothing(tmp_path, fork):
    path = tmp_path / "a.db"

    def work(child):
        with holdfast.open(path) as store:
            session = store.create_session()
            for turn in range(3):
                with session.begin_step() as step:
                    for delta in range(20):
                        step.append_text(f"{turn}.{delta} ")

    children = [fork(work) for _ in range(8)]
    assert [child.join() for child in children] == [0] * 8
    with holdfast.open(path) as store:
        assert store.recovery.is_empty
        infos = store.sessions()
        assert len(infos) == 8
        wanted = ["".join(f"{turn}.{delta} " for delta in range(20)) for turn in range(3)]
        for info in infos:
            assert [message.text for message in store.session(info.id).messages()] == wanted


@pytest.mark.parametrize("exclusive", [False, True], ids=["shared", "exclusive"])
def test_eight_threads_with_a_session_each_lose_nothing(tmp_path, exclusive):
    errors: list[BaseException] = []

    def work(number):
        try:
            session = store.create_session(f"s{number}")
            for turn in range(3):
                with session.begin_step() as step:
                    for delta in range(50):
                        step.append_text(f"{delta} ")
                assert len(session.messages()) == turn + 1
                store.sessions()
                store.stats()
        except BaseException as error:
            errors.append(error)

    with holdfast.open(tmp_path / "a.db", exclusive=exclusive) as store:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        wanted = ["".join(f"{delta} " for delta in range(50))] * 3
        for number in range(8):
            messages = store.session(f"s{number}").messages()
            assert [message.text for message in messages] == wanted


def test_threads_may_open_and_close_one_store_at_once(tmp_path):
    errors: list[BaseException] = []

    def work():
        try:
            for _ in range(10):
                engine = SqliteEngine.open(tmp_path / "a.db")
                assert engine.is_alive(engine.owner_id)
                engine.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_write_lock_held_too_long_is_a_typed_error_and_passes(tmp_path, fork, monkeypatch):
    path = tmp_path / "a.db"
    monkeypatch.setattr(connection, "BUSY_TIMEOUT_S", 0.1)
    with StreamJournal.open(path) as journal:
        step = journal.begin_step("m")

        def work(child):
            engine = SqliteEngine.open(path)
            engine.write(lambda cursor: (child.tell("held"), child.wait()))

        child = fork(work)
        assert child.hear() == "held"
        with pytest.raises(holdfast.StoreBusy, match="try again"):
            step.append_text("one")
        with pytest.raises(holdfast.StoreBusy):
            journal.begin_step("m")
        assert journal.stats().total == 0  # Reading is not held up.
        child.go_on()
        child.join()
        step.append_text("one")
        step.append_text("two")
        assert step.seal().text == "onetwo"


class Interrupted(Exception):
    """Raised by a signal handler."""


@contextmanager
def alarms(every_s):
    """Signals whose handler raises wherever it finds code of ours running."""

    def handler(_, frame):
        if frame.f_code.co_filename.startswith(PACKAGE):
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise Interrupted

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, every_s, every_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# An alarm that rings while its handler is taken away is Python's to complain of, and means nothing.
RINGS_LATE = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@RINGS_LATE
@pytest.mark.parametrize("durability", ["process", "power"])
def test_a_signal_handler_that_raises_anywhere_leaves_no_gap_and_no_dead_handle(
    tmp_path, durability
):
    chance = random.Random(7)
    given = interrupted = 0
    with holdfast.open(tmp_path / "a.db", durability=durability) as store:
        step = store.create_session("s").begin_step()
        while given < 600:
            try:
                with alarms(chance.uniform(0.00001, 0.0002)):
                    step.append_text(f"{given:4} ")
            except Interrupted:
                interrupted += 1
            given = len(step.text) // 5  # What it has come to is on record, and this says it.
        assert step.seal().text == "".join(f"{number:4} " for number in range(600))
        assert [e.seq for e in store.engine.events(step.step_id)] == list(range(1, 601))
        assert len(step.commit()) == 1
    assert interrupted


@RINGS_LATE
def test_a_signal_handler_that_raises_in_transactions_leaves_a_usable_store(tmp_path, steps):
    engine = SqliteEngine.open(tmp_path / "a.db", durability="power")
    begun = interrupted = 0
    chance = random.Random(7)
    for _ in range(300):
        try:
            with alarms(chance.uniform(0.00001, 0.0004)):
                steps.begin(engine)
                begun += 1
                engine.unfinished(session="nobody")
        except Interrupted:
            interrupted += 1
    assert interrupted
    ids = [row.step_id for row in engine.unfinished()]
    assert ids == list(range(1, len(ids) + 1))
    assert len(ids) >= begun
    step = steps.begin(engine)
    assert step == len(ids) + 1
    steps.append(engine, step, 1)
    assert not engine._db.in_transaction
    engine.close()
    again = SqliteEngine.open(tmp_path / "a.db")
    assert steps.texts(again, step) == ["x"]
    again.close()


def test_an_append_behind_a_rollback_that_was_cut_short_is_committed(tmp_path, steps, monkeypatch):
    """A signal handler raised in the cleanup of an operation, and its transaction stayed open.

    The append went into that transaction, was acknowledged, and was gone after a kill.
    """
    engine = SqliteEngine.open(tmp_path / "a.db")
    step = steps.begin(engine)
    steps.append(engine, step, 1)

    class CutShort(list):
        def __iter__(self):
            # The rollback that follows is cut short as well.
            monkeypatch.setattr(core, "suppress", raise_it)
            raise Interrupted

    def raise_it(*_):
        raise Interrupted

    with pytest.raises(Interrupted):
        engine.append_many(CutShort([()]))
    monkeypatch.undo()
    assert engine._db.in_transaction
    steps.append(engine, step, 2)
    assert not engine._db.in_transaction
    assert steps.texts(engine, step) == ["x", "x"]
    engine.close()
