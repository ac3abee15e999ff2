"""The stream journal on its own: steps without a session, and what a crash leaves of them."""

import pickle
import signal
import sqlite3
import subprocess
import sys

import pytest

from holdfast.journal import (
    CallState,
    Complete,
    Errored,
    Incomplete,
    JournalStats,
    StreamJournal,
    ToolJournal,
)
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.journal.engine.schema import SEQ_BITS
from holdfast.journal.errors import InvalidMessage, StepBusy, StepClosed, StoreClosed
from holdfast.recovery.faults import FaultDisk


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.db"


def left_behind(path, *streams):
    """Make a journal with these streams (lists of calls) and close it over them; their ids."""
    with StreamJournal.open(path) as journal:
        ids = []
        for stream in streams:
            step = journal.begin_step("m")
            for method, *arguments in stream:
                getattr(step, method)(*arguments)
            ids.append(step.step_id)
        return ids


def sql(path, statement, *bindings):
    """As another program would, while nobody has the file open."""
    with sqlite3.connect(path) as db:
        db.execute(statement, bindings)
    db.close()


HALF = [("append_text", "half"), ("append_text", " said")]
DONE = [("append_text", "all"), ("append_done",)]
FAILED = [("append_text", "some"), ("append_error", "overloaded")]


# --- steps --------------------------------------------------------------------------------------


def test_a_new_journal_has_nothing_to_recover():
    with StreamJournal.open_in_memory() as journal:
        assert journal.recover() is None
        assert journal.recover_all() == []
        assert journal.stats() == JournalStats(0, 0, 0, 0)


def test_step_ids_rise_from_one():
    with StreamJournal.open_in_memory() as journal:
        assert [journal.begin_step("m").step_id for _ in range(3)] == [1, 2, 3]


def test_begin_session_is_another_name_of_begin_step():
    with StreamJournal.open_in_memory() as journal:
        step = journal.begin_session("m")
        assert (step.step_id, step.model_name) == (1, "m")


def test_several_steps_may_be_active_at_once():
    with StreamJournal.open_in_memory() as journal:
        first, second = journal.begin_step("a"), journal.begin_step("b")
        for n in range(3):
            first.append_text(f"a{n}")
            second.append_text(f"b{n}")
        assert (first.seal().text, second.seal().text) == ("a0a1a2", "b0b1b2")


def test_a_missing_model_name_is_tolerated(path):
    with StreamJournal.open(path) as journal:
        journal.begin_step(None).append_text("a")
        journal.begin_step("m\ud800")
        with pytest.raises(InvalidMessage):
            journal.begin_step(5)
    with StreamJournal.open(path) as journal:
        assert [left.model_name for left in journal.recover_all()] == [None, "m\ufffd"]


def test_the_step_counter_survives_reopening_and_is_never_reused(path):
    with StreamJournal.open(path) as journal:
        for _ in range(3):
            journal.begin_step("m").discard()
    with StreamJournal.open(path) as journal:
        assert journal.stats().current_step_id == 3
        step = journal.begin_step("m")
        assert step.step_id == 4
        step.seal()
        journal.commit_and_prune_step(4)
    with StreamJournal.open(path) as journal:
        assert journal.begin_step("m").step_id == 5


def test_stats_count_the_events_of_steps_without_a_session():
    with StreamJournal.open_in_memory() as journal:
        open_step, sealed_step = journal.begin_step("m"), journal.begin_step("m")
        for n in range(3):
            open_step.append_text(str(n))
        sealed_step.append_text("a")
        sealed_step.append_done()
        sealed_step.seal()
        assert journal.stats() == JournalStats(total=5, sealed=2, unsealed=3, current_step_id=2)


def test_a_journal_is_closed_once_and_says_so(path):
    journal = StreamJournal.open(path)
    journal.close()
    journal.close()
    for refused in (journal.begin_step, journal.recover, journal.recover_all, journal.stats):
        with pytest.raises(StoreClosed):
            refused()


def test_journals_refuse_to_be_pickled_by_name():
    for kind in (StreamJournal, ToolJournal):
        with kind.open_in_memory() as journal, pytest.raises(TypeError, match=kind.__name__):
            pickle.dumps(journal)


# --- recovery -----------------------------------------------------------------------------------


def test_an_unfinished_stream_is_incomplete(path):
    (step_id,) = left_behind(path, HALF)
    with StreamJournal.open(path) as journal:
        assert journal.recover() == Incomplete(step_id, None, "m", "half said", 2, None, ())


