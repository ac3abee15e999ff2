"""What goes into and comes out of the engine: plain rows, no messages and no policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class EventRow(NamedTuple):
    """One event of a step's stream, as stored; `valid` is the verdict of its crc."""

    seq: int
    kind: str
    call: int | None
    content: str | bytes
    valid: bool


class StepRow(NamedTuple):
    """One row of step_metadata."""

    step_id: int
    session: str | None
    kind: str
    owner: int
    model_name: str | None
    state: str
    nonce: str
    begun_us: int
    last_seq: int | None
    status: str | None
    stop_reason: str | None
    usage: str | None
    attempts: int
    problem: str | None


class CallRow(NamedTuple):
    """What is on record of a sealed call's execution."""

    position: int
    call_id: str
    name: str
    state: str
    replay: str | None
    started_us: int | None
    process_id: int | None
    process_started: str | None


class ResultRow(NamedTuple):
    """The answer to a call, as JSON; `valid` is the verdict of its crc."""

    position: int
    body: str
    valid: bool


class OwnerRow(NamedTuple):
    """Who opened the store."""

    owner_id: int
    pid: int
    host: str
    boot: str
    pid_space: str
    opened_us: int


class SessionRow(NamedTuple):
    """One session with its counters."""

    session_no: int
    session_id: str
    title: str | None
    provider: str | None
    model: str | None
    metadata: str
    created_us: int
    updated_us: int
    changed: int
    entries: int
    tokens: int
    summarized: int
    summaries: int
    last_status: str | None


class EntryRow(NamedTuple):
    """One message of history; `valid` is the verdict of its crc."""

    entry_id: int
    role: str
    body: str
    status: str
    created_us: int
    stream_step_id: int | None
    part: int | None
    model_name: str | None
    stop_reason: str | None
    usage: str | None
    metadata: str
    token_count: int | None
    counter: str | None
    summary_id: int | None
    valid: bool


class SummaryRow(NamedTuple):
    """What stands for the entries [start_id, end_id)."""

    summary_id: int
    start_id: int
    end_id: int
    content: str
    token_count: int
    original_tokens: int
    created_us: int
    generated_by: str
    valid: bool


@dataclass(frozen=True, slots=True)
class NewEntry:
    """A message on its way into history."""

    role: str
    body: str
    created_us: int
    status: str = "complete"
    stream_step_id: int | None = None
    part: int | None = None
    model_name: str | None = None
    stop_reason: str | None = None
    usage: str | None = None
    metadata: str = "{}"
    token_count: int | None = None
    counter: str | None = None
    summary_id: int | None = None  # of an imported entry: its summary comes with it


@dataclass(frozen=True, slots=True)
class NewSession:
    """A session on its way into the store."""

    session_id: str
    created_us: int
    title: str | None = None
    provider: str | None = None
    model: str | None = None
    metadata: str = "{}"


@dataclass(frozen=True, slots=True)
class SealedCall:
    """A call as sealing found it: `ready`, or `dropped`: its arguments are no JSON object."""

    position: int
    call_id: str
    name: str
    state: str


@dataclass(frozen=True, slots=True)
class Settlement:
    """One step on its way from the journal into history. No entries: the step had no content."""

    step_id: int
    owner: int
    entries: tuple[NewEntry, ...]
    status: str
    stop_reason: str | None = None
    usage: str | None = None
    problem: str | None = None  # what a step without entries leaves behind for people


class Counts(NamedTuple):
    """What the whole store holds."""

    sessions: int
    entries: int
    open_steps: int
    sealed_steps: int
    journal_events: int
    bytes: int
    wal_bytes: int
