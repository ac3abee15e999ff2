"""A forked child inherits a store: it may not use it, and whatever it does harms nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

import holdfast
from holdfast.journal import StreamJournal
from holdfast.journal.engine.engine import SqliteEngine

WAYS_OUT = {
    "falls off its end": "pass",
    "sys.exit": "sys.exit(0)",
    "os._exit": "os._exit(0)",
    "an exception": "raise RuntimeError('the child ends here')",
    "close": "store.close()",
    "use": "try:\n        step.append_text('no')\n    except holdfast.ForkedStore:\n        pass",
}

PROGRAM = """
import os, signal, sys
import holdfast

store = holdfast.open(sys.argv[1], exclusive={exclusive})
step = store.create_session("s").begin_step()
for number in range(3):
    step.append_text(f"<{{number}}>")
pid = os.fork()
if pid == 0:
    {way}
else:
    os.waitpid(pid, 0)
    for number in range(3, 6):
        step.append_text(f"<{{number}}>")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("exclusive", [False, True], ids=["shared", "exclusive"])
@pytest.mark.parametrize("way", WAYS_OUT)
def test_a_child_that_ends_takes_nothing_of_its_parent_along(tmp_path, way, exclusive):
    program = textwrap.dedent(PROGRAM).format(exclusive=exclusive, way=WAYS_OUT[way])
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "a.db")], capture_output=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    with holdfast.open(tmp_path / "a.db") as store:
        (message,) = store.session("s").messages()
    assert message.text == "".join(f"<{number}>" for number in range(6))


def test_every_use_in_a_child_is_refused_and_close_is_silent(tmp_path, fork):
    closed = holdfast.open(tmp_path / "a.db")
    closed.close()
    store = holdfast.open(tmp_path / "a.db")
    session = store.create_session("s")
    step = session.begin_step()
    journal = StreamJournal.open_in_memory()

    def work(child):
        refused = []
        for use in (
            lambda: step.append_text("x"),
            step.seal,
            step.discard,
            step.commit,
            store.sessions,
            store.stats,
            store.create_session,
            lambda: store.session("s"),
            lambda: session.add_user("x"),
            session.messages,
            lambda: store.backup(tmp_path / "b.db"),
            lambda: store.delete_session("s"),
            journal.begin_step,
            journal.recover_all,
        ):
            try:
                use()
            except holdfast.ForkedStore as error:
                refused.append(error)
        store.close()
        store.close()
        closed.close()
        journal.close()
        child.tell(refused)

    child = fork(work)
    refused = child.hear()
    assert child.join() == 0
    assert len(refused) == 14
    assert str(child.pid) in str(refused[0])
    step.append_text("goes on")
    step.commit()
    journal.close()
    store.close()


def test_a_child_may_open_the_store_for_itself_and_outlive_its_parent(tmp_path, fork, steps):
    """SQLite in the child believes that it holds the parent's locks and shares its memory.

    Without its connections being dropped first, the next process would find nobody there once the
    parent is dead, start the shared memory over, and the child would die of it or write into a
    log that nobody reads.
    """
    path = tmp_path / "a.db"

    def parent(child):
        engine = SqliteEngine.open(path)
        step = steps.begin(engine)
        if os.fork() == 0:
            own = SqliteEngine.open(path)
            mine = steps.begin(own)
            child.tell(mine)
            child.wait()
            for seq in range(1, 11):
                steps.append(own, mine, seq)
            child.tell("appended")
            child.wait()
            os._exit(0)
        for seq in range(1, 6):
            steps.append(engine, step, seq)
        os.kill(os.getpid(), signal.SIGKILL)

    child = fork(parent)
    mine = child.hear()
    assert child.join() == -signal.SIGKILL
    third = SqliteEngine.open(path)
    assert third.counts().journal_events == 5
    # A program without our settings, which moves and deletes the log if it thinks it is alone.
    third.close()
    subprocess.run(
        [sys.executable, "-c", "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]);"
         "print(db.execute('SELECT count(*) FROM owners').fetchone()); db.close()", str(path)],
        check=True, capture_output=True,
    )  # fmt: skip
    child.go_on()
    assert child.hear() == "appended"
    fourth = SqliteEngine.open(path)
    assert len(steps.texts(fourth, mine)) == 10
    fourth.close()
    child.go_on()


def test_an_exclusive_store_can_be_taken_over_by_a_child_of_its_dead_owner(tmp_path, fork, steps):
    path = tmp_path / "a.db"

    def parent(child):
        engine = SqliteEngine.open(path, exclusive=True)
        step = steps.begin(engine)
        steps.append(engine, step, 1)
        if os.fork() == 0:
            child.wait()
            own = SqliteEngine.open(path, exclusive=True)
            child.tell(len(steps.texts(own, step)))
            steps.append(own, steps.begin(own), 1)
            own.close()
            child.tell("closed")
            os._exit(0)
        for seq in range(2, 6):
            steps.append(engine, step, seq)
        os.kill(os.getpid(), signal.SIGKILL)

    child = fork(parent)
    assert child.join() == -signal.SIGKILL
    child.go_on()
    assert child.hear() == 5
    assert child.hear() == "closed"
    engine = SqliteEngine.open(path)
    assert engine.counts().journal_events == 6
    engine.close()


def test_a_fork_in_the_middle_of_a_transaction_disturbs_neither_side(tmp_path, fork, steps):
    engine = SqliteEngine.open(tmp_path / "a.db")
    children = []

    def work(cursor):
        cursor.execute("UPDATE step_counter SET next_step_id = 100")
        children.append(fork(lambda child: child.tell(engine.refusal().__class__.__name__)))
        children[0].join()

    engine.write(work)
    assert children[0].hear() == "ForkedStore"
    assert steps.begin(engine) == 100
    engine.close()
