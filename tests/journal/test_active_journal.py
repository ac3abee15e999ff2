"""The handle of a step: what it takes, what it refuses, and what survives of it."""

import asyncio
import os
import pickle
import subprocess
import threading
from pathlib import Path

import pytest

from holdfast.journal import (
    ActiveJournal,
    Complete,
    Image,
    Message,
    Opaque,
    OutputStatus,
    StreamJournal,
    Text,
    Thinking,
    ToolResult,
    ToolUse,
)
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.journal.errors import (
    CallNotReady,
    DuplicateCall,
    InvalidArgument,
    InvalidMessage,
    ProcessMismatch,
    ResultMismatch,
    StepClosed,
    StoreClosed,
    StoreFailed,
    StoreFull,
    UnknownCall,
)
from holdfast.recovery.faults import FaultDisk


@pytest.fixture
def journal(tmp_path):
    with StreamJournal(SqliteEngine.open(tmp_path / "a.db", durability="process")) as journal:
        yield journal


@pytest.fixture
def step(journal):
    return journal.begin_step("model-1")


def events_of(step):
    """What is on record, as (seq, kind, content)."""
    return [(e.seq, e.kind, e.content) for e in step._engine.events(step.step_id)]


def sealed_with_call(journal, arguments='{"a": 1}', call_id="c1"):
    step = journal.begin_step("m")
    step.append_text("t")
    step.announce_call(call_id, "tool")
    step.append_args(call_id, arguments)
    step.append_done()
    step.seal()
    return step


# --- the stream ---------------------------------------------------------------------------------


def test_an_append_is_on_record_when_it_returns(step):
    for n in range(1, 6):
        step.append_text(f"{n}")
        assert events_of(step)[-1] == (n, "text_delta", f"{n}")


def test_seq_runs_from_one_without_a_gap_over_all_kinds(step):
    step.append_text("a")
    step.append_thinking("b")
    step.append_signature("s")
    step.append_opaque("p", {"k": 1})
    step.announce_call("c", "f")
    step.append_args("c", "{}")
    step.append_done()
    assert [seq for seq, _, _ in events_of(step)] == [1, 2, 3, 4, 5, 6, 7]


def test_text_thinking_call_and_text_again_come_back_as_four_blocks_in_order(step):
    step.append_text("one ")
    step.append_text("two")
    step.append_thinking("hm")
    step.append_signature("sig")
    step.announce_call("c1", "grep")
    step.append_args("c1", '{"pattern":')
    step.append_args("c1", ' "x"}')
    step.append_text("three")
    step.append_done(stop_reason="end", usage={"in": 1})
    assert step.seal() == Message(
        "assistant",
        [
            Text("one two"),
            Thinking("hm", "sig"),
            ToolUse("c1", "grep", {"pattern": "x"}, '{"pattern": "x"}'),
            Text("three"),
        ],
        {"model": "model-1"},
    )


def test_what_a_provider_wants_back_comes_back_verbatim_in_its_place(step):
    item = {"type": "reasoning", "encrypted_content": "gAAA\u2028", "n": [1, None, {"x": 1.5}]}
    step.append_text("a")
    step.append_opaque("openai", item)
    step.append_text("b")
    assert step.seal().content == [Text("a"), Opaque("openai", item), Text("b")]


@pytest.mark.parametrize(
    "deltas",
    [
        ["a\0b", "\0"],
        ["\U0001f468\u200d", "\U0001f469"],
        ["a\u2028b\u2029"],
        ["line\r", "\nnext\r\n"],
        ["<|endoftext|>", "<|im_start|>"],
        ["", "a", "", ""],
        ["e\u0301", "\u00e9", "\ufeff"],
        ["\x1b[31m\x07\x7f"],
    ],
)
def test_what_was_given_comes_back_byte_for_byte(journal, tmp_path, deltas):
    step = journal.begin_step("m")
    for delta in deltas:
        step.append_text(delta)
    assert [content for _, _, content in events_of(step)] == deltas
    assert step.text == "".join(deltas)
    assert step.seal().text == "".join(deltas)
    journal.close()
    with StreamJournal.open(tmp_path / "a.db") as again:
        assert again.recover().partial_text == "".join(deltas)


