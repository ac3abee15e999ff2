"""The tool journal on its own: batches of calls, and what a crash leaves of them."""

import signal
import sqlite3
import subprocess
import sys

import pytest

from holdfast.journal import CallState, Image, StreamJournal, Text, ToolJournal, ToolResult, ToolUse
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.journal.engine.schema import SEQ_BITS
from holdfast.journal.errors import (
    CallNotReady,
    DuplicateCall,
    InvalidArgument,
    InvalidMessage,
    ResultMismatch,
    StepBusy,
    StepClosed,
    StoreClosed,
    UnknownCall,
)
from holdfast.recovery.faults import FaultDisk

CALLS = [ToolUse("a", "read", {"path": "x"}), ToolUse("b", "write", {"n": [1, None]})]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tools.db"


@pytest.fixture
def journal(path):
    with ToolJournal(SqliteEngine.open(path, durability="process")) as journal:
        yield journal


def recovered(journal, path):
    """Close, open again, look."""
    journal.close()
    with ToolJournal.open(path) as again:
        return again.recover()


def rows(path):
    """Rows of the write-ahead side."""
    with sqlite3.connect(path) as db:
        tables = "stream_journal step_metadata tool_batches tool_calls tool_results".split()
        counts = [db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables]
    db.close()
    return sum(counts)


def streaming(journal, *calls):
    """A streaming batch with these (call id, fragments)."""
    batch = journal.begin_streaming_batch("m")
    for seq, (call_id, fragments) in enumerate(calls):
        journal.record_call_start(batch, seq, call_id, "tool")
        for fragment in fragments:
            journal.append_call_args(batch, call_id, fragment)
    return batch


# --- batches ------------------------------------------------------------------------------------


def test_a_new_journal_has_nothing_to_recover():
    with ToolJournal.open_in_memory() as journal:
        assert journal.recover() is None


def test_a_batch_comes_back_with_its_text_and_its_calls(journal, path):
    batch = journal.begin_batch("m", "let me look", CALLS)
    left = recovered(journal, path)
    assert (left.batch_id, left.model_name, left.assistant_text) == (batch, "m", "let me look")
    assert [(c.call_id, c.name, c.input, c.state) for c in left.calls] == [
        ("a", "read", {"path": "x"}, CallState.READY),
        ("b", "write", {"n": [1, None]}, CallState.READY),
    ]
    assert left.results == ()


def test_results_come_back_in_the_order_of_their_calls(journal, path):
    batch = journal.begin_batch("m", "", CALLS)
    second, first = ToolResult("b", "2"), ToolResult("a", "1", is_error=True)
    journal.record_result(batch, second)
    journal.record_result(batch, first)
    left = recovered(journal, path)
    assert left.results == (first, second)
    assert {c.state for c in left.calls} == {CallState.ANSWERED}


@pytest.mark.parametrize("end", ["commit_batch", "discard_batch"])
def test_ending_a_batch_leaves_no_row_behind(journal, path, end):
    batch = journal.begin_batch("m", "t", CALLS)
    journal.mark_call_started(batch, "a")
    journal.record_result(batch, ToolResult("a", "1"))
    getattr(journal, end)(batch)
    with pytest.raises(StepClosed):
        getattr(journal, end)(batch)
    assert recovered(journal, path) is None
    assert rows(path) == 0


def test_several_batches_may_be_pending_and_the_oldest_is_recovered_first(journal, path):
    ids = [journal.begin_batch("m", str(n), CALLS) for n in range(3)]
    journal.commit_batch(ids[1])
    journal.close()
    with ToolJournal.open(path) as again:
        assert again.recover().batch_id == ids[0]
        again.discard_batch(ids[0])
        assert again.recover().batch_id == ids[2]
        again.commit_batch(ids[2])
        assert again.recover() is None


def test_a_batch_of_a_living_journal_is_not_recovered_and_not_touched(journal, path):
    batch = journal.begin_batch("m", "", CALLS)
    with ToolJournal.open(path) as other:
        assert other.recover() is None
        with pytest.raises(StepBusy):
            other.discard_batch(batch)
    journal.record_result(batch, ToolResult("a", "1"))


