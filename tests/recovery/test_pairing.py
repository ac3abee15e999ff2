"""Calls and outputs, case by case: what is found, and what a repaired list looks like."""

import logging

import pytest

from holdfast.journal.messages import Image, Message, Text, ToolResult, ToolUse, message_to_json
from holdfast.recovery.pairing import (
    CANCELED_TEXT,
    IN_DOUBT_SAFE_TEXT,
    IN_DOUBT_TEXT,
    NOT_STARTED_TEXT,
    MissingOutput,
    PairingSettings,
    ValidationReport,
    enforce_invariants,
    ensure_call_outputs_present,
    normalize,
    recover_from_crash,
    remove_orphan_outputs,
    synthetic_output,
    trim,
    validate,
)


def calls(*ids: str, text: str | None = None) -> Message:
    words = [Text(text)] if text else []
    return Message("assistant", [*words, *(ToolUse(i, f"tool_{i}", {}) for i in ids)])


def out(call_id: str, content: str = "") -> ToolResult:
    return ToolResult(call_id, content or f"output of {call_id}")


def user(*blocks: ToolResult | Text | str) -> Message:
    return Message("user", [Text(b) if isinstance(b, str) else b for b in blocks])


def made(call_id: str) -> ToolResult:
    return ToolResult(call_id, CANCELED_TEXT, True, "canceled", "canceled")


hi, bye, say, rules = user("hi"), user("bye"), Message.assistant("say"), Message.system("rules")

VALID = {
    "nothing": [],
    "no calls": [rules, hi, say, bye],
    "one pair": [hi, calls("a"), user(out("a"))],
    "parallel calls": [calls("a", "b", text="both"), user(out("a"), out("b"), "and go on"), say],
    "an id reused in a later turn": [
        calls("a"),
        user(out("a", "1")),
        calls("a"),
        user(out("a", "2")),
    ],
    "an id twice in one message": [calls("a", "a"), user(out("a", "1"), out("a", "2"))],
    "answers and further calls in one message": [
        calls("a"),
        Message("user", [out("a"), ToolUse("b", "f", {})]),
        user(out("b")),
    ],
}