def test_a_stream_with_its_done_event_is_complete(path):
    (step_id,) = left_behind(path, DONE)
    with StreamJournal.open(path) as journal:
        assert journal.recover() == Complete(step_id, None, "m", "all", 2, None, ())


def test_a_stream_with_its_error_event_is_errored_and_says_which(path):
    (step_id,) = left_behind(path, FAILED)
    with StreamJournal.open(path) as journal:
        left = journal.recover()
    assert left == Errored(step_id, None, "m", "some", 2, None, (), error="overloaded")


@pytest.mark.parametrize("stream", [HALF, DONE, FAILED], ids=["half", "done", "failed"])
def test_a_sealed_step_counts_as_complete(path, stream):
    left_behind(path, [*stream, ("seal",)])
    with StreamJournal.open(path) as journal:
        assert isinstance(journal.recover(), Complete)


def test_all_that_was_left_is_told_oldest_first(path):
    ids = left_behind(path, HALF, DONE, FAILED, [])
    with StreamJournal.open(path) as journal:
        left = journal.recover_all()
        assert [one.step_id for one in left] == ids
        assert [type(one) for one in left] == [Incomplete, Complete, Errored, Incomplete]
        assert journal.recover() == left[0]


def test_a_call_is_told_with_its_arguments_and_how_far_it_came(path):
    with StreamJournal.open(path) as journal:
        step = journal.begin_step("m")
        for call_id, raw in (("a", '{"x": 1}'), ("b", '{"x"'), ("c", "")):
            step.announce_call(call_id, "tool")
            step.append_args(call_id, raw)
        nonce = step._book.nonce
    with StreamJournal.open(path) as journal:
        calls = journal.recover().calls
    assert [(c.position, c.call_id, c.input, c.raw_arguments) for c in calls] == [
        (0, "a", {"x": 1}, '{"x": 1}'),
        (1, "b", None, '{"x"'),
        (2, "c", None, ""),
    ]
    assert {c.state for c in calls} == {CallState.ANNOUNCED}
    assert [c.operation_id for c in calls] == [f"{nonce}-{n}" for n in range(3)]
    assert {(c.step_id, c.session_id, c.name, c.replay, c.process) for c in calls} == {
        (1, None, "tool", None, None)
    }


def changes(disk):
    """What was done to the disk; a connection that reads opens its files."""
    return [op for op in disk.ops if op.kind != "open"]


def test_looking_writes_nothing(path):
    left_behind(path, HALF, DONE, [*HALF, ("announce_call", "c", "f"), ("seal",)])
    with FaultDisk() as disk:
        journal = StreamJournal(SqliteEngine.open(path, vfs=disk.name))
        before = changes(disk)
        assert journal.recover() == journal.recover()
        assert len(journal.recover_all()) == 3
        journal.stats()
        assert changes(disk) == before
        journal.close()


def test_the_step_of_a_living_journal_is_not_recovered(path):
    with StreamJournal.open(path) as alive, StreamJournal.open(path) as other:
        step = alive.begin_step("m")
        step.append_text("mine")
        assert other.recover() is None
        assert alive.recover() is None
        for refused in (
            other.seal_unsealed,
            other.discard_unsealed,
            other.discard_step,
            other.commit_and_prune_step,
        ):
            with pytest.raises(StepBusy, match="another living journal"):
                refused(step.step_id)
        step.append_text(" still")
        assert step.seal().text == "mine still"


def test_the_step_of_a_closed_journal_is_recovered_beside_living_ones(path):
    with StreamJournal.open(path) as watcher:
        (step_id,) = left_behind(path, HALF)
        assert watcher.recover().step_id == step_id


def test_a_leftover_never_blocks_a_new_step(path):
    left_behind(path, HALF)
    with StreamJournal.open(path) as journal:
        step = journal.begin_step("m")
        step.append_text("new")
        assert step.seal().text == "new"
        assert journal.recover().partial_text == "half said"


def test_batches_of_a_tool_journal_are_no_steps(path):
    with ToolJournal.open(path) as tools:
        batch = tools.begin_batch("m", "text", [])
    with StreamJournal.open(path) as journal:
        assert journal.recover_all() == []
        with pytest.raises(StepClosed):
            journal.discard_step(batch)


# --- damage -------------------------------------------------------------------------------------


def long_stream(path):
    return left_behind(path, [("append_text", str(n)) for n in range(6)] + [("append_done",)])[0]


