"""Settle: the one path from the journal into history, for a clean finish and for a crash alike.

INVARIANT  After `settle` a step stands in history with exactly one result for each of its calls, or
           is gone, and the journal holds nothing of it: one transaction, so there is no in between.

A clean finish settles a step whose calls are all answered.  Recovery, and a `with` block that was
left early, first answer what has no answer:

    on record of the call      answer                                 told as
    arguments no JSON object   none: left out, fragment in metadata   dropped
    a result                   that result                            -
    never started              synthetic: safe to run again           canceled
    started, no sound result   the resolver's, if it knows            resolved
                               else synthetic: may have taken effect  in_doubt

What the entry's message cannot hold (fragments, words behind a gap, a result whose call is damaged)
goes into the entry's metadata; a step without an entry keeps it in its row of `step_metadata`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from holdfast.history.entries import new_entry
from holdfast.journal.blocks import OutputStatus, ToolResult
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.journal.engine.rows import NewEntry, Settlement, StepRow
from holdfast.journal.engine.steps import now_us
from holdfast.journal.messages import Message, text_to_json
from holdfast.journal.observers import StoreEvent
from holdfast.journal.processes import ToolProcess
from holdfast.journal.recovered import CallState, Leftover, RecoveredCall
from holdfast.recovery.policy import RecoveryPolicy, Resolver

log = logging.getLogger("holdfast")

Outcome = Literal["complete", "errored", "interrupted", "discarded", "empty", "quarantined"]
Count = Callable[[Message], tuple[int | None, str | None]]


@dataclass(frozen=True, slots=True)
class SettledStep:
    """What became of one step. The tuples of texts hold call ids, `errors` are for people."""

    step_id: int
    session_id: str
    outcome: Outcome
    entry_ids: tuple[int, ...] = ()
    canceled: tuple[str, ...] = ()
    in_doubt: tuple[str, ...] = ()
    resolved: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    orphans: tuple[ToolProcess, ...] = ()
    errors: tuple[str, ...] = ()


@dataclass(slots=True)
class Answers:
    """The results of a step's calls in call order, and how each was come by."""

    results: list[ToolResult] = field(default_factory=list)
    canceled: list[str] = field(default_factory=list)
    in_doubt: list[str] = field(default_factory=list)
    resolved: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    orphans: list[ToolProcess] = field(default_factory=list)
    strays: list[ToolResult] = field(default_factory=list)  # their calls cannot be in the message
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step ready to be settled; `entries` is empty if it had no content."""

    row: StepRow
    status: str
    answers: Answers
    entries: tuple[NewEntry, ...] = ()
    stop_reason: str | None = None
    usage: str | None = None
    problem: str | None = None
    discard: bool = False

    @property
    def size(self) -> int:
        """Roughly how much memory it holds."""
        return 2000 + sum(len(entry.body) + len(entry.metadata) for entry in self.entries)


def answer_calls(
    leftover: Leftover, policy: RecoveryPolicy, resolver: Resolver | None = None
) -> Answers:
    """Give every call that is in the message exactly one result. Call outside any transaction."""
    answers = Answers()
    for call in leftover.calls:
        result = leftover.results.get(call.position)
        if result is None and call.process is not None and call.process.is_running:
            _tell_orphan(call, call.process, policy, answers)
        if call.position in leftover.damaged_results:
            answers.errors.append(f"{_place(call)}: the crc of its result does not match")
        if call.input is None:
            answers.dropped.append(call.call_id)
            _report_lost(answers, _place(call), call.call_id, call.state, result)
        elif result is not None:
            answers.results.append(result)
        elif call.state is CallState.STARTED:
            _settle_doubt(call, policy, resolver, answers)
        else:
            canceled = _synthetic(call, policy.canceled_text, OutputStatus.CANCELED, "canceled")
            answers.results.append(canceled)
            answers.canceled.append(call.call_id)
    for lost in leftover.lost_calls:
        result = leftover.results.get(lost.position)
        state = lost.state if result is None else CallState.ANSWERED
        place = f"step {leftover.row.step_id}, call {lost.call_id!r}"
        _report_lost(answers, place, lost.call_id, state, result)
    return answers


def _settle_doubt(
    call: RecoveredCall, policy: RecoveryPolicy, resolver: Resolver | None, answers: Answers
) -> None:
    known = None if resolver is None else _ask(resolver, call, answers)
    if known is not None:
        answers.results.append(known)
        answers.resolved.append(call.call_id)
        return
    text = policy.in_doubt_safe_text if call.replay == "safe" else policy.in_doubt_text
    answers.results.append(_synthetic(call, text, OutputStatus.FAILED, "in_doubt"))
    answers.in_doubt.append(call.call_id)


def _ask(resolver: Resolver, call: RecoveredCall, answers: Answers) -> ToolResult | None:
    """The resolver's answer as it will be stored; whatever is wrong with it stops nothing."""
    try:
        known = resolver(call)
        if known is None:
            return None
        if not isinstance(known, ToolResult):
            raise TypeError(f"a resolver gives a ToolResult or None, not {type(known).__name__}")
        facts = {"tool_use_id": call.call_id, "synthetic": "resolved"}
        return ToolResult.model_validate({**known.model_dump(warnings=False), **facts})
    except Exception as error:
        answers.errors.append(f"{_place(call)}: the resolver failed: {error!r}")
        return None