def test_an_id_twice_in_one_batch_is_refused_and_nothing_is_written(journal, path):
    with pytest.raises(DuplicateCall):
        journal.begin_batch("m", "", [CALLS[0], CALLS[0]])
    batch = streaming(journal, ("a", ["{}"]))
    with pytest.raises(DuplicateCall):
        journal.record_call_start(batch, 1, "a", "tool")
    assert [c.call_id for c in recovered(journal, path).calls] == ["a"]


def test_arguments_are_kept_as_the_provider_wrote_them_if_they_say_the_same(journal, path):
    journal.begin_batch(
        "m",
        "",
        [
            ToolUse("same", "f", {"a": 1}, '{ "a":1 }'),
            ToolUse("other", "f", {"a": 1}, '{"a": 2}'),
            ToolUse("broken", "f", {"a": 1}, '{"a"'),
        ],
    )
    calls = recovered(journal, path).calls
    assert [c.input for c in calls] == [{"a": 1}] * 3
    assert [c.raw_arguments for c in calls] == ['{ "a":1 }', '{"a": 1}', '{"a": 1}']


def test_looking_writes_nothing(path):
    with ToolJournal.open(path) as journal:
        journal.begin_batch("m", "t", CALLS)
    with FaultDisk() as disk:
        journal = ToolJournal(SqliteEngine.open(path, vfs=disk.name))
        before = [op for op in disk.ops if op.kind != "open"]
        assert journal.recover() == journal.recover()
        assert [op for op in disk.ops if op.kind != "open"] == before
        journal.close()


def test_steps_of_a_stream_journal_are_no_batches(path):
    with StreamJournal.open(path) as streams:
        step = streams.begin_step("m")
    with ToolJournal.open(path) as journal:
        assert journal.recover() is None
        with pytest.raises(StepClosed):
            journal.discard_batch(step.step_id)


def test_a_closed_journal_says_so(journal):
    batch = journal.begin_batch("m", "", CALLS)
    journal.close()
    for refused in (
        lambda: journal.begin_batch("m", "", CALLS),
        lambda: journal.record_result(batch, ToolResult("a", "1")),
        lambda: journal.mark_call_started(batch, "a"),
        lambda: journal.commit_batch(batch),
        journal.recover,
    ):
        with pytest.raises(StoreClosed):
            refused()


# --- streaming ----------------------------------------------------------------------------------


def test_a_streaming_batch_from_its_first_fragment_to_its_commit(journal, path):
    batch = streaming(journal, ("a", ['{"pa', 'th": "x"}']), ("b", ["{}"]))
    journal.update_assistant_text(batch, "first")
    journal.update_assistant_text(batch, "let me look\ud800")
    journal.mark_call_started(batch, "a", replay="safe")
    journal.record_result(batch, ToolResult("a", "out"))
    left = recovered(journal, path)
    assert left.assistant_text == "let me look\ufffd"
    assert [(c.call_id, c.input, c.state, c.replay) for c in left.calls] == [
        ("a", {"path": "x"}, CallState.ANSWERED, "safe"),
        ("b", {}, CallState.ANNOUNCED, None),
    ]
    with ToolJournal.open(path) as again:
        again.commit_batch(batch)
    assert rows(path) == 0


def test_arguments_may_be_split_inside_an_escape(journal, path):
    streaming(journal, ("a", ['{"u": "\\u26', "3A\\", '""}']))
    assert recovered(journal, path).calls[0].input == {"u": '\u263a"'}


def test_no_arguments_at_all_mean_an_empty_object(journal, path):
    streaming(journal, ("a", []), ("b", ["", ""]))
    assert [c.input for c in recovered(journal, path).calls] == [{}, {}]


@pytest.mark.parametrize("raw", ['{"a": ', "[1]", "nonsense", '{"a": NaN}'])
def test_arguments_that_do_not_parse_are_kept_raw_and_never_run(journal, path, raw):
    batch = streaming(journal, ("a", [raw]))
    for refused in (
        lambda: journal.mark_call_started(batch, "a"),
        lambda: journal.record_result(batch, ToolResult("a", "1")),
    ):
        with pytest.raises(CallNotReady, match="no JSON object"):
            refused()
    (call,) = recovered(journal, path).calls
    assert (call.input, call.raw_arguments, call.state) == (None, raw, CallState.ANNOUNCED)