def test_events_behind_a_missing_one_are_not_believed_and_the_gap_is_told(path):
    step_id = long_stream(path)
    sql(path, "DELETE FROM stream_journal WHERE id = ?", step_id << SEQ_BITS | 4)
    with StreamJournal.open(path) as journal:
        assert journal.recover() == Incomplete(step_id, None, "m", "012", 3, 4, ())
        assert journal.seal_unsealed(step_id) == "012"


def test_events_behind_a_changed_one_are_not_believed(path):
    step_id = long_stream(path)
    key = step_id << SEQ_BITS | 3
    sql(path, "UPDATE stream_journal SET content = 'changed' WHERE id = ?", key)
    with StreamJournal.open(path) as journal:
        left = journal.recover()
    assert (left.partial_text, left.last_seq, left.gap_at) == ("01", 2, 3)


def test_a_sealed_step_that_has_lost_its_end_tells_the_gap(path):
    (step_id,) = left_behind(path, [*HALF, *HALF, ("seal",)])
    sql(path, "DELETE FROM stream_journal WHERE id >= ?", step_id << SEQ_BITS | 3)
    with StreamJournal.open(path) as journal:
        left = journal.recover()
    assert (left.partial_text, left.last_seq, left.gap_at) == ("half said", 2, 3)


def test_kinds_of_a_newer_version_are_tolerated_and_told(path):
    (step_id,) = left_behind(path, HALF)
    engine = SqliteEngine.open(path)
    engine.append(step_id << SEQ_BITS | 3, "hologram", None, "?")
    engine.append(step_id << SEQ_BITS | 4, "text_delta", None, "!")
    engine.close()
    with StreamJournal.open(path) as journal:
        left = journal.recover()
    assert (left.partial_text, left.last_seq, left.gap_at) == ("half said!", 4, None)
    assert left.unknown_kinds == ("hologram",)


def test_a_damaged_result_means_that_the_call_has_run(path):
    with StreamJournal.open(path) as journal:
        step = journal.begin_step("m")
        step.announce_call("c", "f")
        step.append_done()
        step.seal()
        step.record_result("c", "r")
    sql(path, "UPDATE tool_results SET body = replace(body, 'r', 'R')")
    with StreamJournal.open(path) as journal:
        assert journal.recover().calls[0].state is CallState.STARTED


# --- ending -------------------------------------------------------------------------------------


def rows(path):
    """Rows of the write-ahead side."""
    with sqlite3.connect(path) as db:
        tables = "stream_journal step_metadata tool_batches tool_calls tool_results".split()
        counts = [db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables]
    db.close()
    return sum(counts)


WITH_CALL = [
    ("append_text", "t"),
    ("announce_call", "c", "f"),
    ("append_args", "c", "{}"),
    ("append_done",),
    ("seal",),
    ("start_call", "c"),
    ("record_result", "c", "r"),
]


@pytest.mark.parametrize("end", ["commit_and_prune_step", "discard_step"])
def test_ending_a_sealed_step_leaves_no_row_behind(path, end):
    (step_id,) = left_behind(path, WITH_CALL)
    with StreamJournal.open(path) as journal:
        assert getattr(journal, end)(step_id) == 4
        assert journal.recover() is None
        assert journal.stats() == JournalStats(0, 0, 0, step_id)
    assert rows(path) == 0


def test_a_step_that_was_left_open_can_be_sealed_and_is_recoverable_until_it_is_committed(path):
    (step_id,) = left_behind(path, HALF)
    with StreamJournal.open(path) as journal:
        assert journal.seal_unsealed(step_id) == "half said"
        assert journal.seal_unsealed(step_id) == "half said"
        assert isinstance(journal.recover(), Complete)
    with StreamJournal.open(path) as journal:
        assert isinstance(journal.recover(), Complete)
        assert journal.commit_and_prune_step(step_id) == 2
        assert journal.recover() is None


def test_a_step_that_was_left_open_can_be_discarded(path):
    (step_id,) = left_behind(path, HALF)
    with StreamJournal.open(path) as journal:
        assert journal.discard_unsealed(step_id) == 2
        assert journal.recover() is None
    assert rows(path) == 0


@pytest.mark.parametrize("left", [True, False], ids=["left", "active"])
def test_committing_a_streaming_step_is_refused_and_nothing_changes(path, left):
    with StreamJournal.open(path) as journal:
        if left:
            (step_id,) = left_behind(path, HALF)
        else:
            step = journal.begin_step("m")
            step_id = step.step_id
        before = journal._engine.step(step_id)
        with pytest.raises(StepBusy, match="streaming"):
            journal.commit_and_prune_step(step_id)
        assert journal._engine.step(step_id) == before
        if left:
            assert journal.recover().step_id == step_id
        else:
            step.append_text("goes on")


