"""What a crash left of a step, told without writing: three classes, and the state of each call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from holdfast.journal.blocks import ToolResult
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.journal.engine.rows import CallRow, StepRow
from holdfast.journal.processes import ToolProcess
from holdfast.journal.stream import Stream, StreamedCall, fold


class CallState(StrEnum):
    """How far a call came. Only what is on record counts."""

    ANNOUNCED = "announced"  # the stream named it; its arguments may be unfinished
    READY = "ready"  # sealed, and its arguments are a JSON object
    STARTED = "started"  # may have run: a crash here is in doubt
    ANSWERED = "answered"  # its result is on record


@dataclass(frozen=True, slots=True)
class RecoveredCall:
    """A call of an unfinished step. `input` is None while its arguments are no JSON object."""

    step_id: int
    session_id: str | None
    position: int
    call_id: str
    name: str
    input: dict[str, Any] | None
    raw_arguments: str
    operation_id: str
    state: CallState
    replay: str | None
    process: ToolProcess | None

    @property
    def id(self) -> str:
        """The provider's label, by the name it has in a message."""
        return self.call_id


@dataclass(frozen=True, slots=True)
class RecoveredStep:
    """What all three classes say. `gap_at`: the first event that is missing or damaged."""

    step_id: int
    session_id: str | None
    model_name: str | None
    partial_text: str
    last_seq: int
    gap_at: int | None
    calls: tuple[RecoveredCall, ...]
    unknown_kinds: tuple[str, ...] = ()  # events of a newer version: kept out, and reported


@dataclass(frozen=True, slots=True)
class Complete(RecoveredStep):
    """The stream has its done event, or was sealed."""


@dataclass(frozen=True, slots=True)
class Errored(RecoveredStep):
    """The stream has its error event."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class Incomplete(RecoveredStep):
    """The stream was cut off."""


RecoveredStream = Complete | Errored | Incomplete


@dataclass(frozen=True, slots=True)
class Leftover:
    """Everything on record of an unfinished step."""

    row: StepRow
    stream: Stream
    calls: tuple[RecoveredCall, ...]
    results: dict[int, ToolResult]
    damaged_results: tuple[int, ...]  # positions whose result is on record but cannot be trusted
    lost_calls: tuple[CallRow, ...] = ()  # on record as sealed, but their events are behind a gap
    damaged_bodies: tuple[str, ...] = ()  # of those results, as they stand, for people


def operation_id(nonce: str, position: int) -> str:
    """An idempotency key: stable across crashes, unique for ever."""
    return f"{nonce}-{position}"


def read_leftover(engine: SqliteEngine, row: StepRow, *, stream: Stream | None = None) -> Leftover:
    """Read a step back from the journal; `stream` is what whoever sealed it has just read."""
    stream = stream or fold(engine.events(row.step_id))
    if row.last_seq is not None and stream.gap_at is None and stream.last_seq < row.last_seq:
        stream.gap_at = stream.last_seq + 1  # Sealed with more events than are there now.
    if row.state == "sealed" and stream.gap_at is None and row.status is not None:
        stream.status = row.status
    results: dict[int, ToolResult] = {}
    damaged: list[int] = []
    bodies: list[str] = []
    records: dict[int, CallRow] = {}
    if stream.calls or stream.gap_at is not None:
        records = {record.position: record for record in engine.calls(row.step_id)}
        for result in engine.results(row.step_id):
            if result.valid:
                results[result.position] = ToolResult.model_validate(json.loads(result.body))
            else:
                damaged.append(result.position)
                bodies.append(result.body)
    # A batch has no event that says done: no arguments so far means that the call takes none.
    done = stream.status == "complete" or (row.kind == "batch" and stream.gap_at is None)
    calls = tuple(
        _recovered_call(
            row,
            call,
            records.get(call.position),
            state=_state(records.get(call.position), call.position, results, damaged),
            done=done,
        )
        for call in stream.calls
    )
    told = {call.position for call in stream.calls}
    lost = tuple(record for at, record in records.items() if at not in told)
    return Leftover(row, stream, calls, results, tuple(damaged), lost, tuple(bodies))


def _state(
    record: CallRow | None, position: int, results: Mapping[int, ToolResult], damaged: Sequence[int]
) -> CallState:
    if position in results:
        return CallState.ANSWERED
    if position in damaged:
        return CallState.STARTED  # It has run, and what it answered can no longer be read.
    if record is None or record.state == "dropped":
        return CallState.ANNOUNCED
    return CallState.STARTED if record.state == "started" else CallState.READY


def _recovered_call(
    row: StepRow, call: StreamedCall, record: CallRow | None, *, state: CallState, done: bool
) -> RecoveredCall:
    process = None
    if record is not None and record.process_id is not None:
        process = ToolProcess(record.process_id, record.process_started or "")
    return RecoveredCall(
        step_id=row.step_id,
        session_id=row.session,
        position=call.position,
        call_id=call.call_id,
        name=call.name,
        input=call.parse(done=done),
        raw_arguments=call.raw_arguments,
        operation_id=operation_id(row.nonce, call.position),
        state=state,
        replay=None if record is None else record.replay,
        process=process,
    )


def classify(leftover: Leftover, *, sealed_is_complete: bool = False) -> RecoveredStream:
    """Which of the three classes an unfinished step is of."""
    row, stream = leftover.row, leftover.stream
    status = stream.status
    if sealed_is_complete and row.state == "sealed":
        status = "complete"
    facts = (
        row.step_id,
        row.session,
        row.model_name,
        stream.text,
        stream.last_seq,
        stream.gap_at,
        leftover.calls,
        stream.unknown_kinds,
    )
    match status:
        case "complete":
            return Complete(*facts)
        case "errored":
            return Errored(*facts, error=stream.error or "")
        case _:
            return Incomplete(*facts)