def test_a_lone_surrogate_is_stored_without_loss_and_read_as_a_replacement(step):
    step.append_text("a\ud800b")
    assert events_of(step)[0][2] == "a\ud800b".encode("utf-8", "surrogatepass")
    assert step.text == "a\ufffdb"
    assert step.seal().text == "a\ufffdb"


def test_a_pair_split_over_two_deltas_is_joined_when_the_text_is_read(step):
    step.append_text("x\ud83d")
    assert step.text == "x\ufffd"
    step.append_text("\ude00y")
    assert step.text == "x\U0001f600y"
    assert step.seal().text == "x\U0001f600y"


def test_an_empty_step_seals_to_an_empty_text(step):
    assert step.seal().text == ""


@pytest.mark.parametrize("value", [None, 1, b"bytes", ["a"]])
def test_what_is_no_text_is_refused_and_leaves_no_gap(step, value):
    step.append_text("a")
    for refused in (
        step.append_text,
        step.append_thinking,
        step.append_signature,
        step.append_error,
        lambda bad: step.append_opaque(bad, {}),
        lambda bad: step.append_opaque("p", bad),
        lambda bad: step.announce_call(bad, "f"),
        lambda bad: step.announce_call("c", bad),
        lambda bad: step.append_done(stop_reason=bad if bad is not None else 1),
        lambda bad: step.append_done(usage=bad if bad is not None else 1),
    ):
        with pytest.raises(InvalidMessage):
            refused(value)
    step.append_text("b")
    assert events_of(step) == [(1, "text_delta", "a"), (2, "text_delta", "b")]


def test_labels_that_utf8_cannot_hold_name_the_same_call_everywhere(step):
    step.announce_call("c\ud800", "f\udfff")
    step.append_args("c\ud800", "{}")
    step.append_done(stop_reason="\ud800")
    assert step.seal().tool_calls == [ToolUse("c\ufffd", "f\ufffd", {}, "{}")]
    step.start_call("c\ufffd")
    assert step.record_result("c\ud800", "r").tool_use_id == "c\ufffd"


# --- the end of the stream ----------------------------------------------------------------------


def stream_calls(step):
    """Every call that puts an event on record."""
    return [
        lambda: step.append_text("x"),
        lambda: step.append_thinking("x"),
        lambda: step.append_signature("x"),
        lambda: step.append_opaque("p", {}),
        lambda: step.announce_call("new", "f"),
        lambda: step.announce_call("c1", "f"),
        lambda: step.append_args("c1", "x"),
        lambda: step.append_args("nobody", "x"),
        lambda: step.append_done(),
        lambda: step.append_error("x"),
    ]


def call_calls(step):
    """Every other call that changes a step or its calls."""
    return [
        step.seal,
        step.discard,
        lambda: step.start_call("c1"),
        lambda: step.record_process("c1", os.getpid()),
        lambda: step.record_result("c1", "x"),
        lambda: step.execute(ToolUse("c1", "tool", {}), lambda: "x"),
        lambda: step.operation_id("c1"),
    ]


@pytest.mark.parametrize("end", ["done", "error"])
def test_after_a_terminal_event_no_event_is_taken(step, end):
    step.announce_call("c1", "f")
    if end == "done":
        step.append_done()
    else:
        step.append_error("boom")
    before = events_of(step)
    for refused in stream_calls(step):
        with pytest.raises(StepClosed, match="stream has ended"):
            refused()
    assert events_of(step) == before


def test_the_first_terminal_event_stands(journal, step):
    step.append_error("first")
    with pytest.raises(StepClosed):
        step.append_done()
    step.seal()
    assert step._stream.status == "errored"
    assert journal._engine.step(step.step_id).status == "errored"