# name: (input, output, missing call ids, orphans, misplaced)
REPAIRED = {
    "a dangling call at the end": ([calls("a")], [calls("a"), user(made("a"))], "a", "", ""),
    "a user message already after the dangling call": (
        [calls("a"), hi, say],
        [calls("a"), user(made("a"), "hi"), say],
        "a",
        "",
        "",
    ),
    "an assistant message after the dangling call": (
        [calls("a"), say],
        [calls("a"), user(made("a")), say],
        "a",
        "",
        "",
    ),
    "a system message after the dangling call": (
        [calls("a"), rules, user(out("a"))],
        [calls("a"), user(out("a")), rules],
        "",
        "",
        "a",
    ),
    "parallel calls with some answered": (
        [calls("a", "b", "c"), user(out("b"), "hi")],
        [calls("a", "b", "c"), user(made("a"), out("b"), made("c"), "hi")],
        "ac",
        "",
        "",
    ),
    "outputs in another order": (
        [calls("a", "b"), user(out("b"), out("a"))],
        [calls("a", "b"), user(out("a"), out("b"))],
        "",
        "",
        "ba",
    ),
    "text before the output": (
        [calls("a"), user("hi", out("a"), "bye")],
        [calls("a"), user(out("a"), "hi", "bye")],
        "",
        "",
        "a",
    ),
    "each output in a message of its own": (
        [calls("a", "b"), user(out("a")), user(out("b")), hi],
        [calls("a", "b"), user(out("a"), out("b")), hi],
        "",
        "",
        "b",
    ),
    "a late output": (
        [calls("a"), hi, say, user(out("a"), "bye")],
        [calls("a"), user(out("a"), "hi"), say, user("bye")],
        "",
        "",
        "a",
    ),
    "an output before its call": (
        [user(out("a"), "hi"), calls("a")],
        [hi, calls("a"), user(made("a"))],
        "a",
        "a",
        "",
    ),
    "an output before its call in the same message": (
        [Message("assistant", [out("a"), ToolUse("a", "tool_a", {})])],
        [calls("a"), user(made("a"))],
        "a",
        "a",
        "",
    ),
    "an output in the message of the call": (
        [Message("assistant", [ToolUse("a", "tool_a", {}), out("a")]), hi],
        [calls("a"), user(out("a"), "hi")],
        "",
        "",
        "a",
    ),
    "two outputs for one call": (
        [calls("a"), user(out("a", "first"), out("a", "second")), user(out("a", "third"))],
        [calls("a"), user(out("a", "first"))],
        "",
        "aa",
        "",
    ),
    "an output without a call": ([hi, user(out("z"))], [hi], "", "z", ""),
    "an orphan where the output should be": (
        [calls("a"), user(out("z"))],
        [calls("a"), user(made("a"))],
        "a",
        "z",
        "",
    ),
    "an assistant message of nothing but an orphan before the output": (
        [calls("a"), Message("assistant", [out("z")]), user(out("a"))],
        [calls("a"), user(out("a"))],
        "",
        "z",
        "",
    ),
    "two messages with calls in a row": (
        [calls("a"), calls("b"), user(out("a"), out("b"))],
        [calls("a"), user(out("a")), calls("b"), user(out("b"))],
        "",
        "",
        "a",
    ),
    "a reused id, both outputs late: first come, first served": (
        [calls("a"), hi, calls("a"), say, user(out("a", "1")), user(out("a", "2"))],
        [calls("a"), user(out("a", "1"), "hi"), calls("a"), user(out("a", "2")), say],
        "",
        "",
        "aa",
    ),
    "an id twice in one message, one output: the first has it": (
        [calls("a", "a"), user(out("a", "1"))],
        [calls("a", "a"), user(out("a", "1"), made("a"))],
        "a",
        "",
        "",
    ),
    "a reused id whose first call dangles": (
        [calls("a"), user("go on"), calls("a"), user(out("a", "2"))],
        [calls("a"), user(made("a"), "go on"), calls("a"), user(out("a", "2"))],
        "a",
        "",
        "",
    ),
    "a reused id whose first call dangles, and many turns after it": (
        [calls("a"), hi, *[m for n in "234" for m in (calls("a"), user(out("a", n)))]],
        [
            calls("a"),
            user(made("a"), "hi"),
            *[m for n in "234" for m in (calls("a"), user(out("a", n)))],
        ],
        "a",
        "",
        "",
    ),
    "a dangling call, then the same id with an output in a message of its own": (
        [calls("a"), hi, calls("b", "a"), user(out("b")), user(out("a", "2"))],
        [calls("a"), user(made("a"), "hi"), calls("b", "a"), user(out("b"), out("a", "2"))],
        "a",
        "",
        "a",
    ),
    "a dangling call, then the same id twice in one message": (
        [calls("a"), calls("a", "a"), user(out("a", "1"), out("a", "2"))],
        [calls("a"), user(made("a")), calls("a", "a"), user(out("a", "1"), out("a", "2"))],
        "a",
        "",
        "",
    ),
    "a reused id, outputs for all: first come, first served": (
        [calls("a"), calls("a"), user(out("a", "1")), user(out("a", "2"))],
        [calls("a"), user(out("a", "1")), calls("a"), user(out("a", "2"))],
        "",
        "",
        "aa",
    ),
    "a reused id, outputs for all, two of them where the last calls want them": (
        [calls("a"), calls("a", "a"), user(out("a", "1"), out("a", "2")), say, user(out("a", "3"))],
        [
            calls("a"),
            user(out("a", "1")),
            calls("a", "a"),
            user(out("a", "2"), out("a", "3")),
            say,
        ],
        "",
        "",
        "aa",
    ),
    "a reused id whose second call dangles": (
        [calls("a"), user(out("a", "1")), calls("a"), hi],
        [calls("a"), user(out("a", "1")), calls("a"), user(made("a"), "hi")],
        "a",
        "",
        "",
    ),
}


@pytest.mark.parametrize("messages", VALID.values(), ids=VALID.keys())
def test_a_valid_list_is_called_valid_and_comes_back_equal(messages):
    assert validate(messages) == ValidationReport()
    assert normalize(messages) == messages


