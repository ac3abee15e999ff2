"""Hypothesis strategies for messages, streams, steps, faults and crashes.

Users import them from `holdfast.recovery.strategies`.  A stream is a list of plain values
(`StreamOp`) that can be printed, cut, and fed to any step; `expected_blocks` says what they come to
without a look at the journal.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hypothesis import strategies as st

from holdfast.journal.blocks import (
    Block,
    GhostSnapshot,
    Image,
    Opaque,
    Text,
    Thinking,
    ToolResult,
    ToolUse,
)
from holdfast.journal.jsontext import parse_arguments
from holdfast.journal.messages import Message, Role
from holdfast.recovery.faults import FaultDisk
from holdfast.recovery.images import Keep, Loss
from holdfast.recovery.injection import _CODES, FaultKind
from holdfast.recovery.trace import Op

# Few ids, so that they come again in later turns, as those of many models do.
CALL_IDS = ("call_0", "call_1", "call_2")
ROLES: tuple[Role, ...] = ("user", "assistant", "system")
Ending = Literal["commit", "discard", "leave"]
Strategy = st.SearchStrategy


# --- messages -----------------------------------------------------------------------------------


def json_objects(max_leaves: int = 4) -> Strategy[dict[str, Any]]:
    """JSON objects that come back equal: the input of a call, usage, metadata."""
    numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
    leaf: Strategy[Any] = st.none() | st.booleans() | numbers | st.text(max_size=6)
    keys = st.text(max_size=4)
    values = st.recursive(
        leaf,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=max_leaves,
    )
    return st.dictionaries(keys, values, max_size=3)


def messages(
    *,
    roles: Sequence[Role] = ROLES,
    call_ids: Sequence[str] = CALL_IDS,
    text: Strategy[str] | None = None,
    calls: bool = True,
) -> Strategy[Message]:
    """Any single message, every kind of block in any role; `calls=False`: no calls, no results."""
    words, ids = text if text is not None else st.text(max_size=12), st.sampled_from(call_ids)
    signatures = st.none() | st.text(min_size=1, max_size=6)
    shown = st.builds(Text, words) | st.builds(Image, st.just("https://example.org/i.png"))
    blocks: Strategy[Block] = st.builds(Text, words, signatures) | shown
    blocks |= st.builds(Thinking, words, signatures)
    blocks |= st.builds(Opaque, st.sampled_from(["openai", "anthropic"]), json_objects())
    blocks |= st.builds(GhostSnapshot, json_objects())
    if calls:
        blocks |= st.builds(ToolUse, ids, st.just("search"), json_objects())
        blocks |= st.builds(ToolResult, ids, words | st.lists(shown, max_size=2), st.booleans())
    return st.builds(
        Message,
        st.sampled_from(roles),
        st.lists(blocks, min_size=1, max_size=4),
        json_objects(max_leaves=1),
    )


@st.composite
def message_lists(
    draw: st.DrawFn,
    *,
    valid: bool = False,
    max_size: int = 8,
    call_ids: Sequence[str] = CALL_IDS,
    text: Strategy[str] | None = None,
) -> list[Message]:
    """Lists of messages: any at all, or `valid` ones, where every call has its output in place.

    Valid by construction, not by repair: the strategy and `normalize` can judge each other.
    """
    if not valid:
        return draw(st.lists(messages(call_ids=call_ids, text=text), max_size=max_size))
    words = text if text is not None else st.text(max_size=12)
    quiet = messages(calls=False, text=text)
    made: list[Message] = []
    size = draw(st.integers(0, max_size))
    while len(made) < size:
        asked = draw(st.lists(st.sampled_from(call_ids), max_size=3))
        if not asked or len(made) + 2 > size:
            made.append(draw(quiet))
            continue
        before = draw(st.lists(st.builds(Text, words), max_size=1))
        uses = [ToolUse(call_id, "search", draw(json_objects())) for call_id in asked]
        outputs = [ToolResult(call_id, draw(words)) for call_id in asked]
        after = draw(st.lists(st.builds(Text, words), max_size=1))
        made += [Message("assistant", [*before, *uses]), Message("user", [*outputs, *after])]
    return made


# --- streams and steps --------------------------------------------------------------------------


@dataclass(frozen=True)
class StreamOp:
    """One call of a method of a step, as a plain value."""

    method: str
    args: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, step: Any) -> Any:
        """Make the call; what it returns (an awaitable, if the step is an async one)."""
        return getattr(step, self.method)(*self.args, **self.options)


def deltas(text: Strategy[str] | None = None) -> Strategy[StreamOp]:
    """Events that are legal at any place of an open stream."""
    words = text if text is not None else st.text(max_size=8)
    texts = st.builds(StreamOp, st.just("append_text"), st.tuples(words))
    thinking = st.builds(StreamOp, st.just("append_thinking"), st.tuples(words))
    signature = st.tuples(st.text(min_size=1, max_size=4))
    item = st.tuples(st.sampled_from(["openai", "anthropic"]), json_objects(max_leaves=2))
    return st.one_of(
        texts,
        thinking,
        st.builds(StreamOp, st.just("append_signature"), signature),
        st.builds(StreamOp, st.just("append_opaque"), item),
    )


def terminals() -> Strategy[StreamOp]:
    """The one event that ends a stream: done, or an error."""
    options = st.fixed_dictionaries(
        {}, optional={"stop_reason": st.sampled_from(["stop", "tool_use"]), "usage": json_objects()}
    )
    done = st.builds(StreamOp, st.just("append_done"), st.just(()), options)
    return done | st.builds(StreamOp, st.just("append_error"), st.tuples(st.text(max_size=8)))


@st.composite
def arguments(draw: st.DrawFn) -> list[str]:
    """The fragments of a call's arguments, cut anywhere; now and then they are no JSON object."""
    whole = json.dumps(draw(json_objects()), ensure_ascii=draw(st.booleans()))
    whole = draw(st.sampled_from([whole, whole, whole, "", whole[:-1], "[1]"]))
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=2)))
    edges = [0, *cuts, len(whole)]
    return [whole[a:b] for a, b in itertools.pairwise(edges)] if whole else []


