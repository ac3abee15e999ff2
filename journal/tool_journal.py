"""The tool journal: what was asked for, whether it was started, what came back.

INVARIANT  A tool runs only after its start is on record, and a result that was recorded is never
           replaced.  So after any crash a call is in one of four states, and only one of them,
           started without a result, is in doubt.

A session's step uses it once the step is sealed; users can have it alone, with batches that begin,
are answered and committed by themselves ("bring your own history").
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.journal.blocks import ToolResult, ToolUse
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.journal.engine.schema import SEQ_MASK
from holdfast.journal.errors import (
    CallNotReady,
    DuplicateCall,
    InvalidArgument,
    InvalidMessage,
    StepBusy,
    StepClosed,
)
from holdfast.journal.jsontext import clean_text, parse_arguments
from holdfast.journal.recovered import (
    CallState,
    Leftover,
    RecoveredCall,
    read_leftover,
)
from holdfast.journal.standalone import StandaloneJournal
from holdfast.journal.stream import ARGS, CALL, Stream, StreamedCall, fold
from holdfast.journal.tool_calls import CallRecorder
from holdfast.journal.writer import CallBook, JournaledCall, StepWriter


@dataclass(frozen=True, slots=True)
class RecoveredToolBatch:
    """A batch that a crash has left. A call with `input=None` must never be run."""

    batch_id: int
    model_name: str | None
    assistant_text: str
    calls: tuple[RecoveredCall, ...]
    results: tuple[ToolResult, ...]


class ToolBatch(StepWriter):
    """One batch of a ToolJournal on its own: its arguments stream into the same log."""

    def __init__(
        self, engine: SqliteEngine, step_id: int, book: CallBook, *, last_seq: int
    ) -> None:
        super().__init__(engine, step_id, book, last_seq=last_seq)
        self._read: Stream | None = None

    @classmethod
    def of(cls, engine: SqliteEngine, leftover: Leftover) -> ToolBatch:
        """Go on with what somebody left."""
        stream = leftover.stream
        batch = cls(engine, leftover.row.step_id, CallBook.of(leftover), last_seq=stream.last_seq)
        if stream.gap_at is not None:
            # An event in the gap's place would make those behind it look sound again.
            batch._close(f"event {stream.gap_at} is damaged or gone")
        return batch

    def arguments(self, call: JournaledCall) -> dict[str, Any] | None:
        """The arguments that are on record, or None if they are no JSON object."""
        self._resolve_doubt()
        if self._read is None or self._read.last_seq != self._seq:
            self._read = fold(self._engine.events(self._step_id))
        for streamed in self._read.calls:
            if streamed.position == call.position:
                call.streamed = streamed
        return call.streamed.parse(done=True)


class ToolJournal(StandaloneJournal):
    """Batches of tool calls, each crash-safe by itself."""

    def __init__(self, engine: SqliteEngine) -> None:
        super().__init__(engine)
        self._calls = CallRecorder(engine)
        self._batches: dict[int, ToolBatch] = {}
        self._beginning: str | None = None  # nonce of a batch whose id was not given to anyone
        self._ending: int | None = None  # a batch whose end was begun, its caller not told of it

    # --- batches --------------------------------------------------------------------------------

    def begin_batch(
        self, model_name: str | None, assistant_text: str, calls: Sequence[ToolUse]
    ) -> int:
        """Record a batch whose calls are all known; they are ready when this returns."""
        book = CallBook(secrets.token_hex(8))
        announce: list[tuple[str, int, str]] = []
        for position, call in enumerate(calls):
            if call.id in book.calls:
                raise DuplicateCall(
                    self._engine.name, 0, call.id, "stands twice in this batch; nothing was written"
                )
            streamed = StreamedCall(position, call.id, call.name, [_raw_arguments(call)])
            book.calls[call.id] = JournaledCall(streamed, CallState.READY)
            announce.append((CALL, position, json.dumps([call.id, call.name])))
            announce.append((ARGS, position, streamed.raw_arguments))
        begun = None
        try:
            with self._engine.lock:
                self._engine.admit()
                self._forget_interrupted_begin()
                self._beginning = begun = book.nonce
                batch_id = self._engine.begin_batch(
                    model_name=checked_text("model_name", model_name),
                    nonce=book.nonce,
                    assistant_text=checked_text("assistant_text", assistant_text) or "",
                    announce=announce,
                    calls=[call.sealed for call in book.calls.values()],
                )
                self._batches[batch_id] = ToolBatch(
                    self._engine, batch_id, book, last_seq=len(announce)
                )
                self._beginning = None
        except BaseException:
            # Its caller has no id and will begin it again: two batches would run the calls twice.
            if begun is not None:
                self._beginning = begun
            raise
        return batch_id

    def begin_streaming_batch(self, model_name: str | None) -> int:
        """Record a batch whose calls are still to come."""
        return self.begin_batch(model_name, "", [])

    def record_call_start(self, batch_id: int, seq: int, call_id: str, name: str) -> None:
        """The model has named a call; `seq` is its place among the calls of the batch."""
        if not isinstance(seq, int) or isinstance(seq, bool) or not 0 <= seq <= SEQ_MASK:
            raise InvalidArgument(f"seq is {seq!r}, expected 0, 1, 2 ...; nothing was written")
        with self._engine.lock:
            batch = self._batch(batch_id)
            batch._resolve_doubt()
            known = batch._book.get(call_id)
            for call in batch._book.calls.values():
                if call.position == seq and call is not known:
                    raise InvalidArgument(
                        f"batch {batch_id}: seq {seq} of call {call_id!r} is that of call"
                        f" {call.streamed.call_id!r}; nothing was written"
                    )
        batch._announce(call_id, name, seq)

    def append_call_args(self, batch_id: int, call_id: str, delta: str) -> None:
        """A piece of a call's arguments; it may be cut anywhere, inside an escape too."""
        with self._engine.lock:
            batch = self._batch(batch_id)
            call = batch._book.get(call_id)
            if call is not None and call.state is not CallState.ANNOUNCED:
                raise CallNotReady(
                    self._engine.name,
                    batch_id,
                    call_id,
                    f"is {call.state}, so its arguments are fixed; nothing was written",
                )
        batch._append_args(call_id, delta)

    def update_assistant_text(self, batch_id: int, text: str) -> None:
        """Replace what was said beside the calls."""
        with self._engine.lock:
            self._batch(batch_id)
            self._engine.set_batch_text(batch_id, checked_text("text", text) or "")

    def commit_batch(self, batch_id: int) -> None:
        """The batch is in somebody's history: take it out of the journal."""
        self._end(batch_id)

    def discard_batch(self, batch_id: int) -> None:
        """Forget the batch."""
        self._end(batch_id)

    def _end(self, batch_id: int) -> None:
        begun = None
        try:
            with self._engine.lock:
                self._engine.admit()
                if self._ending != batch_id or self._engine.step(batch_id) is not None:
                    self._batch(batch_id)
                    self._ending = begun = batch_id
                    self._engine.discard(batch_id)
                begun = batch_id
                self._batches.pop(batch_id, None)
                self._ending = None
        except BaseException:
            if begun is not None:
                self._ending = begun  # Its caller does not know that it is gone, and may ask again.
            raise

    def recover(self) -> RecoveredToolBatch | None:
        """The oldest batch that a dead owner or a closed journal has left. Writes nothing."""
        for row in self._engine.unfinished():
            if row.kind == "batch" and not self._engine.is_alive(row.owner):
                left = read_leftover(self._engine, row)
                return RecoveredToolBatch(
                    row.step_id,
                    row.model_name,
                    self._engine.batch_text(row.step_id) or "",
                    tuple(sorted(left.calls, key=lambda call: call.position)),
                    tuple(left.results[at] for at in sorted(left.results)),
                )
        return None

    # --- calls ----------------------------------------------------------------------------------

    def mark_call_started(self, batch_id: int, call_id: str, *, replay: str = "never") -> None:
        """On record before the tool runs; the first start stands."""
        with self._engine.lock:
            batch = self._ready(batch_id, call_id)
            self._calls.start(batch_id, batch._book, call_id, replay)

    def record_result(self, batch_id: int, result: ToolResult) -> ToolResult:
        """On record when this returns; the first result stands."""
        with self._engine.lock:
            batch = self._ready(batch_id, result.tool_use_id)
            return self._calls.answer(batch_id, batch._book, result)

    # --- looking up -----------------------------------------------------------------------------

    def _ready(self, batch_id: int, call_id: str) -> ToolBatch:
        """The batch of a call that may be started or answered; its arguments are fixed now."""
        batch = self._batch(batch_id)
        batch._resolve_doubt()
        call = self._calls.known(batch_id, batch._book, call_id)
        if call.dropped or (call.state is CallState.ANNOUNCED and batch.arguments(call) is None):
            raise self._calls.no_arguments(batch_id, call_id)
        if call.state is CallState.ANNOUNCED:
            # Before the write: if it is interrupted, the start may be on record all the same.
            call.state = CallState.READY
        return batch

    def _batch(self, batch_id: int) -> ToolBatch:
        """A batch of this journal, or one that a dead owner has left and that is ours from now."""
        self._engine.admit()
        batch = self._batches.get(batch_id)
        if batch is not None and self._ending != batch_id:
            return batch
        row = self._engine.step(batch_id)
        if row is None or row.kind != "batch" or row.state not in ("open", "sealed"):
            self._batches.pop(batch_id, None)
            raise StepClosed(
                self._engine.name, batch_id, "no such batch is open here; nothing was written"
            )
        if batch is not None:
            return batch
        if row.owner != self._engine.owner_id:
            claimed = None
            if not self._engine.is_alive(row.owner):
                claimed = self._engine.claim(batch_id, dead_owner=row.owner)
            if claimed is None:
                raise StepBusy(
                    self._engine.name,
                    batch_id,
                    "another living journal has this batch; nothing was written",
                )
            row = claimed
        batch = ToolBatch.of(self._engine, read_leftover(self._engine, row))
        self._batches[batch_id] = batch
        return batch

    def _forget_interrupted_begin(self) -> None:
        """Discard a batch that an interrupted `begin_batch` left: nobody has its id."""
        if self._beginning is not None:
            row = self._engine.step_by_nonce(self._beginning)
            if row is not None:
                self._engine.discard(row.step_id)
                self._batches.pop(row.step_id, None)
            self._beginning = None


def checked_text(what: str, value: str | None) -> str | None:
    """A text as the engine can hold it."""
    if value is not None and not isinstance(value, str):
        raise InvalidMessage(
            f"{what} must be text, not {type(value).__name__}; nothing was written"
        )
    return value and clean_text(value)


def _raw_arguments(call: ToolUse) -> str:
    """As the provider wrote them, unless that says something else than `input` does."""
    raw = call.raw_arguments
    if raw and parse_arguments(raw) == call.input:
        return raw
    return json.dumps(call.input, ensure_ascii=False)


__all__ = ["RecoveredToolBatch", "ToolBatch", "ToolJournal", "checked_text"]
