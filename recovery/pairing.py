"""Calls and their outputs: every call has exactly one, where providers want it.

A list of messages is *valid* if and only if, for every message with calls, the very next message is
one of the user, it begins with one output for each of these calls, in call order, and no output
stands anywhere else. Every provider accepts that form and no other.

Calls and outputs are paired by position, never by a set of ids, since many models count their ids
from zero again in every turn: an output answers the earliest call with its id that stands before it
and is still open. Where outputs are too few for that, one that stands in place (nothing but outputs
between the message of a call and it) stays with its call, and the call that was left open earlier
counts as missing: no call goes without an output that stands in its place. An output that finds
no open call is an orphan, and so is the second output of a call. All functions are pure, take time
in proportion to the list, and give the same bytes for the same input.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

from holdfast.journal.messages import Block, Message, OutputStatus, ToolResult, ToolUse
from holdfast.recovery.validation import (
    CANCELED_TEXT,
    IN_DOUBT_SAFE_TEXT,
    IN_DOUBT_TEXT,
    NOT_STARTED_TEXT,
    MissingOutput,
    PairingSettings,
    ValidationReport,
)

__all__ = [
    "CANCELED_TEXT",
    "IN_DOUBT_SAFE_TEXT",
    "IN_DOUBT_TEXT",
    "NOT_STARTED_TEXT",
    "MissingOutput",
    "PairingSettings",
    "ValidationReport",
    "enforce_invariants",
    "ensure_call_outputs_present",
    "normalize",
    "recover_from_crash",
    "remove_orphan_outputs",
    "synthetic_output",
    "trim",
    "validate",
]

logger = logging.getLogger("holdfast")
DEFAULT_SETTINGS = PairingSettings()


def validate(messages: Sequence[Message], *, pending: Collection[str] = ()) -> ValidationReport:
    """Say what is wrong and change nothing. A call whose id is in `pending` may lack its output."""
    return _repair(messages, pending).report()


def normalize(messages: Sequence[Message], *, pending: Collection[str] = ()) -> list[Message]:
    """The valid list nearest to this one.

    Late outputs move to their calls with their content unchanged, missing ones are made, orphans
    go, and so does a message that is empty then: its metadata goes where its first output went, as
    far as the keys are free there. All else keeps its order; a valid list comes back equal. Calls
    whose ids are in `pending` are known to be running: no output is made for them.
    """
    repair = _repair(messages, pending)
    _warn(repair.report())
    return repair.messages


def ensure_call_outputs_present(
    messages: Sequence[Message], *, pending: Collection[str] = ()
) -> list[Message]:
    """As `normalize`, but an output that stands before any call with its id stays where it is.

    Second outputs of a call go here too: left behind, one of them could become the first.
    """
    repair = _repair(messages, pending, keep_strangers=True)
    _warn(repair.report())
    return repair.messages


def remove_orphan_outputs(messages: Sequence[Message]) -> list[Message]:
    """Drop outputs that answer nothing, and messages that are empty then; touch nothing else."""
    kept, orphans = _without_orphans(messages)
    _warn(ValidationReport(orphan_outputs=orphans))
    return kept


def recover_from_crash(
    messages: Sequence[Message],
    *,
    pending: Collection[str] = (),
    settings: PairingSettings = DEFAULT_SETTINGS,
) -> list[Message]:
    """Repair a history that was just loaded, unless the settings say to leave it."""
    return _by_settings(messages, pending, repair=settings.auto_recover, warn=settings.warn)


def enforce_invariants(
    messages: Sequence[Message],
    *,
    pending: Collection[str] = (),
    settings: PairingSettings = DEFAULT_SETTINGS,
) -> list[Message]:
    """Repair a living history, if the settings say so."""
    return _by_settings(messages, pending, repair=settings.enforce, warn=settings.warn)


def trim(messages: Sequence[Message], keep: int, *, pending: Collection[str] = ()) -> list[Message]:
    """At most the last `keep` messages of the normalized list, again valid.

    A pair is never split: where the cut falls between calls and their outputs, the outputs go too,
    and whatever else stands in their message stays. The oldest go first, a system prompt among
    them: hold yours apart if it must stay.
    """
    if keep < 0:
        raise ValueError(f"keep must not be negative: {keep}")
    whole = normalize(messages, pending=pending)
    # Not [-keep:], which would be everything for 0.
    kept, _ = _without_orphans(whole[max(0, len(whole) - keep) :])
    return kept


def synthetic_output(call_id: str, text: str = CANCELED_TEXT) -> ToolResult:
    """The output of a call that was canceled: an error, and marked as nothing a tool ever said."""
    return ToolResult(call_id, text, True, OutputStatus.CANCELED, "canceled")


_Place = tuple[int, int]  # (index of a message, index of a block in it)


@dataclass(slots=True)
class _Owed:
    """An output that must stand directly after the message just written, and where it stood."""

    output: ToolResult
    source: _Place | None  # None: made by us


@dataclass(slots=True)
class _Repair:
    messages: list[Message] = field(default_factory=list)
    missing: list[MissingOutput] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    misplaced: list[tuple[_Place, str]] = field(default_factory=list)
    moved: dict[_Place, int] = field(default_factory=dict)  # from there to that message of ours

    def answer(self, owed: list[_Owed]) -> None:
        """The next message to be written begins with these."""
        self.moved |= {item.source: len(self.messages) for item in owed if item.source}

    def insert(self, owed: list[_Owed]) -> None:
        """Write a message for outputs that find none to stand in."""
        if owed:
            self.misplaced += _misplaced(owed)
            self.answer(owed)
            self.messages.append(Message("user", [item.output for item in owed]))

    def report(self) -> ValidationReport:
        in_order = tuple(call_id for _, call_id in sorted(self.misplaced))
        return ValidationReport(tuple(self.missing), tuple(self.orphans), in_order)


def _pair(messages: Sequence[Message]) -> tuple[dict[_Place, _Place], dict[_Place, bool]]:
    """For each answered call the place of its output; for each orphan whether it is a stranger.

    A stranger stands before any call with its id; other orphans are second outputs.
    """
    own_call, late = _in_place(messages)
    sure_of_one = set(own_call.values())
    # For each id what the calls that are open now can hope for: all late outputs still to come,
    # and those in place for one of them. Later calls have those in their own place.
    hopes = late
    open_calls: defaultdict[str, OrderedDict[_Place, None]] = defaultdict(OrderedDict)
    answers: dict[_Place, _Place] = {}
    orphans: dict[_Place, bool] = {}
    for i, message in enumerate(messages):
        for k, block in enumerate(message.content):
            if isinstance(block, ToolUse):
                open_calls[block.id][i, k] = None
                hopes[block.id] += (i, k) in sure_of_one
            elif isinstance(block, ToolResult):
                waiting = open_calls.get(block.tool_use_id)
                own = own_call.get((i, k))
                if not waiting:
                    orphans[i, k] = waiting is None
                elif own is not None and own in waiting and hopes[block.tool_use_id] < len(waiting):
                    del waiting[own]
                    answers[own] = (i, k)
                else:
                    answers[waiting.popitem(last=False)[0]] = (i, k)
                hopes[block.tool_use_id] -= 1
    return answers, orphans


def _in_place(messages: Sequence[Message]) -> tuple[dict[_Place, _Place], Counter[str]]:
    """For each output in place its call; how many others there are, by id.

    A message of nothing but outputs does not end the place: some write one for each output.
    """
    own_call: dict[_Place, _Place] = {}
    late: Counter[str] = Counter()
    asked: dict[str, deque[_Place]] = {}  # by the last message that was more than outputs
    for i, message in enumerate(messages):
        asks: defaultdict[str, deque[_Place]] = defaultdict(deque)
        only_outputs = True
        for k, block in enumerate(message.content):
            if isinstance(block, ToolResult):
                if message.role == "user" and asked.get(block.tool_use_id):
                    own_call[i, k] = asked[block.tool_use_id].popleft()
                else:
                    late[block.tool_use_id] += 1
                continue
            only_outputs = False
            if isinstance(block, ToolUse):
                asks[block.id].append((i, k))
        if not only_outputs:
            asked = asks
    return own_call, late


def _repair(
    messages: Sequence[Message], pending: Collection[str], *, keep_strangers: bool = False
) -> _Repair:
    """The normalized list, and what was wrong: one pass decides both, so they cannot disagree."""
    answers, orphans = _pair(messages)
    running = frozenset(pending)
    repair = _Repair()
    owed: list[_Owed] = []
    emptied: list[int] = []
    for i, message in enumerate(messages):
        rest: list[Block] = []
        for k, block in enumerate(message.content):
            if not isinstance(block, ToolResult) or (keep_strangers and orphans.get((i, k))):
                rest.append(block)
            elif (i, k) in orphans:
                repair.orphans.append(block.tool_use_id)
        if owed and message.role == "user":
            repair.misplaced += _misplaced(owed, i, message)
            repair.answer(owed)
            rest = [*(item.output for item in owed), *rest]
        elif not rest:
            # It held nothing but outputs that belong elsewhere. What is owed stays owed.
            emptied.append(i)
            continue
        else:
            repair.insert(owed)
        repair.messages.append(_with_content(message, rest))
        owed = _owed_for(i, messages, answers, running, repair.missing)
    repair.insert(owed)
    _hand_over_metadata(messages, emptied, repair)
    return repair


def _hand_over_metadata(messages: Sequence[Message], emptied: list[int], repair: _Repair) -> None:
    """What was noted on a message that is gone is noted where its first output went."""
    gained: dict[int, dict[str, Any]] = {}
    for i in emptied:
        places = ((i, k) for k in range(len(messages[i].content)))
        target = next((repair.moved[place] for place in places if place in repair.moved), None)
        if target is not None and messages[i].metadata:
            notes = gained.setdefault(target, dict(repair.messages[target].metadata))
            for key, value in messages[i].metadata.items():
                notes.setdefault(key, value)
    for target, notes in gained.items():
        message = repair.messages[target]
        repair.messages[target] = message.model_copy(update={"metadata": notes})


def _owed_for(
    index: int,
    messages: Sequence[Message],
    answers: dict[_Place, _Place],
    running: frozenset[str],
    missing: list[MissingOutput],
) -> list[_Owed]:
    """The outputs of one message's calls, in call order; those made here are noted in `missing`."""
    owed: list[_Owed] = []
    for k, call in enumerate(messages[index].content):
        if not isinstance(call, ToolUse):
            continue
        source = answers.get((index, k))
        if source is not None:
            output = messages[source[0]].content[source[1]]
            assert isinstance(output, ToolResult)
            owed.append(_Owed(output, source))
        elif call.id not in running:
            missing.append(MissingOutput(call.id, call.name, index))
            owed.append(_Owed(synthetic_output(call.id), None))
    return owed