def test_discard_unsealed_refuses_a_sealed_step(path):
    (step_id,) = left_behind(path, WITH_CALL)
    with StreamJournal.open(path) as journal:
        with pytest.raises(StepClosed, match="discard_step"):
            journal.discard_unsealed(step_id)
        assert journal.recover().step_id == step_id


def test_an_active_step_is_ended_by_its_own_handle():
    with StreamJournal.open_in_memory() as journal:
        step = journal.begin_step("m")
        for refused in (journal.seal_unsealed, journal.discard_unsealed):
            with pytest.raises(StepBusy, match="its own handle"):
                refused(step.step_id)
        assert journal.discard_step(step.step_id) == 0


@pytest.mark.parametrize("step_id", [99, 0, -1, 1 << 40])
def test_a_step_of_another_store_is_refused_everywhere(tmp_path, path, step_id):
    with StreamJournal.open(path) as journal:
        journal.begin_step("m").append_text("a")
        before = journal._engine._db.total_changes()
        for refused in (
            journal.seal_unsealed,
            journal.discard_unsealed,
            journal.discard_step,
            journal.commit_and_prune_step,
        ):
            with pytest.raises(StepClosed, match="no such step") as caught:
                refused(step_id)
            assert caught.value.step_id == step_id
        assert journal._engine._db.total_changes() == before


def test_a_step_is_ended_once(path):
    (step_id,) = left_behind(path, WITH_CALL)
    with StreamJournal.open(path) as journal:
        journal.commit_and_prune_step(step_id)
        for refused in (journal.commit_and_prune_step, journal.discard_step):
            with pytest.raises(StepClosed):
                refused(step_id)


@pytest.mark.parametrize("end", ["commit_and_prune_step", "discard_step", "discard_unsealed"])
def test_an_end_interrupted_anywhere_can_be_asked_for_again(tmp_path, interrupt_at, end):
    with StreamJournal(SqliteEngine.open(tmp_path / "a.db", durability="process")) as journal:
        for point in range(1, 1000):
            other = StreamJournal(SqliteEngine.open(tmp_path / "a.db", durability="process"))
            step = other.begin_step("m")
            step.append_text("a")
            if end != "discard_unsealed":
                step.seal()
            other.close()
            ask = getattr(journal, end)
            interrupted, _ = interrupt_at(point, lambda: ask(step.step_id))  # noqa: B023
            if not interrupted:
                break
            assert ask(step.step_id) == 1
            with pytest.raises(StepClosed):
                ask(step.step_id)
        assert point > 20
        assert journal._engine.unfinished() == []


def test_a_begin_interrupted_anywhere_leaves_nothing_behind_once_it_is_given_again(interrupt_at):
    with StreamJournal.open_in_memory() as journal:
        for point in range(1, 1000):
            interrupted, _ = interrupt_at(point, lambda: journal.begin_step("m"))
            if not interrupted:
                break
            step = journal.begin_step("m")
            step.append_text("a")
            assert [row.step_id for row in journal._engine.unfinished()] == [step.step_id]
            step.discard()
        assert point > 20


# --- kill -9 ------------------------------------------------------------------------------------

CHILD = """
import sys
from holdfast.journal import StreamJournal
journal = StreamJournal.open(sys.argv[1])
step = journal.begin_step("m")
n = 0
while True:
    n += 1
    step.append_text(f"{n};")
    print(n, flush=True)
"""


@pytest.mark.parametrize("shown", [1, 50, 700])
def test_what_was_shown_survives_kill_9(path, shown):
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, path], stdout=subprocess.PIPE, text=True
    ) as child:
        while int(child.stdout.readline()) < shown:
            pass
        child.send_signal(signal.SIGKILL)
        whole_lines = child.stdout.read().split("\n")[:-1]
    seen = int(whole_lines[-1]) if whole_lines else shown
    with StreamJournal.open(path) as journal:
        left = journal.recover()
        assert isinstance(left, Incomplete)
        said = [int(n) for n in left.partial_text.split(";")[:-1]]
        assert said == list(range(1, left.last_seq + 1))
        assert len(said) >= seen
        assert journal.seal_unsealed(left.step_id) == left.partial_text
        assert journal.commit_and_prune_step(left.step_id) == len(said)