@pytest.mark.parametrize(
    ("messages", "repaired", "missing", "orphans", "misplaced"),
    REPAIRED.values(),
    ids=REPAIRED.keys(),
)
def test_what_is_wrong_is_found_and_repaired(messages, repaired, missing, orphans, misplaced):
    report = validate(messages)
    assert [item.call_id for item in report.missing_outputs] == list(missing)
    assert report.orphan_outputs == tuple(orphans)
    assert report.misplaced == tuple(misplaced)
    assert not report.is_valid
    assert normalize(messages) == repaired
    assert validate(repaired).is_valid


def test_a_missing_output_names_call_tool_and_message():
    assert validate([hi, calls("a")]).missing_outputs == (MissingOutput("a", "tool_a", 1),)


def test_a_late_output_keeps_its_content_and_its_message_keeps_its_metadata():
    late = ToolResult("a", [Text("x"), Image("https://example.org/i.png")], True, "timeout")
    mixed = Message("user", [Text("bye"), late], {"at": 7})
    repaired = normalize([calls("a"), say, mixed])
    assert repaired == [calls("a"), user(late), say, Message("user", "bye", {"at": 7})]


def test_a_message_that_others_are_merged_into_keeps_its_metadata():
    asked = Message("user", "hi", {"at": 7})
    assert normalize([calls("a"), asked]) == [
        calls("a"),
        Message("user", [made("a"), Text("hi")], {"at": 7}),
    ]
    first, second = Message("user", [out("a")], {"at": 1}), Message("user", [out("b")], {"at": 2})
    assert normalize([calls("a", "b"), first, second]) == [
        calls("a", "b"),
        Message("user", [out("a"), out("b")], {"at": 1}),
    ]


def test_the_metadata_of_a_message_that_moved_as_a_whole_moves_with_it():
    late = Message("user", [out("a"), out("z")], {"at": 7, "by": "x"})
    assert normalize([calls("a"), say, late]) == [
        calls("a"),
        Message("user", [out("a")], {"at": 7, "by": "x"}),
        say,
    ]
    first = Message("user", [out("b"), Text("hi")], {"at": 1})
    assert normalize([calls("a", "b"), first, late]) == [
        calls("a", "b"),
        Message("user", [out("a"), out("b"), Text("hi")], {"at": 1, "by": "x"}),
    ]
    assert late.metadata == {"at": 7, "by": "x"}


def test_a_synthetic_output_is_an_error_and_says_so_in_every_field():
    result = synthetic_output("a")
    assert (result.is_error, result.status, result.synthetic) == (True, "canceled", "canceled")
    assert result.content == "Tool execution was interrupted. Output was not received."


def test_the_words_tell_the_three_fates_of_a_call_apart():
    assert NOT_STARTED_TEXT.startswith(CANCELED_TEXT)
    assert "safe to run it again" in NOT_STARTED_TEXT
    assert IN_DOUBT_TEXT == (
        "Tool execution was interrupted after it had started. The outcome is unknown: "
        "it may have taken effect. Check before running it again."
    )
    assert IN_DOUBT_SAFE_TEXT.endswith("it may have taken effect. It may be run again.")


def test_a_running_call_is_neither_missing_nor_answered_for():
    messages = [calls("a", "b"), user(out("b"), "hi")]
    assert validate(messages, pending={"a"}).is_valid
    assert normalize(messages, pending=["a"]) == messages
    assert normalize([calls("a", "b")], pending={"a"}) == [calls("a", "b"), user(made("b"))]
    assert normalize([calls("a"), say], pending={"a"}) == [calls("a"), say]


def test_a_running_call_whose_output_is_on_record_has_it():
    assert normalize([calls("a"), say, user(out("a"))], pending={"a"}) == [
        calls("a"),
        user(out("a")),
        say,
    ]


def test_the_summary_speaks_of_misplaced_outputs_only_if_there_are_any():
    missing, misplaced = (MissingOutput("a", "f", 0),), ("b", "c")
    assert ValidationReport().summary() == "History invariants are valid"
    assert ValidationReport(missing, ()).summary() == "1 missing outputs, 0 orphan outputs"
    assert ValidationReport((), ("x", "y")).summary() == "0 missing outputs, 2 orphan outputs"
    assert ValidationReport(missing, (), misplaced).summary() == (
        "1 missing outputs, 0 orphan outputs, 2 misplaced outputs"
    )