def test_a_call_is_ready_once_the_rest_of_its_arguments_has_come(journal):
    batch = streaming(journal, ("a", ['{"a": ']))
    with pytest.raises(CallNotReady):
        journal.mark_call_started(batch, "a")
    journal.append_call_args(batch, "a", "1}")
    journal.mark_call_started(batch, "a")


def test_the_arguments_of_a_started_call_are_fixed(journal):
    batch = streaming(journal, ("a", ["{}"]))
    journal.mark_call_started(batch, "a")
    with pytest.raises(CallNotReady, match="fixed"):
        journal.append_call_args(batch, "a", " ")


def test_calls_are_told_in_the_order_of_their_seq(journal, path):
    batch = journal.begin_streaming_batch("m")
    for seq, call_id in ((2, "c"), (0, "a"), (7, "z")):
        journal.record_call_start(batch, seq, call_id, "f")
        journal.append_call_args(batch, call_id, f'{{"seq": {seq}}}')
    with pytest.raises(InvalidArgument, match="is that of call 'a'"):
        journal.record_call_start(batch, 0, "other", "f")
    for bad in (-1, True, "0", None):
        with pytest.raises(InvalidArgument):
            journal.record_call_start(batch, bad, "other", "f")
    calls = recovered(journal, path).calls
    assert [(c.position, c.call_id, c.input) for c in calls] == [
        (0, "a", {"seq": 0}),
        (2, "c", {"seq": 2}),
        (7, "z", {"seq": 7}),
    ]


def test_what_is_unknown_is_refused_and_nothing_is_written(journal):
    batch = streaming(journal, ("a", ["{}"]))
    before = journal._engine._db.total_changes()
    for refused in (
        lambda: journal.append_call_args(batch, "nobody", "{}"),
        lambda: journal.mark_call_started(batch, "nobody"),
        lambda: journal.record_result(batch, ToolResult("nobody", "1")),
    ):
        with pytest.raises(UnknownCall, match="'a'"):
            refused()
    for refused in (
        lambda: journal.append_call_args(99, "a", "{}"),
        lambda: journal.record_call_start(99, 0, "a", "f"),
        lambda: journal.update_assistant_text(99, "t"),
        lambda: journal.mark_call_started(99, "a"),
        lambda: journal.record_result(99, ToolResult("a", "1")),
        lambda: journal.commit_batch(99),
        lambda: journal.discard_batch(99),
    ):
        with pytest.raises(StepClosed, match="no such batch"):
            refused()
    for bad in (None, 3):
        with pytest.raises(InvalidMessage):
            journal.append_call_args(batch, "a", bad)
        with pytest.raises(InvalidMessage):
            journal.record_call_start(batch, 1, bad, "f")
    with pytest.raises(InvalidMessage):
        journal.update_assistant_text(batch, 3)
    assert journal._engine._db.total_changes() == before


def test_two_hundred_thousand_fragments_cost_one_row_each(journal):
    """The cost of a fragment does not grow with the number of those before it."""
    batch = streaming(journal, ("a", ['{"x": "']))
    before = journal._engine._db.total_changes()
    for _ in range(200_000):
        journal.append_call_args(batch, "a", "y")
    assert journal._engine._db.total_changes() - before == 200_000
    journal.append_call_args(batch, "a", '"}')
    journal.mark_call_started(batch, "a")
    assert journal._batches[batch]._book.calls["a"].streamed.parse(done=True) == {
        "x": "y" * 200_000
    }


# --- results ------------------------------------------------------------------------------------


def test_the_same_result_twice_is_a_no_op_and_another_is_refused(journal, path):
    batch = journal.begin_batch("m", "", CALLS)
    result = ToolResult("a", "out")
    assert journal.record_result(batch, result) == result
    before = journal._engine._db.total_changes()
    assert journal.record_result(batch, result) == result
    with pytest.raises(ResultMismatch):
        journal.record_result(batch, ToolResult("a", "other"))
    assert journal._engine._db.total_changes() == before
    assert recovered(journal, path).results == (result,)