def test_a_step_sealed_without_a_terminal_event_is_interrupted(journal, step):
    step.append_text("half")
    assert step.seal().text == "half"
    assert journal._engine.step(step.step_id).status == "interrupted"


def test_a_sealed_handle_refuses_every_event_and_nothing_changes(journal):
    step = sealed_with_call(journal)
    before = events_of(step)
    for refused in stream_calls(step):
        with pytest.raises(StepClosed, match="sealed"):
            refused()
    assert events_of(step) == before


def test_sealing_again_gives_the_same_message(step):
    step.append_text("a")
    assert step.seal() is step.seal()


@pytest.mark.parametrize("end", ["discard", "discard_step", "commit"])
def test_a_discarded_or_committed_handle_refuses_everything(journal, end):
    step = sealed_with_call(journal)
    match end:
        case "discard":
            step.discard()
        case "discard_step":
            journal.discard_step(step.step_id)
        case "commit":
            journal.commit_and_prune_step(step.step_id)
    before = journal._engine._db.total_changes()
    for refused in stream_calls(step) + call_calls(step):
        with pytest.raises(StepClosed):
            refused()
    assert journal._engine._db.total_changes() == before


def test_the_handles_of_a_closed_journal_say_so(journal):
    step = sealed_with_call(journal)
    other = journal.begin_step("m")
    other.append_text("seen")
    journal.close()
    for refused in stream_calls(other) + call_calls(other)[:2] + call_calls(step)[1:]:
        with pytest.raises((StoreClosed, StepClosed)):
            refused()
    with pytest.raises(StoreClosed):
        other.append_text("x")
    assert other.text == "seen"


def test_sealing_writes_the_same_number_of_rows_whatever_the_length(journal):
    written = []
    for length in (1, 3000):
        step = journal.begin_step("m")
        for _ in range(length):
            step.append_text("x")
        before = journal._engine._db.total_changes()
        step.seal()
        written.append(journal._engine._db.total_changes() - before)
    assert written == [1, 1]


def test_discarding_tells_how_many_events_went_and_leaves_no_row(journal):
    step = sealed_with_call(journal)
    step.start_call("c1")
    step.record_result("c1", "r")
    assert step.discard() == 4
    assert rows_of(journal) == {}


def rows_of(journal):
    """How many rows each table of the write-ahead side has, those that have any."""
    tables = "stream_journal step_metadata tool_batches tool_calls tool_results".split()
    counts = {
        table: journal._engine._db.execute(f"SELECT count(*) FROM {table}").get for table in tables
    }
    return {table: count for table, count in counts.items() if count}


def test_the_text_so_far_leaves_out_thinking_and_arguments(step):
    step.append_text("a")
    step.append_thinking("b")
    step.announce_call("c", "f")
    step.append_args("c", "{}")
    assert step.text == "a"
    step.append_text("d")
    assert step.text == "ad"
    step.seal()
    assert step.text == "ad"


