"""Reading a stream: how a list of events becomes a message, and which events are believed."""

import json

import pytest

from holdfast.journal.engine.rows import EventRow
from holdfast.journal.messages import Opaque, Text, Thinking, ToolUse
from holdfast.journal.stream import (
    ARGS,
    CALL,
    DONE,
    ERROR,
    OPAQUE,
    SIGNATURE,
    TEXT,
    THINKING,
    fold,
)


def events(*given):
    """(kind, content[, call]) as sound rows, in order."""
    rows = []
    for seq, (kind, content, *call) in enumerate(given, 1):
        rows.append(EventRow(seq, kind, call[0] if call else None, content, True))
    return rows


def call(call_id, name, position=0):
    return CALL, json.dumps([call_id, name]), position


def blocks(*given):
    return fold(events(*given)).blocks()


def test_deltas_of_one_kind_become_one_block_and_a_change_begins_the_next():
    assert blocks(
        (TEXT, "a"),
        (TEXT, "b"),
        (THINKING, "c"),
        call("c1", "grep"),
        (ARGS, "{}", 0),
        (TEXT, "d"),
        (DONE, "{}"),
    ) == [Text("ab"), Thinking("c"), ToolUse("c1", "grep", {}, "{}"), Text("d")]


def test_arguments_belong_to_their_call_however_calls_are_interleaved():
    stream = fold(
        events(
            call("a", "f", 0),
            call("b", "g", 1),
            (ARGS, '{"x":', 1),
            (ARGS, '{"y":', 0),
            (ARGS, "1}", 1),
            (ARGS, "2}", 0),
        )
    )
    assert [(c.call_id, c.parse(done=False)) for c in stream.calls] == [
        ("a", {"y": 2}),
        ("b", {"x": 1}),
    ]


def test_a_signature_ends_the_block_that_it_signs():
    assert blocks((THINKING, "a"), (SIGNATURE, "s"), (THINKING, "b")) == [
        Thinking("a", "s"),
        Thinking("b"),
    ]
    assert blocks((TEXT, "a"), (SIGNATURE, "s1"), (SIGNATURE, "s2")) == [Text("a", "s1s2")]
    assert blocks(call("c", "f"), (SIGNATURE, "s"), (DONE, "{}")) == [
        ToolUse("c", "f", {}, None, "s")
    ]


def test_a_signature_of_nothing_shown_is_kept_as_an_empty_thought():
    assert blocks((SIGNATURE, "s")) == [Thinking("", "s")]
    assert blocks((OPAQUE, '["p", {"k": 1}]'), (SIGNATURE, "s")) == [
        Opaque("p", {"k": 1}),
        Thinking("", "s"),
    ]


def test_a_surrogate_pair_split_over_two_deltas_is_joined_in_every_kind():
    halves = ["\ud83d".encode("utf-8", "surrogatepass"), "\ude00".encode("utf-8", "surrogatepass")]
    for kind, read in (
        (TEXT, lambda s: s.text),
        (THINKING, lambda s: s.blocks()[0].text),
        (SIGNATURE, lambda s: s.blocks()[0].signature),
    ):
        assert read(fold(events(*((kind, half) for half in halves)))) == "\U0001f600"


def test_blocks_without_content_are_left_out():
    stream = fold(events((TEXT, ""), (THINKING, ""), (DONE, "{}")))
    assert stream.blocks() == []
    assert stream.message(model="m") is None


def test_the_first_terminal_event_stands():
    done = fold(events((DONE, '{"stop_reason": "end", "usage": {"out": 2}}'), (ERROR, "late")))
    assert (done.status, done.error, done.stop_reason, done.usage) == (
        "complete",
        None,
        "end",
        {"out": 2},
    )
    errored = fold(events((ERROR, "first"), (DONE, "{}"), (ERROR, "second")))
    assert (errored.status, errored.error) == ("errored", "first")
    assert fold(events((TEXT, "a"))).status == "interrupted"


@pytest.mark.parametrize("damage", ["missing", "unsound"])
def test_nothing_behind_a_gap_is_believed(damage):
    rows = events((TEXT, "a"), (TEXT, "b"), (TEXT, "c"), (ERROR, "x"))
    if damage == "missing":
        del rows[1]
    else:
        rows[1] = rows[1]._replace(valid=False)
    stream = fold(rows)
    assert (stream.text, stream.last_seq, stream.gap_at) == ("a", 1, 2)
    assert stream.status == "interrupted"
    assert stream.behind_gap == ("bc" if damage == "unsound" else "c")


def test_what_stands_behind_a_gap_may_be_anything():
    rows = [EventRow(1, TEXT, None, b"\xff\xfe", False), EventRow(2, TEXT, None, 12, False)]
    assert fold(rows).behind_gap == "\ufffd\ufffd12"


def test_a_stream_that_does_not_begin_with_its_first_event_has_a_gap_there():
    assert fold(events((TEXT, "a"), (TEXT, "b"))[1:]).gap_at == 1


def test_kinds_of_a_newer_version_are_passed_over_and_named():
    stream = fold(events((TEXT, "a"), ("video", "?"), ("video", "?"), (TEXT, "b"), (DONE, "{}")))
    assert stream.unknown_kinds == ("video",)
    assert (stream.text, stream.status, stream.gap_at) == ("ab", "complete", None)


def test_no_arguments_mean_an_empty_object_only_once_the_stream_is_done():
    assert blocks(call("c", "f"), (DONE, "{}")) == [ToolUse("c", "f", {})]
    assert blocks(call("c", "f")) == []
    assert blocks(call("c", "f"), (ERROR, "x")) == []
    assert [c.call_id for c in fold(events(call("c", "f"))).dropped] == ["c"]


@pytest.mark.parametrize("raw", ['{"a": 1', "[]", "null", "1", '{"a": NaN}', "{} {}", " ", '"x"'])
def test_arguments_that_are_no_json_object_drop_their_call_and_stay_raw(raw):
    stream = fold(events((TEXT, "t"), call("c", "f"), (ARGS, raw, 0), (DONE, "{}")))
    assert stream.blocks() == [Text("t")]
    assert [c.raw_arguments for c in stream.dropped] == [raw]


def test_a_signed_message_says_whose_signature_it_is():
    signed = fold(events((THINKING, "a"), (SIGNATURE, "s")))
    assert signed.message(model="m", provider="p").metadata == {"provider": "p", "model": "m"}
    assert fold(events((TEXT, "a"))).message(model="m", provider="p").metadata == {}
