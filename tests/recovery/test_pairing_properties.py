"""`normalize` on any list of messages, and the same properties on ways to get it wrong.

The checker below knows nothing of how pairing works: it reads the rule for a valid list literally,
and compares what went in with what came out.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from holdfast.journal.messages import Block, Message, Text, ToolResult, ToolUse, message_to_json
from holdfast.recovery.pairing import (
    ensure_call_outputs_present,
    normalize,
    remove_orphan_outputs,
    synthetic_output,
    trim,
    validate,
)

# Tens of thousands of warnings would tell nothing.
pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    logger = logging.getLogger("holdfast")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


Normalize = Callable[[list[Message]], list[Message]]

# Few ids, so that they collide; every result has a content of its own, so that it can be followed.
ids = st.sampled_from(["call_0", "call_1", "x"])
calls = st.builds(ToolUse, ids, st.just("f"), st.just({}))
texts = st.builds(Text, st.sampled_from(["a", "b"]))


@st.composite
def messages(draw: st.DrawFn) -> list[Message]:
    size = draw(st.integers(0, 7))
    made: list[Message] = []
    for i in range(size):
        results = st.builds(ToolResult, ids, st.just(f"output {i}"))
        role = draw(st.sampled_from(["assistant", "user", "user", "assistant", "system"]))
        blocks: st.SearchStrategy[Block]
        usual = {"assistant": calls | texts, "user": results | texts}.get(role, texts)
        blocks = usual if draw(st.integers(0, 7)) else calls | results | texts
        content = draw(st.lists(blocks, min_size=1, max_size=4))
        # Two results of one message differ as well.
        content = [
            block.model_copy(update={"content": f"output {i}.{k}"})
            if isinstance(block, ToolResult)
            else block
            for k, block in enumerate(content)
        ]
        made.append(Message(role, content, {"n": i}))
    return made


def is_valid(given_list: Sequence[Message]) -> bool:
    """Outputs stand where the calls before them want them, and nowhere else."""
    wanted: list[str] = []
    for message in given_list:
        head = [b.tool_use_id for b in message.content[: len(wanted)] if isinstance(b, ToolResult)]
        if wanted and (message.role != "user" or head != wanted):
            return False
        if any(isinstance(block, ToolResult) for block in message.content[len(wanted) :]):
            return False
        wanted = [call.id for call in message.tool_calls]
    return not wanted


def all_else(given_list: Sequence[Message]) -> list[tuple[str, Block, object]]:
    return [
        (message.role, block, message.metadata)
        for message in given_list
        for block in message.content
        if not isinstance(block, ToolResult)
    ]


def outputs(given_list: Sequence[Message]) -> list[ToolResult]:
    return [result for message in given_list for result in message.tool_results]


def answered_first_in_first_out(given_list: Sequence[Message]) -> list[tuple[str, object]]:
    """By the dumbest road: for each output look through all calls from the start."""
    seen: list[list[object]] = []  # [call id, its output or None], in order of position
    for message in given_list:
        for block in message.content:
            if isinstance(block, ToolUse):
                seen.append([block.id, None])
            elif isinstance(block, ToolResult):
                for call in seen:
                    if call == [block.tool_use_id, None]:
                        call[1] = block
                        break
    return [(str(call_id), output) for call_id, output in seen]


Place = tuple[int, int]


def places(given_list: Sequence[Message], kind: type[Block], call_id: str) -> list[Place]:
    return [
        (i, k)
        for i, message in enumerate(given_list)
        for k, block in enumerate(message.content)
        if isinstance(block, kind)
        and call_id == (block.id if isinstance(block, ToolUse) else block.tool_use_id)
    ]


def call_in_whose_place(given_list: Sequence[Message], output: Place, call_id: str) -> Place | None:
    """The call that this output follows with nothing but outputs between its message and it."""
    at = output[0] - 1
    while at >= 0 and all(isinstance(block, ToolResult) for block in given_list[at].content):
        at -= 1
    asked = [place for place in places(given_list, ToolUse, call_id) if place[0] == at]
    before = [
        place
        for place in places(given_list, ToolResult, call_id)
        if at < place[0] and place < output and given_list[place[0]].role == "user"
    ]
    fits = given_list[output[0]].role == "user" and len(before) < len(asked)
    return asked[len(before)] if fits else None


def answered(given_list: Sequence[Message]) -> list[ToolResult]:
    """The rule read aloud, with a look at the whole list for every output."""
    found: dict[Place, Place] = {}  # call: output
    for call_id in ("call_0", "call_1", "x"):
        calls_of_it = places(given_list, ToolUse, call_id)
        outputs_of_it = places(given_list, ToolResult, call_id)
        for here in outputs_of_it:
            open_calls = [call for call in calls_of_it if call < here and call not in found]
            own = call_in_whose_place(given_list, here, call_id)
            for_them = [
                place
                for place in outputs_of_it
                if place >= here
                and (call_in_whose_place(given_list, place, call_id) or here) <= here
            ]
            if own in open_calls and len(for_them) < len(open_calls):
                found[own] = here
            elif open_calls:
                found[open_calls[0]] = here
    return [
        given_list[found[i, k][0]].content[found[i, k][1]]
        if (i, k) in found
        else synthetic_output(block.id)
        for i, message in enumerate(given_list)
        for k, block in enumerate(message.content)
        if isinstance(block, ToolUse)
    ]


def check(given_list: list[Message], normalized: Normalize) -> None:
    """Everything that `normalize` promises, for one list."""
    before = [message_to_json(message) for message in given_list]
    result = normalized(given_list)
    bytes_out = [message_to_json(message) for message in result]
    assert [message_to_json(m) for m in given_list] == before, "the input was changed"
    assert is_valid(result), "not valid"
    assert all_else(result) == all_else(given_list), "something else moved, came or went"
    assert outputs(result) == answered(given_list), "an output is not its call's"
    assert all(message.content for message in result), "an empty message"
    assert [message_to_json(m) for m in normalized(result)] == bytes_out, "not idempotent"
    assert [message_to_json(m) for m in normalized(given_list)] == bytes_out, "not stable"
    if is_valid(given_list):
        assert result == given_list, "a valid list was changed"


@given(messages())
@settings(deadline=None, max_examples=300)
def test_any_list_becomes_valid_and_nothing_else_moves(given_list):
    check(given_list, normalize)


@given(messages())
@settings(deadline=None)
def test_validate_and_normalize_agree_with_the_rule(given_list):
    report = validate(given_list)
    assert report.is_valid == is_valid(given_list)
    assert report.is_valid == (normalize(given_list) == given_list)
    assert validate(normalize(given_list)).is_valid
    synthetic = [result for result in outputs(normalize(given_list)) if result.synthetic]
    assert Counter(m.call_id for m in report.missing_outputs) == Counter(
        result.tool_use_id for result in synthetic
    )
    assert len(report.orphan_outputs) == len(outputs(given_list)) - (
        len(outputs(normalize(given_list))) - len(synthetic)
    )


@given(messages(), st.sets(ids))
@settings(deadline=None)
def test_running_calls_are_left_alone_and_all_others_answered(given_list, pending):
    result = normalize(given_list, pending=pending)
    assert all_else(result) == all_else(given_list)
    assert not [r for r in outputs(result) if r.synthetic and r.tool_use_id in pending]
    assert validate(result, pending=pending).is_valid
    assert normalize(result, pending=pending) == result
    assert not {m.call_id for m in validate(result).missing_outputs} - pending
    recorded = [r for r in answered(given_list) if not r.synthetic]
    assert [r for r in outputs(result) if not r.synthetic] == recorded


@given(messages())
@settings(deadline=None, max_examples=300)
def test_where_first_in_first_out_answers_every_call_of_an_id_it_is_what_happens(given_list):
    plain, result = answered_first_in_first_out(given_list), outputs(normalize(given_list))
    for call_id in ("call_0", "call_1", "x"):
        expected = [output for called, output in plain if called == call_id]
        if None not in expected:
            assert [output for output in result if output.tool_use_id == call_id] == expected


@given(messages())
@settings(deadline=None, max_examples=300)
def test_no_call_is_marked_as_missing_while_an_output_stands_in_its_place(given_list):
    asked = [
        (i, k)
        for i, message in enumerate(given_list)
        for k, block in enumerate(message.content)
        if isinstance(block, ToolUse)
    ]
    given_for = dict(zip(asked, outputs(normalize(given_list)), strict=True))
    for call_id in ("call_0", "call_1", "x"):
        for output in places(given_list, ToolResult, call_id):
            own = call_in_whose_place(given_list, output, call_id)
            assert own is None or not given_for[own].synthetic


@given(messages())
@settings(deadline=None)
def test_the_halves_in_either_order_say_the_same_as_the_whole(given_list):
    """Only the message that holds an output may differ: one of nothing but orphans may be gone.

    An output that came twice in the message of its call was once swapped: the first had moved
    behind the second, which then counted as the first.
    """
    whole = normalize(given_list)
    for halves in (
        ensure_call_outputs_present(remove_orphan_outputs(given_list)),
        remove_orphan_outputs(ensure_call_outputs_present(given_list)),
    ):
        assert is_valid(halves)
        assert outputs(halves) == outputs(whole)
        assert all_else(halves) == all_else(whole)


@given(messages(), st.integers(0, 10))
@settings(deadline=None)
def test_a_trimmed_list_is_a_valid_end_of_the_whole(given_list, keep):
    whole, kept = normalize(given_list), trim(given_list, keep)
    assert len(kept) <= keep
    assert is_valid(kept)
    rest = all_else(kept)
    assert rest == all_else(whole[max(0, len(whole) - keep) :])


# --- the tests of the tests: each of these is wrong, and the properties above must say so --------


def matched_by_a_set_of_ids(given_list: list[Message]) -> list[Message]:
    """Ids are looked up anywhere in the list, before or after, used or not."""
    answered = {result.tool_use_id for result in outputs(given_list)}
    asked = {call.id for message in given_list for call in message.tool_calls}
    result: list[Message] = []
    for message in given_list:
        content = [
            b for b in message.content if not isinstance(b, ToolResult) or b.tool_use_id in asked
        ]
        if content:
            result.append(message.model_copy(update={"content": content}))
        missing = [call.id for call in message.tool_calls if call.id not in answered]
        if missing:
            result.append(Message("user", [synthetic_output(call_id) for call_id in missing]))
    return result


def last_call_first(given_list: list[Message]) -> list[Message]:
    """An output answers the latest open call with its id."""
    open_calls: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    answers: dict[tuple[int, int], ToolResult] = {}
    for i, message in enumerate(given_list):
        for k, block in enumerate(message.content):
            if isinstance(block, ToolUse):
                open_calls[block.id].append((i, k))
            elif isinstance(block, ToolResult) and open_calls[block.tool_use_id]:
                answers[open_calls[block.tool_use_id].pop()] = block
    return _laid_out(given_list, answers)


def strictly_first_in_first_out(given_list: list[Message]) -> list[Message]:
    """A call that was left open long ago takes the output of the one that was just answered."""
    in_order = iter(answered_first_in_first_out(given_list))
    answers: dict[tuple[int, int], ToolResult] = {}
    for i, message in enumerate(given_list):
        for k, block in enumerate(message.content):
            if isinstance(block, ToolUse):
                _, output = next(in_order)
                if isinstance(output, ToolResult):
                    answers[i, k] = output
    return _laid_out(given_list, answers)


def always_in_place_first(given_list: list[Message]) -> list[Message]:
    """The place counts for more than the order, even when there are outputs for all."""
    answers: dict[tuple[int, int], ToolResult] = {}
    for call_id in ("call_0", "call_1", "x"):
        late = []
        for i, k in places(given_list, ToolResult, call_id):
            output = given_list[i].content[k]
            assert isinstance(output, ToolResult)
            own = call_in_whose_place(given_list, (i, k), call_id)
            if own is not None:
                answers[own] = output
            else:
                late.append(((i, k), output))
        for place, output in late:
            for call in places(given_list, ToolUse, call_id):
                if call < place and call not in answers:
                    answers[call] = output
                    break
    return _laid_out(given_list, answers)


def _laid_out(
    given_list: list[Message], answers: dict[tuple[int, int], ToolResult]
) -> list[Message]:
    result: list[Message] = []
    owed: list[ToolResult] = []
    for i, message in enumerate(given_list):
        rest: list[Block] = [b for b in message.content if not isinstance(b, ToolResult)]
        if owed and message.role == "user":
            rest = [*owed, *rest]
        elif not rest:
            continue
        elif owed:
            result.append(Message("user", owed))
        result.append(message.model_copy(update={"content": rest}))
        owed = [
            answers.get((i, k)) or synthetic_output(block.id)
            for k, block in enumerate(message.content)
            if isinstance(block, ToolUse)
        ]
    return [*result, Message("user", owed)] if owed else result


def outputs_in_a_message_of_their_own_each(given_list: list[Message]) -> list[Message]:
    """Parallel calls are split: one user message an output."""
    result: list[Message] = []
    for message in normalize(given_list):
        parts = [[r] for r in message.tool_results[:-1]] if message.role == "user" else []
        result += [Message("user", part) for part in parts]
        result.append(message.model_copy(update={"content": message.content[len(parts) :]}))
    return result


def outputs_after_the_words(given_list: list[Message]) -> list[Message]:
    return [
        message.model_copy(
            update={"content": sorted(message.content, key=lambda b: isinstance(b, ToolResult))}
        )
        for message in normalize(given_list)
    ]


def outputs_sorted_by_id(given_list: list[Message]) -> list[Message]:
    """The order of a set instead of the order of the calls."""
    result = []
    for message in normalize(given_list):
        heads = sorted(message.tool_results, key=lambda r: r.tool_use_id)
        rest = [b for b in message.content if not isinstance(b, ToolResult)]
        result.append(message.model_copy(update={"content": [*heads, *rest]}))
    return result


def late_outputs_replaced(given_list: list[Message]) -> list[Message]:
    """A call whose output is on record, only later, is marked as missing."""
    kept: list[Message] = []
    for i, message in enumerate(given_list):
        before = {call.id for call in given_list[i - 1].tool_calls} if i else set()
        content = [
            b for b in message.content if not isinstance(b, ToolResult) or b.tool_use_id in before
        ]
        if content:
            kept.append(message.model_copy(update={"content": content}))
    return normalize(kept)


def orphans_kept(given_list: list[Message]) -> list[Message]:
    return ensure_call_outputs_present(given_list)


def dangling_calls_dropped(given_list: list[Message]) -> list[Message]:
    """The list is legal then, and the model's own words are gone."""
    missing = {(m.index, m.call_id) for m in validate(given_list).missing_outputs}
    kept: list[Message] = []
    for i, message in enumerate(given_list):
        content = [
            b for b in message.content if not isinstance(b, ToolUse) or (i, b.id) not in missing
        ]
        if content:
            kept.append(message.model_copy(update={"content": content}))
    return normalize(kept)