def _misplaced(
    owed: list[_Owed], index: int | None = None, message: Message | None = None
) -> list[tuple[_Place, str]]:
    """Those of the owed outputs that do not yet stand at the head of this message in this order."""
    here = [item.source for item in owed if item.source and item.source[0] == index]
    in_place: set[_Place] = set()
    if message is not None and index is not None and here:
        own = set(here)
        staying = [
            (index, k)
            for k, block in enumerate(message.content)
            if not isinstance(block, ToolResult) or (index, k) in own
        ]
        in_place = {
            is_at for is_at, belongs_at in zip(staying, here, strict=False) if is_at == belongs_at
        }
    return [
        (item.source, item.output.tool_use_id)
        for item in owed
        if item.source and item.source not in in_place
    ]


def _without_orphans(messages: Sequence[Message]) -> tuple[list[Message], tuple[str, ...]]:
    _, orphans = _pair(messages)
    kept: list[Message] = []
    dropped: list[str] = []
    for i, message in enumerate(messages):
        content = [block for k, block in enumerate(message.content) if (i, k) not in orphans]
        dropped += [
            result.tool_use_id
            for k, result in enumerate(message.content)
            if isinstance(result, ToolResult) and (i, k) in orphans
        ]
        if content:
            kept.append(_with_content(message, content))
    return kept, tuple(dropped)


def _with_content(message: Message, content: list[Block]) -> Message:
    """The same message, or a copy with these blocks, which were checked when they were built."""
    if len(content) == len(message.content) and all(map(is_, content, message.content)):
        return message
    return message.model_copy(update={"content": content})


def _by_settings(
    messages: Sequence[Message], pending: Collection[str], *, repair: bool, warn: bool
) -> list[Message]:
    repaired = _repair(messages, pending)
    if warn:
        _warn(repaired.report(), repaired=repair)
    return repaired.messages if repair else list(messages)


def _warn(report: ValidationReport, *, repaired: bool = True) -> None:
    """Ids, names and places only: a log is no place for a transcript."""
    made, gone = ("one was made", "removed") if repaired else ("left so", "left there")
    for call in report.missing_outputs:
        logger.warning(
            "message %d: call %r of tool %r has no output: %s",
            call.index,
            call.call_id,
            call.tool_name,
            made,
        )
    for call_id in report.orphan_outputs:
        logger.warning("output for %r answers no open call: %s", call_id, gone)
