"""One step's end of the log: it counts the events and never leaves a gap or a double.

INVARIANT  `_seq` is the seq of the newest event on record, or `_doubt` names an event that may have
           landed behind it.

Doubt is noted before a write and taken back when the caller has as good as been told: behind the
last point at which Python lets a signal handler in.  So a handler that raises anywhere in between,
and a write that failed, both leave a handle that looks before it writes again.  If the very same
event is given again, that is the retry, and it is done.  If another one is given, the doubtful one
stays where it landed: it was given to us once, and nobody was told that it is not on record.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.journal.blocks import ToolResult
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.journal.engine.rows import SealedCall
from holdfast.journal.engine.schema import SEQ_BITS
from holdfast.journal.errors import DuplicateCall, InvalidMessage, StepClosed, UnknownCall
from holdfast.journal.jsontext import clean_text
from holdfast.journal.observers import StoreEvent
from holdfast.journal.processes import ToolProcess
from holdfast.journal.recovered import CallState, Leftover
from holdfast.journal.stream import ARGS, CALL, DONE, ERROR, TEXT, Stream, StreamedCall

Doubt = tuple[int, str, str, int | None]  # seq, kind, content, call


@dataclass(slots=True)
class JournaledCall:
    """A call, and how far it came."""

    streamed: StreamedCall
    state: CallState
    dropped: bool = False
    replay: str | None = None
    result: ToolResult | None = None
    process: ToolProcess | None = None

    @property
    def position(self) -> int:
        """The identity of the call within its step."""
        return self.streamed.position

    @property
    def sealed(self) -> SealedCall:
        """As the engine wants it."""
        call = self.streamed
        return SealedCall(
            call.position, call.call_id, call.name, "dropped" if self.dropped else "ready"
        )


class CallBook:
    """The calls of one step by the provider's label: memory of what is on record."""

    def __init__(self, nonce: str, calls: Sequence[JournaledCall] = ()) -> None:
        self.nonce = nonce
        self.calls: dict[str, JournaledCall] = {call.streamed.call_id: call for call in calls}

    @classmethod
    def of(cls, leftover: Leftover) -> CallBook:
        """Read back from the journal."""
        return cls(
            leftover.row.nonce,
            [
                JournaledCall(
                    streamed,
                    call.state,
                    # Until it is sealed or started, the missing end of its arguments may yet come.
                    dropped=call.input is None and call.state is not CallState.ANNOUNCED,
                    replay=call.replay,
                    result=leftover.results.get(call.position),
                    process=call.process,
                )
                for streamed, call in zip(leftover.stream.calls, leftover.calls, strict=True)
            ],
        )

    @classmethod
    def sealed(cls, nonce: str, stream: Stream) -> CallBook:
        """The calls of a stream at the moment of sealing."""
        dropped = {call.position for call in stream.dropped}
        return cls(
            nonce,
            [
                JournaledCall(call, CallState.READY, dropped=call.position in dropped)
                for call in stream.calls
            ],
        )

    def get(self, call_id: str) -> JournaledCall | None:
        """Look a call up by the label as a provider or a message has it."""
        return self.calls.get(clean_text(call_id)) if isinstance(call_id, str) else None

    def unanswered(self) -> tuple[str, ...]:
        """Calls in the message that have no result yet, in order."""
        return tuple(
            call_id
            for call_id, call in self.calls.items()
            if call.result is None and not call.dropped
        )