@pytest.mark.parametrize(
    "result",
    [
        ToolResult("a", "boom", is_error=True),
        ToolResult("a", "late", True, "timeout"),
        ToolResult("a", [Text("see"), Image("data:image/png;base64,AA==", "image/png")]),
        ToolResult("a", "x" * 10_000_000),
    ],
    ids=["error", "timeout", "image", "10 MB"],
)
def test_results_of_every_kind_come_back_equal(journal, path, result):
    batch = journal.begin_batch("m", "", CALLS)
    journal.record_result(batch, result)
    assert recovered(journal, path).results == (result,)


def test_a_start_is_on_record_and_the_first_one_stands(journal, path):
    batch = journal.begin_batch("m", "", CALLS)
    journal.mark_call_started(batch, "a", replay="safe")
    journal.mark_call_started(batch, "a")
    calls = recovered(journal, path).calls
    assert [(c.state, c.replay) for c in calls] == [
        (CallState.STARTED, "safe"),
        (CallState.READY, None),
    ]


# --- taking over --------------------------------------------------------------------------------


def test_a_batch_that_was_left_can_be_gone_on_with(journal, path):
    batch = streaming(journal, ("a", ['{"x"']))
    operation = journal._batches[batch]._book.nonce + "-0"
    journal.close()
    with ToolJournal.open(path) as again:
        assert again.recover().calls[0].input is None
        again.append_call_args(batch, "a", ": 1}")
        again.record_call_start(batch, 1, "b", "f")
        again.mark_call_started(batch, "a")
        again.record_result(batch, ToolResult("a", "1"))
        left = recovered(again, path)
    assert [(c.call_id, c.input, c.state) for c in left.calls] == [
        ("a", {"x": 1}, CallState.ANSWERED),
        ("b", {}, CallState.ANNOUNCED),
    ]
    assert left.calls[0].operation_id == operation
    assert left.results == (ToolResult("a", "1"),)


def test_results_on_record_still_stand_for_whoever_takes_over(journal, path):
    batch = journal.begin_batch("m", "", CALLS)
    journal.record_result(batch, ToolResult("a", "1"))
    journal.close()
    with ToolJournal.open(path) as again:
        with pytest.raises(ResultMismatch):
            again.record_result(batch, ToolResult("a", "other"))
        assert again.record_result(batch, ToolResult("b", "2")).content == "2"


def test_no_event_is_put_into_a_gap(journal, path):
    """It would make the events behind the gap look sound again."""
    batch = streaming(journal, ("a", ["{", '"x": 1', "}"]))
    journal.close()
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM stream_journal WHERE id = ?", (batch << SEQ_BITS | 3,))
    db.close()
    with ToolJournal.open(path) as again:
        assert again.recover().calls[0].input is None
        with pytest.raises(StepClosed, match="event 3 is damaged or gone"):
            again.append_call_args(batch, "a", '"y": 2')
        again.discard_batch(batch)
    assert rows(path) == 0


CHILD = """
import sys
from holdfast.journal import ToolJournal, ToolResult, ToolUse
journal = ToolJournal.open(sys.argv[1])
batch = journal.begin_batch("m", "t", [ToolUse(c, "f", {}) for c in "abc"])
journal.record_result(batch, ToolResult("a", "1"))
journal.mark_call_started(batch, "b")
print("started", flush=True)
sys.stdin.read()
"""


def test_after_kill_9_each_call_is_in_the_state_that_was_acknowledged(path):
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout.readline() == "started\n"
        child.send_signal(signal.SIGKILL)
    with ToolJournal.open(path) as journal:
        left = journal.recover()
        assert [str(c.state) for c in left.calls] == ["answered", "started", "ready"]
        assert left.results == (ToolResult("a", "1"),)
        journal.commit_batch(left.batch_id)
    assert rows(path) == 0


# --- interruptions ------------------------------------------------------------------------------


def sweep(interrupt_at, prepare, act, after):
    """Interrupt `act` once at every point there is, each time on a new batch; then `after`."""
    for point in range(1, 2000):
        batch = prepare()
        interrupted, _ = interrupt_at(point, lambda: act(batch))  # noqa: B023
        if not interrupted:
            break
        after(batch)
    assert point > 5, "hardly anything was interrupted"