@st.composite
def event_streams(
    draw: st.DrawFn,
    *,
    max_size: int = 8,
    calls: bool = True,
    call_ids: Sequence[str] = CALL_IDS,
    text: Strategy[str] | None = None,
    ends: bool | None = None,
    cut: bool = False,
) -> list[StreamOp]:
    """What one turn of a model streams: every list is legal for a new step, in its order.

    Fragments of parallel calls interleave. `ends` says whether it has its terminal event (None:
    either way); `cut` takes any number of events off its end, as a crash does.
    """
    events: list[StreamOp] = []
    fragments: dict[str, list[str]] = {}
    for _ in range(draw(st.integers(0, max_size))):
        fresh = [call_id for call_id in call_ids if calls and call_id not in fragments]
        unfinished = [call_id for call_id, left in fragments.items() if left]
        kinds = ["delta", *["call"] * bool(fresh), *["args"] * bool(unfinished)]
        kind = draw(st.sampled_from(kinds))
        if kind == "delta":
            events.append(draw(deltas(text)))
        elif kind == "call":
            call_id = draw(st.sampled_from(fresh))
            fragments[call_id] = draw(arguments())
            events.append(StreamOp("announce_call", (call_id, "search")))
        else:
            call_id = draw(st.sampled_from(unfinished))
            events.append(StreamOp("append_args", (call_id, fragments[call_id].pop(0))))
    for call_id, left in fragments.items():
        events += [StreamOp("append_args", (call_id, fragment)) for fragment in left]
    if ends if ends is not None else draw(st.booleans()):
        events.append(draw(terminals()))
    return events[: draw(st.integers(0, len(events)))] if cut else events


@dataclass(frozen=True)
class StepPlan:
    """A whole step: its stream, what is done with its calls once it is sealed, and how it ends."""

    events: tuple[StreamOp, ...]
    after: tuple[StreamOp, ...]
    ending: Ending

    def apply(self, step: Any) -> None:
        """Do all of it with a new step of a session; "leave" leaves it to recovery."""
        for op in (*self.events, *self.after):
            op.apply(step)
        if self.ending != "leave":
            getattr(step, self.ending)()


@st.composite
def steps(
    draw: st.DrawFn,
    *,
    endings: Sequence[Ending] = ("commit", "discard", "leave"),
    streams: Strategy[list[StreamOp]] | None = None,
) -> StepPlan:
    """A step from its first event to its end. One that is committed has all its calls answered."""
    events = draw(streams if streams is not None else event_streams())
    ending = draw(st.sampled_from(endings))
    after: list[StreamOp] = []
    if ending == "commit" or draw(st.booleans()):
        after.append(StreamOp("seal"))
        for call in draw(st.permutations(ready_calls(events))):
            answered = ending == "commit" or draw(st.booleans())
            if draw(st.booleans()):
                replay = draw(st.sampled_from(["never", "safe"]))
                after.append(StreamOp("start_call", (call.id,), {"replay": replay}))
            if answered:
                output, is_error = draw(st.text(max_size=8)), draw(st.booleans())
                after.append(StreamOp("record_result", (call.id, output), {"is_error": is_error}))
    return StepPlan(tuple(events), tuple(after), ending)