def words_moved_with_their_outputs(given_list: list[Message]) -> list[Message]:
    """Each message that answers moves as a whole to the front of its own calls' successor."""
    result = normalize(given_list)
    return [m for m in result if m.role == "system"] + [m for m in result if m.role != "system"]


def metadata_lost(given_list: list[Message]) -> list[Message]:
    return [
        message if message in given_list else Message(message.role, message.content)
        for message in normalize(given_list)
    ]


def input_repaired_in_place(given_list: list[Message]) -> list[Message]:
    result = normalize(given_list)
    for message in given_list:
        message.content[:] = [b for b in message.content if not isinstance(b, ToolResult)] or [
            Text("")
        ]
    return result


def another_text_every_time() -> Normalize:
    """A counter or a clock in the synthetic output: no prompt cache survives it."""
    runs = 0

    def normalized(given_list: list[Message]) -> list[Message]:
        nonlocal runs
        runs += 1
        return [
            message.model_copy(
                update={
                    "content": [
                        b.model_copy(update={"content": f"{b.content} {runs}"})
                        if isinstance(b, ToolResult) and b.synthetic
                        else b
                        for b in message.content
                    ]
                }
            )
            for message in normalize(given_list)
        ]

    return normalized


WRONG: list[Normalize] = [
    list,
    matched_by_a_set_of_ids,
    last_call_first,
    strictly_first_in_first_out,
    always_in_place_first,
    outputs_in_a_message_of_their_own_each,
    outputs_after_the_words,
    outputs_sorted_by_id,
    late_outputs_replaced,
    orphans_kept,
    dangling_calls_dropped,
    words_moved_with_their_outputs,
    metadata_lost,
    input_repaired_in_place,
    another_text_every_time(),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_the_properties_catch_a_wrong_normalize(wrong):
    def is_caught(given_list: list[Message]) -> bool:
        copies = [message.model_copy(deep=True) for message in given_list]
        try:
            check(copies, wrong)
        except AssertionError:
            return True
        return False

    quick = settings(
        max_examples=2_000,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    try:
        find(messages(), is_caught, settings=quick)
    except NoSuchExample:
        pytest.fail(f"nothing caught {wrong.__name__}")