def _report_lost(
    answers: Answers, place: str, call_id: str, state: str, result: ToolResult | None
) -> None:
    """A call that ran, or may have, is reported even where the message cannot hold it."""
    if result is not None:
        answers.strays.append(result)
    if state in (CallState.STARTED, CallState.ANSWERED):
        answers.errors.append(
            f"{place}: it was {state}, and events of it are damaged or gone; it is left out of"
            " the message"
        )
    if state == CallState.STARTED:
        answers.in_doubt.append(call_id)


def _synthetic(
    call: RecoveredCall, text: str, status: OutputStatus, why: Literal["canceled", "in_doubt"]
) -> ToolResult:
    return ToolResult(call.call_id, text, is_error=True, status=status, synthetic=why)


def _tell_orphan(
    call: RecoveredCall, process: ToolProcess, policy: RecoveryPolicy, answers: Answers
) -> None:
    log.warning("step %d: process %d still runs call %r", call.step_id, process.pid, call.call_id)
    answers.orphans.append(process)
    if policy.orphan_hook is not None:
        try:
            policy.orphan_hook(call)
        except Exception as error:
            answers.errors.append(f"{_place(call)}: the orphan_hook failed: {error!r}")


def _place(call: RecoveredCall) -> str:
    return f"step {call.step_id}, call {call.call_id!r}"


def prepare(
    leftover: Leftover,
    answers: Answers,
    *,
    policy: RecoveryPolicy,
    provider: str | None = None,
    count: Count | None = None,
    notes: dict[str, Any] | None = None,
) -> Prepared:
    """Make a step's entries: what the assistant said, and one message with all results."""
    row, stream = leftover.row, leftover.stream
    _report_damage(leftover, answers)
    if policy.discards(stream.status):
        return Prepared(row, stream.status, answers, discard=True)
    metadata = _notes(leftover, answers, notes or {})
    usage = None if stream.usage is None else json.dumps(stream.usage)
    facts: dict[str, Any] = {
        "status": stream.status,
        "stream_step_id": row.step_id,
        "model_name": row.model_name,
        "created_us": now_us(),
    }
    ending: dict[str, Any] = {
        "part": 0,
        "stop_reason": stream.stop_reason,
        "usage": usage,
        "metadata": metadata,
    }
    settled = partial(
        Prepared, row, stream.status, answers, stop_reason=stream.stop_reason, usage=usage
    )
    if count is None and stream.is_plain_text and (text := stream.text):
        body = text_to_json("assistant", text)  # Thousands of these are most of a long pass.
        return settled(entries=(NewEntry("assistant", body, **ending, **facts),))
    message = stream.message(model=row.model_name, provider=provider)
    if message is None:
        return settled(problem=None if metadata == "{}" else metadata)
    tokens, counter = count(message) if count else (None, None)
    entries = [new_entry(message, token_count=tokens, counter=counter, **ending, **facts)]
    if answers.results:
        outputs = Message("user", answers.results)
        tokens, counter = count(outputs) if count else (None, None)
        entries.append(new_entry(outputs, part=1, token_count=tokens, counter=counter, **facts))
    return settled(entries=tuple(entries))


