"""The canonical message: what it accepts, what it refuses and in which words, and its JSON."""

import copy
import json
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from holdfast.journal.errors import InvalidMessage
from holdfast.journal.jsontext import clean_text, parse_arguments
from holdfast.journal.messages import (
    GhostSnapshot,
    Image,
    Message,
    Opaque,
    OutputStatus,
    Text,
    Thinking,
    ToolResult,
    ToolUse,
    message_from_json,
    message_to_json,
)

EVERY_BLOCK = [
    Text("words", "sig"),
    Image("data:image/png;base64,AA==", "image/png"),
    ToolUse("c1", "grep", {"pattern": "x", "n": [1, None, {"deep": 1.5}]}, '{"pattern": "x"}', "s"),
    ToolResult("c1", "out"),
    ToolResult(
        "c2", [Text("out"), Image("https://example.org/a.png")], True, "timeout", "resolved"
    ),
    Thinking("hmm", "sig"),
    Opaque("openai", {"encrypted_content": "gAAA"}),
    GhostSnapshot({"commit": "abc"}),
]

# --- building -----------------------------------------------------------------------------------


def test_a_text_as_content_becomes_one_text_block():
    assert Message("user", "hi").content == [Text("hi")]
    assert Message.user("hi") == Message("user", [Text("hi")])
    assert Message.assistant("hi").role == "assistant"
    assert Message.system("hi").role == "system"


def test_the_views_show_words_calls_and_results_in_order():
    message = Message("assistant", [Text("a"), *EVERY_BLOCK, Text("b")])
    assert message.text == "awordsb"
    assert [call.id for call in message.tool_calls] == ["c1"]
    assert [result.tool_use_id for result in message.tool_results] == ["c1", "c2"]


def test_blocks_may_be_given_as_plain_objects():
    blocks: Any = [{"type": "text", "text": "hi"}, {"type": "thinking", "text": "hm"}]
    assert Message("assistant", blocks).content == [Text("hi"), Thinking("hm")]


def test_a_message_does_not_change_with_the_objects_it_was_built_from():
    arguments, blocks, notes = {"a": [1]}, [Text("x")], {"k": {"n": 1}}
    call = ToolUse("c", "f", arguments)
    message = Message("assistant", [*blocks, call], notes)
    arguments["a"].append(2)
    notes["k"]["n"] = 2
    blocks.clear()
    assert call.input == {"a": [1]}
    assert message.metadata == {"k": {"n": 1}}
    assert len(message.content) == 2


def test_two_messages_do_not_share_their_default_metadata():
    one, other = Message.user("a"), Message.user("b")
    one.metadata["seen"] = True
    assert other.metadata == {}


def test_messages_and_blocks_are_frozen():
    with pytest.raises(ValidationError):
        Message.user("a").role = "system"  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Text("a").text = "b"  # type: ignore[misc]


def test_an_empty_text_block_is_allowed_because_a_stream_can_hold_one():
    assert Message("assistant", [Text("")]).text == ""


@pytest.mark.parametrize("word", list(OutputStatus))
def test_every_status_reads_as_itself(word):
    assert ToolResult("c", "x", status=str(word)).status is word


@pytest.mark.parametrize("word", ["", "SUCCESS", "done", "cancelled"])
def test_an_unknown_status_reads_as_failed(word):
    assert OutputStatus.parse(word) is OutputStatus.FAILED
    assert ToolResult("c", "x", status=word).status == "failed"


def test_an_error_without_a_status_has_failed_and_a_given_status_stands():
    assert ToolResult("c", "x").status == "success"
    assert ToolResult("c", "x", is_error=True).status == "failed"
    assert ToolResult("c", "x", is_error=True, status="timeout").status == "timeout"
    assert ToolResult("c", "x", True, "success").status == "success"


# --- refusing -----------------------------------------------------------------------------------