def test_a_batch_whose_begin_was_interrupted_is_not_there_twice(journal, interrupt_at):
    """Two batches with the same calls would have them run twice after a crash."""

    def begin_again(_):
        batch = journal.begin_batch("m", "", CALLS)
        assert [row.step_id for row in journal._engine.unfinished()] == [batch]
        journal.record_result(batch, ToolResult("a", "1"))
        journal.discard_batch(batch)

    sweep(
        interrupt_at,
        lambda: None,
        lambda _: journal.begin_batch("m", "", CALLS),
        begin_again,
    )


@pytest.mark.parametrize(
    "act",
    [
        lambda journal, batch: journal.record_call_start(batch, 1, "b", "f"),
        lambda journal, batch: journal.append_call_args(batch, "a", "{}"),
        lambda journal, batch: journal.mark_call_started(batch, "ready"),
        lambda journal, batch: journal.record_result(batch, ToolResult("ready", "r")),
        lambda journal, batch: journal.update_assistant_text(batch, "t"),
    ],
    ids=["record_call_start", "append_call_args", "mark_call_started", "record_result", "text"],
)
def test_what_was_interrupted_can_be_given_again(journal, interrupt_at, act):
    def prepare():
        batch = journal.begin_streaming_batch("m")
        journal.record_call_start(batch, 0, "a", "f")
        journal.record_call_start(batch, 5, "ready", "f")
        return batch

    def record_of(batch):
        engine = journal._engine
        return (
            [(e.seq, e.kind, e.call, e.content, e.valid) for e in engine.events(batch)],
            [(c.position, c.call_id, c.state, c.replay) for c in engine.calls(batch)],
            [(r.position, r.body, r.valid) for r in engine.results(batch)],
            engine.batch_text(batch),
        )

    whole = prepare()
    act(journal, whole)
    expected = record_of(whole)

    def again(batch):
        act(journal, batch)
        assert record_of(batch) == expected
        journal.discard_batch(batch)

    sweep(interrupt_at, prepare, lambda batch: act(journal, batch), again)


def test_an_end_interrupted_anywhere_can_be_asked_for_again(journal, interrupt_at):
    def commit_again(batch):
        journal.commit_batch(batch)
        assert journal._engine.step(batch) is None
        with pytest.raises(StepClosed):
            journal.commit_batch(batch)

    sweep(
        interrupt_at,
        lambda: journal.begin_batch("m", "", CALLS),
        journal.commit_batch,
        commit_again,
    )


def test_nothing_is_written_to_a_batch_whose_interrupted_end_has_landed(journal, interrupt_at):
    def write(batch):
        if journal._engine.step(batch) is None:
            for refused in (
                lambda: journal.record_call_start(batch, 2, "c", "f"),
                lambda: journal.record_result(batch, ToolResult("a", "1")),
                lambda: journal.update_assistant_text(batch, "t"),
            ):
                with pytest.raises(StepClosed):
                    refused()
            assert list(journal._engine.events(batch)) == []
        else:
            assert journal.record_result(batch, ToolResult("a", "1")).content == "1"

    sweep(
        interrupt_at,
        lambda: journal.begin_batch("m", "", CALLS),
        journal.discard_batch,
        write,
    )


def test_arguments_do_not_change_behind_a_start_that_landed_unseen(journal, interrupt_at):
    def append(batch):
        if journal._engine.calls(batch):
            with pytest.raises(CallNotReady, match="fixed"):
                journal.append_call_args(batch, "a", " ")
            assert len(list(journal._engine.events(batch))) == 2
        journal.discard_batch(batch)

    sweep(
        interrupt_at,
        lambda: streaming(journal, ("a", ["{}"])),
        lambda batch: journal.mark_call_started(batch, "a"),
        append,
    )


@pytest.mark.parametrize("seq", [-1, 1 << 32, 1 << 70, True, "0"])
def test_a_seq_that_is_no_place_in_a_batch_is_refused(journal, seq):
    batch = journal.begin_streaming_batch("m")
    with pytest.raises(InvalidArgument, match="seq is"):
        journal.record_call_start(batch, seq, "c", "look")
    journal.record_call_start(batch, 0, "c", "look")