def test_the_two_halves_of_normalize_can_be_had_alone():
    messages = [user(out("z"), "hi"), calls("a"), user(out("y"))]
    assert ensure_call_outputs_present(messages) == [
        user(out("z"), "hi"),
        calls("a"),
        user(made("a"), out("y")),
    ]
    assert remove_orphan_outputs(messages) == [hi, calls("a")]
    assert remove_orphan_outputs([user(out("a"))]) == []
    twice = Message("assistant", [ToolUse("a", "tool_a", {}), out("a", "1"), out("a", "2")])
    assert ensure_call_outputs_present([twice]) == [calls("a"), user(out("a", "1"))]
    assert ensure_call_outputs_present(remove_orphan_outputs(messages)) == normalize(messages)


# --- settings and warnings ----------------------------------------------------------------------


def test_a_loaded_history_is_recovered_by_default_and_a_living_one_only_on_demand():
    broken, whole = [calls("a"), user(out("z"))], [calls("a"), user(made("a"))]
    assert PairingSettings() == PairingSettings(enforce=False, auto_recover=True, warn=True)
    assert recover_from_crash(broken) == whole
    assert recover_from_crash(broken, settings=PairingSettings(auto_recover=False)) == broken
    assert enforce_invariants(broken) == broken
    assert enforce_invariants(broken, settings=PairingSettings(enforce=True)) == whole
    assert enforce_invariants(
        [calls("a")], pending={"a"}, settings=PairingSettings(enforce=True)
    ) == [calls("a")]


def test_each_synthetic_and_each_orphan_output_is_logged_without_its_text(caplog):
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        normalize([calls("a", "b", text="my secret"), user(out("z", "their secret"))])
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert all(record.name == "holdfast" for record in caplog.records)
    assert [word for word in ("'a'", "'b'", "'z'") for line in lines if word in line] == [
        "'a'",
        "'b'",
        "'z'",
    ]
    assert not any("secret" in line for line in lines)


def test_nothing_is_logged_for_a_valid_list_or_against_the_settings(caplog):
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        normalize(VALID["parallel calls"])
        recover_from_crash([calls("a")], settings=PairingSettings(warn=False))
        validate([calls("a")])
    assert not caplog.records


# --- trim ---------------------------------------------------------------------------------------

LONG = [
    rules,
    hi,
    calls("a"),
    user(out("a"), "more"),
    say,
    calls("b", "c"),
    user(out("b"), out("c")),
]


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (0, []),
        (1, []),
        (2, LONG[5:]),
        (3, LONG[4:]),
        (4, [user("more"), *LONG[4:]]),
        (5, LONG[2:]),
        (7, LONG),
        (100, LONG),
    ],
)
def test_trim_keeps_the_newest_and_never_splits_a_pair(keep, kept):
    assert trim(LONG, keep) == kept


def test_trim_of_a_broken_list_is_valid_and_within_its_bound():
    assert trim([calls("a"), say, user(out("a"), "bye")], 2) == [say, bye]
    assert trim([hi, calls("a")], 2) == [calls("a"), user(made("a"))]
    assert trim([hi, calls("a")], 2, pending={"a"}) == [hi, calls("a")]


def test_trim_refuses_a_negative_number():
    with pytest.raises(ValueError, match="negative"):
        trim([hi], -1)


def test_the_cost_grows_with_the_list_and_not_with_its_square():
    """Every call open until the very end, thousands of them, with ids that repeat."""
    n = 4_000
    messages = [calls(f"c{i % 7}") for i in range(n)] + [user(out(f"c{i % 7}")) for i in range(n)]
    repaired = normalize(messages)
    assert len(repaired) == 2 * n
    assert validate(repaired).is_valid
    dangling = [calls("a"), hi, *[m for _ in range(n) for m in (calls("a"), user(out("a")))]]
    assert len(normalize(dangling)) == 2 * n + 2


def test_the_same_input_gives_the_same_bytes():
    messages = [calls("a", "b"), hi, calls("b", "c"), user(out("c"), out("b", "1"))]
    once = [message_to_json(message) for message in normalize(messages)]
    assert [message_to_json(message) for message in normalize(list(messages))] == once