def test_one_step_takes_appends_of_several_threads(step):
    def speak(name):
        for n in range(200):
            step.append_text(f"{name}{n};")

    threads = [threading.Thread(target=speak, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    said = step.seal().text.split(";")[:-1]
    assert len(said) == 800
    for name in "abcd":
        assert [word for word in said if word[0] == name] == [f"{name}{n}" for n in range(200)]


def test_a_step_refuses_to_be_pickled_by_name(step):
    with pytest.raises(TypeError, match=f"step {step.step_id} cannot be pickled"):
        pickle.dumps(step)


# --- calls --------------------------------------------------------------------------------------


def test_two_calls_of_one_id_are_refused_and_the_first_stands(step):
    step.announce_call("c", "first")
    with pytest.raises(DuplicateCall) as caught:
        step.announce_call("c", "second")
    assert (caught.value.call_id, caught.value.step_id) == ("c", step.step_id)
    step.append_done()
    assert [call.name for call in step.seal().tool_calls] == ["first"]


def test_an_id_may_be_used_again_in_a_later_step(journal):
    first, second = sealed_with_call(journal), sealed_with_call(journal)
    assert first.operation_id("c1") != second.operation_id("c1")


def test_a_fragment_for_an_unknown_call_is_refused_and_nothing_is_written(step):
    step.announce_call("c", "f")
    for unknown in ("other", "", None, ["c"]):
        with pytest.raises(UnknownCall):
            step.append_args(unknown, "{}")
    assert len(events_of(step)) == 1


def test_arguments_may_be_split_inside_an_escape(step):
    raw = '{"a": "\\u2603 \\ud83d\\ude00 \\"", "b": "\U0001f600"}'
    step.announce_call("c", "f")
    for char in raw:
        step.append_args("c", char)
    step.append_done()
    (call,) = step.seal().tool_calls
    assert call.input == {"a": '\u2603 \U0001f600 "', "b": "\U0001f600"}
    assert call.raw_arguments == raw


def test_fragments_of_parallel_calls_may_be_interleaved(step):
    step.announce_call("a", "f")
    step.announce_call("b", "g")
    for fragment, call_id in (('{"x"', "a"), ('{"y"', "b"), (":1}", "a"), (":2}", "b")):
        step.append_args(call_id, fragment)
    step.append_done()
    assert [call.input for call in step.seal().tool_calls] == [{"x": 1}, {"y": 2}]


def test_many_fragments_write_as_many_rows_and_read_back_whole(journal):
    """Bytes written and rows changed grow with the fragments, not with their square."""
    engine = journal._engine
    cost = []
    for count in (2_000, 20_000):
        step = journal.begin_step("m")
        step.announce_call("c", "f")
        step.append_args("c", '{"a": "')
        before = engine._db.total_changes()
        for _ in range(count):
            step.append_args("c", "x")
        cost.append((engine._db.total_changes() - before) / count)
        step.append_args("c", '"}')
        step.append_done()
        assert step.seal().tool_calls[0].input == {"a": "x" * count}
        step.discard()
    assert cost == [1.0, 1.0]


def test_arguments_that_are_no_object_leave_the_call_out_and_are_never_run(journal):
    step = journal.begin_step("m")
    step.append_text("t")
    for call_id, arguments in (("bad", '{"a": '), ("list", "[1]"), ("good", '{"a": 1}')):
        step.announce_call(call_id, "tool")
        step.append_args(call_id, arguments)
    step.announce_call("none", "tool")
    step.append_done()
    message = step.seal()
    assert step.dropped_calls == ("bad", "list")
    assert [(call.id, call.input) for call in message.tool_calls] == [
        ("good", {"a": 1}),
        ("none", {}),
    ]
    ran = []
    for dropped in ("bad", "list"):
        for refused in (
            lambda: step.start_call(dropped),  # noqa: B023
            lambda: step.record_result(dropped, "x"),  # noqa: B023
            lambda: step.execute(ToolUse(dropped, "tool", {}), lambda: ran.append(1)),  # noqa: B023
        ):
            with pytest.raises(CallNotReady, match="no JSON object"):
                refused()
    assert ran == []


def test_a_call_without_arguments_is_left_out_of_a_step_that_was_not_done(step):
    step.append_text("t")
    step.announce_call("c", "f")
    assert step.seal().tool_calls == []
    assert step.dropped_calls == ("c",)


def test_calls_need_a_sealed_step(step):
    step.announce_call("c1", "f")
    step.append_args("c1", "{}")
    for refused in call_calls(step)[2:6]:
        with pytest.raises(CallNotReady, match="not sealed"):
            refused()
    step.append_done()
    with pytest.raises(CallNotReady):
        step.start_call("c1")


def test_a_call_that_was_never_announced_is_unknown(journal):
    step = sealed_with_call(journal, call_id="mine")
    for refused in call_calls(step)[2:]:
        with pytest.raises(UnknownCall, match="'mine'"):
            refused()
    assert rows_of(journal).get("tool_results") is None


def test_starting_twice_is_a_no_op_and_the_first_start_stands(journal):
    step = sealed_with_call(journal)
    step.start_call("c1", replay="safe")
    before = journal._engine._db.total_changes()
    step.start_call("c1")
    assert journal._engine._db.total_changes() == before
    assert journal._engine.calls(step.step_id)[0].replay == "safe"


def test_replay_is_never_or_safe(journal):
    with pytest.raises(InvalidArgument, match="replay"):
        sealed_with_call(journal).start_call("c1", replay="maybe")


def test_a_result_may_come_without_a_start_and_once_more_is_a_no_op(journal):
    step = sealed_with_call(journal)
    result = step.record_result("c1", "out")
    assert result == ToolResult("c1", "out")
    before = journal._engine._db.total_changes()
    assert step.record_result("c1", "out") == result
    assert journal._engine._db.total_changes() == before


def test_another_result_is_refused_and_the_first_stays(journal, tmp_path):
    step = sealed_with_call(journal)
    step.record_result("c1", "out")
    for content, is_error in (("other", False), ("out", True), ([Text("out")], False)):
        with pytest.raises(ResultMismatch):
            step.record_result("c1", content, is_error=is_error)
    journal.close()
    with StreamJournal.open(tmp_path / "a.db") as again:
        assert (
            again._engine.results(step.step_id)[0].body == ToolResult("c1", "out").model_dump_json()
        )


@pytest.mark.parametrize(
    ("content", "is_error"),
    [
        ("boom", True),
        ([Text("see"), Image("data:image/png;base64,AA==", "image/png")], False),
        ("", False),
        ("\0\u2028\U0001f600 <|endoftext|>", False),
        ("x" * 10_000_000, False),
    ],
    ids=["error", "image", "empty", "strange", "10 MB"],
)
def test_results_of_every_kind_come_back_equal(journal, tmp_path, content, is_error):
    step = sealed_with_call(journal)
    given = step.record_result("c1", content, is_error=is_error)
    assert given.content == content
    assert given.status is (OutputStatus.FAILED if is_error else OutputStatus.SUCCESS)
    row = journal._engine.results(step.step_id)[0]
    assert row.valid
    assert ToolResult.model_validate_json(row.body) == given


@pytest.mark.parametrize("content", [None, 5, [1], [ToolUse("a", "b", {})], b"x"])
def test_a_result_that_is_no_text_and_no_blocks_is_refused(journal, content):
    step = sealed_with_call(journal)
    with pytest.raises(InvalidMessage):
        step.record_result("c1", content)
    assert step.record_result("c1", "good").content == "good"


def test_parallel_calls_may_be_answered_in_any_order_and_in_part(journal, tmp_path):
    step = journal.begin_step("m")
    for call_id in "abc":
        step.announce_call(call_id, "f")
    step.append_done()
    step.seal()
    step.start_call("c")
    step.record_result("c", "3")
    step.record_result("a", "1")
    assert step._book.unanswered() == ("b",)
    journal.close()
    with StreamJournal.open(tmp_path / "a.db") as again:
        states = [(call.call_id, str(call.state)) for call in again.recover().calls]
    assert states == [("a", "answered"), ("b", "ready"), ("c", "answered")]


def test_an_operation_id_is_unique_and_survives_a_crash(journal, tmp_path):
    step = journal.begin_step("m")
    step.announce_call("a", "f")
    early = step.operation_id("a")
    step.announce_call("b", "f")
    step.append_done()
    step.seal()
    ids = [step.operation_id("a"), step.operation_id("b")]
    assert ids[0] == early and len(set(ids)) == 2
    journal.close()
    with StreamJournal.open(tmp_path / "a.db") as again:
        assert [call.operation_id for call in again.recover().calls] == ids


def test_a_process_is_on_record_with_its_start_time_and_another_is_refused(journal, tmp_path):
    step = sealed_with_call(journal)
    with pytest.raises(CallNotReady):
        step.record_process("c1", os.getpid())
    step.start_call("c1")
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            step.record_process("c1", child.pid)
            step.record_process("c1", child.pid)
            with pytest.raises(ProcessMismatch, match=str(child.pid)):
                step.record_process("c1", os.getpid())
            journal.close()
            with StreamJournal.open(tmp_path / "a.db") as again:
                process = again.recover().calls[0].process
            assert process.pid == child.pid
            assert process.is_running
            assert process.end()
            child.wait()
            assert not process.is_running
            assert not process.end()
        finally:
            child.kill()


def test_a_pid_that_is_no_pid_is_refused(journal):
    step = sealed_with_call(journal)
    step.start_call("c1")
    for pid in (0, -1, True, "7", None):
        with pytest.raises(InvalidArgument):
            step.record_process("c1", pid)


# --- execute ------------------------------------------------------------------------------------

CALL_ONE = ToolUse("c1", "tool", {"a": 1})


@pytest.mark.parametrize("given", [("c1", print), (CALL_ONE, "print")])
def test_what_is_no_call_or_no_function_is_refused_before_anything_is_on_record(journal, given):
    step = sealed_with_call(journal)
    with pytest.raises(InvalidArgument):
        step.execute(*given)
    assert step.execute(CALL_ONE, lambda a: "ran").content == "ran"


def test_a_tool_runs_with_its_arguments_after_its_start_is_on_record(journal):
    step = sealed_with_call(journal)
    seen = []

    def tool(a):
        seen.append((a, journal._engine.calls(step.step_id)[0].state))
        return "out"

    assert step.execute(CALL_ONE, tool) == ToolResult("c1", "out")
    assert seen == [(1, "started")]


@pytest.mark.parametrize(
    ("value", "content"),
    [
        ("text", "text"),
        (
            [Text("a"), Image("https://example.org/a.png")],
            [Text("a"), Image("https://example.org/a.png")],
        ),
        ({"a": [1, None, "\u00e9"]}, '{"a": [1, null, "\u00e9"]}'),
        (None, "null"),
        (3, "3"),
        ([], "[]"),
        (["a"], '["a"]'),
        (Path("x"), '"x"'),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        ("\ud800", "\ufffd"),
    ],
)
def test_text_and_blocks_are_stored_as_given_and_the_rest_as_json(journal, value, content):
    step = sealed_with_call(journal)
    assert step.execute(CALL_ONE, lambda a: value).content == content


def test_whatever_a_tool_gave_back_is_kept(journal):
    class Mute:
        def __str__(self):
            raise RuntimeError("no words")

        __repr__ = __str__

    circle = []
    circle.append(circle)
    assert sealed_with_call(journal).execute(CALL_ONE, lambda a: circle).content == "[[...]]"
    assert sealed_with_call(journal).execute(CALL_ONE, lambda a: Mute()).content == "<Mute>"


@pytest.mark.parametrize(
    ("error", "content", "status"),
    [
        (ValueError("bad"), "ValueError: bad", "failed"),
        (TimeoutError(), "TimeoutError", "timeout"),
        (KeyError("k"), "KeyError: 'k'", "failed"),
    ],
)
def test_an_exception_becomes_an_error_result(journal, error, content, status):
    step = sealed_with_call(journal)

    def tool(a):
        raise error

    assert step.execute(CALL_ONE, tool) == ToolResult("c1", content, True, status)


def test_arguments_that_the_tool_does_not_take_become_an_error_result(journal):
    result = sealed_with_call(journal).execute(CALL_ONE, lambda: "never")
    assert result.is_error and "TypeError" in result.content


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_an_interruption_leaves_the_call_started_and_goes_on(journal, tmp_path, kind):
    step = sealed_with_call(journal)

    def tool(a):
        raise kind

    with pytest.raises(kind):
        step.execute(CALL_ONE, tool)
    with pytest.raises(CallNotReady, match="outcome is unknown"):
        step.execute(CALL_ONE, lambda a: "again")
    journal.close()
    with StreamJournal.open(tmp_path / "a.db") as again:
        assert str(again.recover().calls[0].state) == "started"


def test_an_interrupted_call_that_replays_safely_may_run_again(journal):
    step = sealed_with_call(journal)
    step.start_call("c1", replay="safe")

    def tool(a):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        step.execute(CALL_ONE, tool)
    assert step.execute(CALL_ONE, lambda a: "again").content == "again"


def test_an_answered_call_gives_its_result_and_is_not_run(journal):
    step = sealed_with_call(journal)
    result = step.record_result("c1", "out")
    ran = []
    assert step.execute(CALL_ONE, lambda a: ran.append(a)) == result
    assert ran == []


def test_nothing_runs_when_the_start_cannot_be_recorded(tmp_path):
    ran = []
    with FaultDisk() as disk:
        journal = StreamJournal(SqliteEngine.open(tmp_path / "a.db", vfs=disk.name))
        step = sealed_with_call(journal)
        disk.fail("write", error="full", times=1000)
        with pytest.raises(StoreFull):
            step.execute(CALL_ONE, lambda a: ran.append(a))
        assert ran == []
        disk.clear_faults()
        assert step.execute(CALL_ONE, lambda a: "ran").content == "ran"
        journal.close()


def test_nothing_runs_when_syncs_fail(tmp_path):
    ran = []
    with FaultDisk() as disk:
        journal = StreamJournal(SqliteEngine.open(tmp_path / "a.db", vfs=disk.name))
        step = sealed_with_call(journal)
        disk.fail("sync", error="eio", times=1000)
        for _ in range(2):
            with pytest.raises(StoreFailed):
                step.execute(CALL_ONE, lambda a: ran.append(a))
        assert ran == []
        disk.clear_faults()
        journal.close()


def test_a_tool_that_ran_is_not_run_again_because_its_result_could_not_be_written(tmp_path):
    runs = []
    with FaultDisk() as disk:
        journal = StreamJournal(SqliteEngine.open(tmp_path / "a.db", vfs=disk.name))
        step = sealed_with_call(journal)

        def tool(a):
            runs.append(a)
            disk.fail("write", error="full", times=1000)
            return "out"

        with pytest.raises(StoreFull):
            step.execute(CALL_ONE, tool)
        disk.clear_faults()
        assert step.execute(CALL_ONE, tool).content == "out"
        assert runs == [1]
        journal.close()


# --- observers ----------------------------------------------------------------------------------


def test_a_watcher_hears_of_everything_that_is_on_record(tmp_path):
    heard = []
    journal = StreamJournal(SqliteEngine.open(tmp_path / "a.db", observer=heard.append))
    step = sealed_with_call(journal)
    step.start_call("c1")
    step.record_result("c1", "r")
    step.discard()
    journal.close()
    kinds = [event.kind for event in heard if event.step_id == step.step_id]
    assert kinds == [*["append"] * 4, "seal", "start", "result", "discard"]


def test_a_step_of_a_store_and_one_of_a_journal_are_the_same_thing(step):
    assert isinstance(step, ActiveJournal)
    assert step.model_name == "model-1"
    step.append_done()
    step.seal()
    assert repr(step) == f"<ActiveJournal step {step.step_id}: sealed, 1 events>"


def test_a_sealed_step_that_was_not_committed_is_complete_after_a_crash(journal, tmp_path):
    step = sealed_with_call(journal)
    journal.close()
    with StreamJournal.open(tmp_path / "a.db") as again:
        left = again.recover()
    assert isinstance(left, Complete) and left.step_id == step.step_id