def status_of(events: Collection[StreamOp]) -> str:
    """How a step with these events ends: complete, errored or interrupted."""
    ends = {"append_done": "complete", "append_error": "errored"}
    return next((ends[op.method] for op in events if op.method in ends), "interrupted")


def ready_calls(events: Sequence[StreamOp]) -> list[ToolUse]:
    """The calls that a step with these events can run once it is sealed."""
    return [block for block in expected_blocks(events) if isinstance(block, ToolUse)]


def expected_blocks(events: Sequence[StreamOp]) -> list[Block]:
    """The blocks of the message that these events tell, read by the plainest road there is."""
    parts: list[list[Any]] = []  # kind, words (of a call: its id and name; of an item: itself)
    signatures: list[str] = []
    for op in events:
        last = parts[-1][0] if parts else ""
        match op.method:
            case "append_text" | "append_thinking":
                if last != op.method or signatures[-1]:
                    parts.append([op.method, ""])
                    signatures.append("")
                parts[-1][1] += op.args[0]
            case "append_signature":
                if last in ("", "append_opaque"):
                    parts.append(["append_thinking", ""])
                    signatures.append("")
                signatures[-1] += op.args[0]
            case "append_opaque" | "announce_call":
                parts.append([op.method, op.args])
                signatures.append("")
    complete = status_of(events) == "complete"
    found: list[Block] = []
    for (kind, told), signature in zip(parts, signatures, strict=True):
        if kind == "append_opaque":
            found.append(Opaque(*told))
        elif kind == "announce_call":
            pieces = [op.args[1] for op in events if _is_args_of(op, told[0])]
            raw = "".join(pieces)
            given = parse_arguments(raw) if raw else ({} if complete else None)
            if given is not None:
                call_id, name = told
                found.append(ToolUse(call_id, name, given, raw or None, signature or None))
        elif told or signature:
            block = Text if kind == "append_text" else Thinking
            found.append(block(told, signature or None))
    return found


def _is_args_of(op: StreamOp, call_id: str) -> bool:
    return op.method == "append_args" and op.args[0] == call_id


# --- faults and crashes -------------------------------------------------------------------------


@st.composite
def faults(
    draw: st.DrawFn, *, kinds: Sequence[FaultKind] | None = None, nth_max: int = 20
) -> dict[str, Any]:
    """Options for `FaultDisk.fail`: any fault there is, of these kinds of operations."""
    possible = sorted(key for key in _CODES if kinds is None or key[0] in kinds)
    kind, error = draw(st.sampled_from(possible))
    return {
        "kind": kind,
        "error": error,
        "nth": draw(st.integers(1, nth_max)),
        "times": draw(st.sampled_from([1, 2, None])),
        "lose_pages": kind == "sync" and draw(st.booleans()),
        "file": draw(st.sampled_from([None, "db", "wal"])),
    }


@dataclass(frozen=True)
class CrashPoint:
    """Where and how the world ends: options for `FaultDisk.image`."""

    at: int
    loss: Loss
    keep: Keep

    def image(self, disk: FaultDisk, into: Path) -> Path:
        """The files that this crash leaves, in the folder `into`."""
        return disk.image(self.at, into, loss=self.loss, keep=self.keep)


@st.composite
def crash_points(
    draw: st.DrawFn,
    ops: FaultDisk | Sequence[Op] | int,
    *,
    start: int = 0,
    losses: Sequence[Loss] = ("kill", "power"),
) -> CrashPoint:
    """A crash after any operation from `start` on of a disk, of its trace, or of so many.

    With the disk itself, single operations are dropped, kept and torn as well.  In a test that is
    run again and again, draw from the trace of one run: another may be a little longer.
    """
    trace = ops.ops if isinstance(ops, FaultDisk) else ops
    at = draw(st.integers(start, trace if isinstance(trace, int) else len(trace)))
    loss = draw(st.sampled_from(losses))
    if loss == "kill":
        return CrashPoint(at, loss, "none")
    ways: list[Keep] = ["none", "all", "torn", "random", "random:1", "random:2"]
    if isinstance(ops, FaultDisk):
        ways = ops.strategies(at)
    return CrashPoint(at, loss, draw(st.sampled_from(ways) | st.integers(0, 8)))