REFUSED: list[tuple[str, Any, str]] = [
    ("unknown role", lambda: Message("tool", "x"), "role: must be 'system', 'user' or 'assistant'"),
    ("empty role", lambda: Message("", "x"), "role: must be"),
    ("no role, no content", lambda: Message(), "role: missing; content: missing"),
    ("no blocks", lambda: Message("user", []), "content: must not be empty"),
    ("content of no kind", lambda: Message("user", None), "content: must be text or a list"),
    ("a lone block", lambda: Message("user", Text("x")), "content: must be text or a list"),
    ("a text among blocks", lambda: Message("user", ["x"]), "content[0]: must be an object"),
    ("unknown block", lambda: Message("user", [{"type": "video"}]), "content[0].type: 'video'"),
    ("untyped block", lambda: Message("user", [{"text": "x"}]), "content[0].type: missing"),
    (
        "missing id in the second block",
        lambda: Message("user", [Text("x"), {"type": "tool_use", "name": "f", "input": {}}]),
        "content[1].id: missing",
    ),
    ("missing id", lambda: ToolUse(name="f", input={}), "ToolUse: id: missing"),
    ("empty id", lambda: ToolUse("", "f", {}), "id: must not be empty"),
    ("empty name", lambda: ToolUse("c", "", {}), "name: must not be empty"),
    ("input as text", lambda: ToolUse("c", "f", "{}"), "input: must be an object, not str"),
    ("input as list", lambda: ToolUse("c", "f", [1]), "input: must be an object, not list"),
    ("NaN inside", lambda: ToolUse("c", "f", {"a": [{"b": float("nan")}]}), "input.a[0].b: is not"),
    ("a set inside", lambda: Opaque("p", {"a": {1}}), "data.a: must be JSON, not set"),
    ("a number as key", lambda: GhostSnapshot({"a": {1: 2}}), "data.a: must have texts as keys"),
    ("a huge integer", lambda: GhostSnapshot({"a": 1 << 10_000}), "data.a: is an integer of more"),
    ("no metadata", lambda: Message("user", "x", None), "metadata: must be an object"),
    ("empty answered id", lambda: ToolResult("", "x"), "tool_use_id: must not be empty"),
    ("result of a number", lambda: ToolResult("c", 3), "content: must be text, not int"),
    (
        "thinking in a result",
        lambda: ToolResult("c", [Thinking("x")]),
        "content[0].type: 'thinking' is none of",
    ),
    (
        "a bad block of a result in a message",
        lambda: Message(
            "user", [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text"}]}]
        ),
        "content[0].content[0].text: missing",
    ),
    ("error flag as text", lambda: ToolResult("c", "x", "yes"), "is_error: input should be"),
    ("unknown synthetic", lambda: ToolResult("c", "x", synthetic="lost"), "synthetic: must be"),
    ("bytes as text", lambda: Text(b"x"), "text: must be text, not bytes"),
    ("unknown field", lambda: Text("x", colour="red"), "colour: unknown field"),
    ("too many values", lambda: Thinking("a", "b", "c"), "3 values for the fields text, signature"),
    ("a field twice", lambda: Text("x", text="y"), "text: given twice"),
    ("model_validate", lambda: Message.model_validate({"role": "user"}), "content: missing"),
    ("model_validate_json", lambda: Text.model_validate_json("{}"), "text: missing"),
    ("no JSON", lambda: message_from_json('{"role":'), "not JSON"),
    ("no object", lambda: message_from_json("[]"), "must be a JSON object, not list"),
    ("no UTF-8", lambda: message_from_json(b'"\xff"'), "not JSON"),
]


@pytest.mark.parametrize(
    ("build", "words"), [(build, words) for _, build, words in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_bad_input_gives_one_error_that_names_the_field(build, words):
    with pytest.raises(InvalidMessage) as caught:
        build()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_error_does_not_repeat_the_words_of_a_transcript():
    with pytest.raises(InvalidMessage) as caught:
        Message("user", [{"type": "text", "text": ["secret"], "signature": {"secret": 1}}])  # type: ignore[list-item]
    assert "secret" not in str(caught.value)


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def test_objects_nested_too_deeply_are_refused_before_any_parser_gives_up():
    message = Message("user", "x", nested(128))
    assert message_from_json(message_to_json(message)) == message
    with pytest.raises(InvalidMessage, match="nested more than 128 deep"):
        Message("user", "x", nested(129))
    with pytest.raises(InvalidMessage, match="nested"):
        message_from_json('{"role":"user","content":"x","metadata":' + '{"a":' * 100_000)


def test_an_object_that_holds_itself_is_refused():
    ring: dict[str, Any] = {}
    ring["ring"] = ring
    with pytest.raises(InvalidMessage, match="nested"):
        ToolUse("c", "f", ring)


def test_a_pydantic_model_of_the_user_may_hold_messages_and_reports_in_its_own_way():
    class Ticket(BaseModel):
        message: Message

    assert Ticket(message=Message.user("x")).message.text == "x"
    with pytest.raises(ValidationError, match=r"message\.role"):
        Ticket.model_validate({"message": {"role": "tool", "content": "x"}})


# --- JSON, copies and text ----------------------------------------------------------------------


def test_json_has_one_form_with_all_fields_in_declared_order():
    message = Message("user", [Text("hé"), ToolResult("c", "x")], {"z": 1, "a": 2})
    assert message_to_json(message) == (
        '{"role":"user","content":[{"type":"text","text":"hé","signature":null},'
        '{"type":"tool_result","tool_use_id":"c","content":"x","is_error":false,"status":"success",'
        '"synthetic":null}],"metadata":{"z":1,"a":2}}'
    )


def test_fields_that_json_leaves_out_take_their_defaults():
    text = '{"role":"assistant","content":[{"type":"tool_use","id":"c","name":"f","input":{}}]}'
    assert message_from_json(text) == Message("assistant", [ToolUse("c", "f", {})])
    assert message_from_json('{"content":"hi","role":"user"}') == Message.user("hi")


def test_every_block_survives_json_pickle_and_copies():
    message = Message("assistant", EVERY_BLOCK, {"provider": "anthropic", "none": None})
    assert message_from_json(message_to_json(message)) == message
    assert pickle.loads(pickle.dumps(message)) == message
    assert copy.deepcopy(message) == message
    assert copy.copy(message) == message
    assert message.model_copy(update={"role": "user"}).content == message.content


def test_an_error_survives_pickling():
    with pytest.raises(InvalidMessage) as caught:
        ToolUse("", "f", {})
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.problem) == (str(caught.value), caught.value.problem)


@pytest.mark.parametrize(
    ("given_text", "kept"),
    [
        ("plain", "plain"),
        ("grüße 😀", "grüße 😀"),
        ("\ud83d\ude00", "😀"),
        ("a\ud83d", "a\ufffd"),
        ("\ude00b", "\ufffdb"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("😀\ud83d😀", "😀\ufffd😀"),
        ("nul\0", "nul\0"),
    ],
)
def test_surrogate_pairs_are_joined_and_lone_ones_replaced(given_text, kept):
    assert clean_text(given_text) == kept
    assert Text(given_text).text == kept
    assert ToolUse("c", "f", {given_text: [given_text]}).input == {kept: [kept]}
    escaped = json.dumps({"role": "user", "content": given_text})
    assert message_from_json(escaped) == Message.user(kept)


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ('{"a": [1, null]}', {"a": [1, None]}),
        (" {} ", {}),
        ("", None),
        ('{"a": ', None),
        ("[1]", None),
        ('"text"', None),
        ('{"a": NaN}', None),
        ('{"a": 1e400}', None),
        ('{"a": ' + "1" * 5000 + "}", None),
        ('{"a":' * 100_000, None),
    ],
)
def test_arguments_are_an_object_that_a_call_accepts_or_nothing(raw, value):
    assert parse_arguments(raw) == value
    if value is not None:
        assert ToolUse("c", "f", value).input == value


any_text = st.text(st.characters(), max_size=8)  # surrogates included
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(any_text, json_values, max_size=3)
ids = st.text(st.characters(), min_size=1, max_size=6)
plain = st.builds(Text, any_text, st.none() | any_text) | st.builds(Image, ids)
results = st.builds(
    ToolResult,
    ids,
    any_text | st.lists(plain, max_size=2),
    st.booleans(),
    st.sampled_from(OutputStatus),
)
blocks = st.one_of(
    plain,
    st.builds(ToolUse, ids, ids, objects, st.none() | any_text),
    results,
    st.builds(Thinking, any_text, st.none() | any_text),
    st.builds(Opaque, ids, objects),
    st.builds(GhostSnapshot, objects),
)
any_message = st.builds(
    Message,
    st.sampled_from(["system", "user", "assistant"]),
    st.lists(blocks, min_size=1, max_size=4),
    objects,
)


@given(any_message)
@settings(deadline=None)
def test_any_message_comes_back_equal_from_json_and_its_json_is_stable(message):
    text = message_to_json(message)
    again = message_from_json(text.encode())
    assert again == message
    assert message_to_json(again) == text
    assert message_from_json(json.dumps(json.loads(text))) == message


json_anything = st.recursive(
    st.none() | st.integers() | st.sampled_from(["user", "text", "tool_result", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "type", "text", "id", "metadata", "tool_use_id", "z"]
            ),
            inner,
        )
    ),
)


@given(json_anything | st.builds(lambda c: {"role": "user", "content": c}, json_anything))
@settings(deadline=None)
def test_any_json_is_a_message_or_an_invalid_message_and_nothing_else(value):
    try:
        message = message_from_json(json.dumps(value))
    except InvalidMessage as error:
        assert str(error)
    else:
        assert message.content