def _report_damage(leftover: Leftover, answers: Answers) -> None:
    stream, step_id = leftover.stream, leftover.row.step_id
    if stream.gap_at is not None:
        answers.errors.append(
            f"step {step_id}: event {stream.gap_at} is missing or damaged; what stands behind it is"
            " kept in the metadata only"
        )
    if stream.unknown_kinds:
        kinds = ", ".join(stream.unknown_kinds)
        answers.errors.append(f"step {step_id}: events of unknown kinds were left out: {kinds}")


def _notes(leftover: Leftover, answers: Answers, notes: dict[str, Any]) -> str:
    """For people: what the message itself does not hold, as JSON."""
    stream = leftover.stream
    if not (notes or stream.error or leftover.calls or leftover.lost_calls or answers.errors):
        return "{}"
    found = {
        **notes,
        "error": stream.error,
        "dropped_calls": [
            {"call_id": call.call_id, "name": call.name, "raw_arguments": call.raw_arguments}
            for call in leftover.calls
            if call.input is None
        ],
        "lost_calls": [
            {"call_id": call.call_id, "name": call.name, "state": call.state}
            for call in leftover.lost_calls
        ],
        "lost_results": [result.model_dump(mode="json") for result in answers.strays],
        "damaged_results": list(leftover.damaged_bodies),
        "gap_at": stream.gap_at,
        "behind_gap": stream.behind_gap,
        "unknown_kinds": list(stream.unknown_kinds),
        "errors": answers.errors,
    }
    return json.dumps({key: value for key, value in found.items() if value}, ensure_ascii=False)


def settle_prepared(engine: SqliteEngine, steps: Sequence[Prepared]) -> list[SettledStep]:
    """Move prepared steps into history in one transaction, and forget those to be discarded.

    A step that is no longer ours is left out of the answer: whoever has it answers for it.
    """
    ids = _settle_kept(engine, [step for step in steps if not step.discard])
    unwanted = [step.row.step_id for step in steps if step.discard]
    if unwanted:
        ids.update((step_id, []) for step_id in engine.discard_many(unwanted))
    settled = []
    for step in steps:
        entry_ids = ids.get(step.row.step_id)
        if entry_ids is not None:
            settled.append(_settled(step, tuple(entry_ids)))
            _tell(engine, step, settled[-1])
    return settled


def _settle_kept(engine: SqliteEngine, steps: Sequence[Prepared]) -> dict[int, list[int] | None]:
    if not steps:
        return {}
    settlements = [
        Settlement(
            step_id=step.row.step_id,
            owner=engine.owner_id,
            entries=step.entries,
            status=step.status,
            stop_reason=step.stop_reason,
            usage=step.usage,
            problem=step.problem,
        )
        for step in steps
    ]
    return {
        step.row.step_id: ids for step, ids in zip(steps, engine.settle(settlements), strict=True)
    }


def _settled(step: Prepared, entry_ids: tuple[int, ...]) -> SettledStep:
    answers, outcome = step.answers, step.status
    if step.discard:
        outcome = "discarded"
    elif not step.entries:
        outcome = "empty"
    return SettledStep(
        step.row.step_id,
        step.row.session or "",
        outcome,  # type: ignore[arg-type]  # A status is one of three outcomes.
        entry_ids,
        tuple(answers.canceled),
        tuple(answers.in_doubt),
        tuple(answers.resolved),
        tuple(answers.dropped),
        tuple(answers.orphans),
        tuple(answers.errors),
    )


def _tell(engine: SqliteEngine, step: Prepared, settled: SettledStep) -> None:
    """Log and count what is now on record: never a word of the transcript."""
    synthetic, strays = [], step.answers.strays
    if step.entries:
        synthetic = [
            result
            for result in step.answers.results
            if result.synthetic in ("canceled", "in_doubt")
        ]
    for result in synthetic:
        log.warning(
            "step %d: call %r has a synthetic output: %s",
            settled.step_id,
            result.tool_use_id,
            result.synthetic,
        )
    for result in strays:
        log.warning(
            "step %d: output of call %r is an orphan: its call is damaged",
            settled.step_id,
            result.tool_use_id,
        )
    if engine.observer is None:
        return
    place = (settled.step_id, None, settled.session_id)
    kind = "discard" if step.discard else "commit"
    engine.observer(StoreEvent(kind, *place, data=settled.entry_ids))
    if synthetic:
        engine.observer(StoreEvent("synthetic_output", *place, count=len(synthetic)))
    if strays:
        engine.observer(StoreEvent("orphan_output", *place, count=len(strays)))