class StepWriter:
    """Appends events of one step. Used by one store; safe from several threads."""

    def __init__(
        self, engine: SqliteEngine, step_id: int, book: CallBook, *, last_seq: int = 0
    ) -> None:
        self._engine = engine
        self._step_id = step_id
        self._base = step_id << SEQ_BITS
        self._book = book
        self._seq = last_seq
        self._doubt: Doubt | None = None
        self._shut: str | None = None  # why no event is taken any more
        self._terminal: str | None = None  # the terminal event, in words
        self._pieces: list[str] | None = []  # the text so far; None: read it back when asked

    @property
    def step_id(self) -> int:
        """Unique and rising for the life of the store, never reused."""
        return self._step_id

    def _append(self, kind: str, content: str, call: int | None = None) -> None:
        """Put one event on record; when this returns, `kill -9` does not lose it."""
        engine = self._engine
        doubt = None
        try:
            with engine.lock:
                if self._doubt is not None or self._shut is not None:
                    doubt = self._doubt
                    if self._is_on_record(kind, content, call):
                        self._doubt = None
                        return
                seq = self._seq + 1
                self._doubt = doubt = (seq, kind, content, call)
                engine.append(self._base | seq, kind, call, content)
                if kind is not TEXT:
                    self._note(kind, content, call)
                elif self._pieces is not None:
                    self._pieces.append(content)
                self._seq = seq
                if engine.observer is not None:
                    self._tell_append(seq, kind, content, call)
                self._doubt = None
        except BaseException:
            # Giving the lock back is the last point where a signal gets in, and the caller will
            # never know that the event landed.  Plain stores: nothing can come between them.
            if doubt is not None:
                self._doubt = doubt
            if not isinstance(content, str):  # Only what is text can be encoded, let alone written.
                raise _no_text(self._step_id, kind, content) from None
            raise

    def _announce(self, call_id: str, name: str, position: int | None = None) -> None:
        """Put a new call on record, at the next position if none is given."""
        landed: Doubt | None = None
        try:
            with self._engine.lock:
                if self._doubt is not None or self._shut is not None:
                    self._engine.admit()
                    self._resolve_doubt()
                content = json.dumps([_label("call id", call_id), _label("name", name)])
                known = self._book.get(call_id)
                if known is not None and self._is_retry(CALL, content, known.position):
                    position = known.position
                elif known is not None and self._shut is None:
                    raise DuplicateCall(
                        self._engine.name,
                        self._step_id,
                        call_id,
                        "was announced before; the first stands, nothing was written",
                    )
                if position is None:
                    position = len(self._book.calls)
                self._append(CALL, content, position)
                landed = (self._seq, CALL, content, position)
        except BaseException:
            if landed is not None:
                self._doubt = landed  # As in `_append`.
            raise

    def _append_args(self, call_id: str, fragment: str) -> None:
        """Put a piece of a known call's arguments on record."""
        landed: Doubt | None = None
        try:
            with self._engine.lock:
                if self._doubt is not None or self._shut is not None:
                    self._engine.admit()
                    self._resolve_doubt()
                call = self._book.get(call_id)
                if call is None and self._shut is None:
                    raise unknown_call(self._engine.name, self._step_id, self._book, call_id)
                position = None if call is None else call.position
                self._append(ARGS, fragment, position)
                landed = (self._seq, ARGS, fragment, position)
        except BaseException:
            if landed is not None:
                self._doubt = landed  # As in `_append`.
            raise

    # --- doubt ----------------------------------------------------------------------------------

    def _is_on_record(self, kind: str, content: str, call: int | None) -> bool:
        """The slow way in: True if this event landed before; raises if none may be written."""
        self._engine.admit()
        self._resolve_doubt()
        if self._is_retry(kind, content, call):
            return True
        if self._shut is not None:
            raise self._refused()
        return False

    def _resolve_doubt(self) -> None:
        """Look what landed.  A doubt that remains has landed, and its caller was not told."""
        if self._doubt is None:
            return
        self._pieces = None  # Whether it is among them depends on where the signal came in.
        seq, kind, content, call = self._doubt
        if seq <= self._seq:
            return
        newest = self._engine.last_event(self._step_id)
        if newest is None or newest[0] < seq:
            self._doubt = None
            return
        if kind != TEXT:
            self._note(kind, content, call)
        self._seq = seq
        self._tell_append(seq, kind, content, call)

    def _is_retry(self, kind: str, content: str, call: int | None) -> bool:
        """Whether this is the event that landed and whose caller was not told."""
        return self._doubt is not None and self._doubt[1:] == (kind, content, call)

    def _note(self, kind: str, content: str, call: int | None) -> None:
        """Remember what an event on record means for the next one. Twice is as good as once."""
        if kind == CALL:
            assert call is not None
            call_id, name = json.loads(content)
            streamed = StreamedCall(call, call_id, name)
            self._book.calls.setdefault(call_id, JournaledCall(streamed, CallState.ANNOUNCED))
        elif kind in (DONE, ERROR):
            self._terminal = self._shut = f"the stream has ended ({kind})"

    def _tell_append(self, seq: int, kind: str, content: str, call: int | None) -> None:
        if self._engine.observer is not None:
            self._engine.observer(
                StoreEvent("append", self._step_id, seq, data=(kind, content), call=call)
            )

    # --- commits that are shared with others ----------------------------------------------------

    def _admit_event(self, kind: str, content: str, call: int | str | None) -> int | None:
        """Check an event on its way into a shared commit; the position of the call it is of."""
        if self._doubt is not None or self._shut is not None:
            self._engine.admit()
            self._resolve_doubt()
        if self._shut is not None and not self._is_retry(kind, content, None):
            raise self._refused()
        if not isinstance(content, str):
            raise _no_text(self._step_id, kind, content)
        if isinstance(call, str):
            known = self._book.get(call)
            if known is None:
                raise unknown_call(self._engine.name, self._step_id, self._book, call)
            return known.position
        return call

    def _landed_with_others(self, seq: int, kind: str, content: str) -> None:
        """A shared commit has put this event on record."""
        self._seq, self._doubt = seq, None
        if kind == TEXT and self._pieces is not None:
            self._pieces.append(content)

    def _refused(self) -> StepClosed:
        return StepClosed(
            self._engine.name,
            self._step_id,
            f"{self._shut}; no further event is taken and nothing was written",
        )

    def _close(self, reason: str) -> None:
        self._shut = reason


def unknown_call(store: str, step_id: int, book: CallBook, call_id: str) -> UnknownCall:
    """What is raised for a call that the step has never announced."""
    names = ", ".join(map(repr, book.calls)) or "none"
    return UnknownCall(
        store,
        step_id,
        call_id,
        f"was never announced (calls of this step: {names}); nothing was written: announce it"
        " first, or check the id",
    )


def _no_text(step_id: int, kind: str, content: object) -> InvalidMessage:
    return InvalidMessage(
        f"step {step_id}: {kind} must be text, not {type(content).__name__}; nothing was written"
    )


def _label(what: str, value: object) -> str:
    """A label as a message can hold it."""
    if not isinstance(value, str) or not value:
        raise InvalidMessage(
            f"the {what} of a call must be a text that is not empty; nothing was written"
        )
    return clean_text(value)


__all__ = ["CallBook", "JournaledCall", "StepWriter", "unknown_call"]
