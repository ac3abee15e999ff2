"""ActiveJournal: the handle of one step in flight, from its first delta to its last tool result.

States: open -> (done | error) -> sealed -> closed.  Every `append_*` is on record when it returns.
After a terminal event no event is taken; after sealing only calls are started and answered; after
discarding or committing nothing is taken.  What is refused changes nothing.

Whatever was interrupted or failed can be called again: the handle looks what landed first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from holdfast.journal.blocks import Image, Text, ToolResult, ToolUse
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.journal.errors import CallNotReady, InvalidArgument, InvalidMessage, StepClosed
from holdfast.journal.jsontext import NotJson, clean_object, clean_text
from holdfast.journal.messages import Message
from holdfast.journal.observers import StoreEvent
from holdfast.journal.recovered import operation_id
from holdfast.journal.stream import DONE, ERROR, OPAQUE, SIGNATURE, TEXT, THINKING, Stream, fold
from holdfast.journal.tool_calls import CallRecorder
from holdfast.journal.writer import CallBook, StepWriter


class ActiveJournal(StepWriter):
    """Proof that a step is in flight."""

    def __init__(
        self,
        engine: SqliteEngine,
        step_id: int,
        *,
        nonce: str,
        model_name: str | None,
        session_id: str | None = None,
        provider: str | None = None,
        together: Callable[[StepWriter, str, str], None] | None = None,
    ) -> None:
        super().__init__(engine, step_id, CallBook(nonce))
        self._together = together  # at `power`: threads wait for one sync together
        self.model_name = model_name
        self.dropped_calls: tuple[str, ...] = ()
        self._session_id = session_id
        self._provider = provider
        self._calls = CallRecorder(engine)
        self._message: Message | None = None
        self._stream: Stream | None = None  # set by sealing
        self._executed: set[str] = set()
        self._unrecorded: dict[str, ToolResult] = {}  # of tools that ran; the write then failed
        self._ending = False  # a seal or discard was begun, and its caller was not told the outcome
        self._closed: str | None = None

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"step {self._step_id} cannot be pickled: a step belongs to the process that began it"
        )

    def __repr__(self) -> str:
        state = self._closed or ("sealed" if self._stream else "open")
        return f"<{type(self).__name__} step {self._step_id}: {state}, {self._seq} events>"

    @property
    def text(self) -> str:
        """The text so far, without thinking and calls."""
        with self._engine.lock:
            if self._engine.refusal is None:
                self._resolve_doubt()
            if self._pieces is None:
                self._pieces = fold(self._engine.events(self._step_id)).pieces
            # Joined once, so that asking after every delta costs what was added since.
            self._pieces[:] = ["".join(self._pieces)]
            return clean_text(self._pieces[0])

    # --- the stream -----------------------------------------------------------------------------

    def append_text(self, content: str) -> None:
        """A piece of the answer. Show it after this has returned."""
        if self._together is None:
            self._append(TEXT, content)
        else:
            self._together(self, TEXT, content)

    def append_thinking(self, content: str) -> None:
        """A piece of what the model thinks aloud."""
        if self._together is None:
            self._append(THINKING, content)
        else:
            self._together(self, THINKING, content)

    def append_signature(self, signature: str) -> None:
        """The provider's signature of the block before it, which it ends."""
        self._append(SIGNATURE, signature)

    def append_opaque(self, provider: str, item: dict[str, Any]) -> None:
        """Whatever a provider wants back verbatim, as a block of its own."""
        if not isinstance(provider, str) or not provider:
            raise InvalidMessage("provider must be a text, not empty; nothing was written")
        self._append(OPAQUE, json.dumps([provider, _json_object("item", item)]))

    def announce_call(self, call_id: str, name: str) -> None:
        """The model has named a tool; its arguments follow."""
        self._announce(call_id, name)

    def append_args(self, call_id: str, fragment: str) -> None:
        """A piece of a call's arguments; it may be cut anywhere, inside an escape too."""
        self._append_args(call_id, fragment)

    def append_done(
        self, *, stop_reason: str | None = None, usage: Mapping[str, Any] | None = None
    ) -> None:
        """The stream has ended well."""
        if stop_reason is not None and not isinstance(stop_reason, str):
            raise InvalidMessage("stop_reason must be text or None; nothing was written")
        ended: dict[str, Any] = {"stop_reason": stop_reason and clean_text(stop_reason)}
        if usage is not None:
            ended["usage"] = _json_object("usage", usage)
        self._append(DONE, json.dumps(ended))

    def append_error(self, message: str) -> None:
        """The stream has ended in an error."""
        self._append(ERROR, message)

    def seal(self) -> Message:
        """Close the stream and read it as the assistant's message; immutable from now on.

        Without a terminal event the message counts as interrupted.  Sealing again gives the same.
        """
        with self._engine.lock:
            self._admit()
            if self._message is None:
                stream = fold(self._engine.events(self._step_id))
                book = CallBook.sealed(self._book.nonce, stream)
                message = stream.message(model=self.model_name, provider=self._provider)
                self._begin_ending("the step is being sealed")
                self._engine.seal(
                    self._step_id,
                    last_seq=stream.last_seq,
                    status=stream.status,
                    stop_reason=stream.stop_reason,
                    usage=None if stream.usage is None else json.dumps(stream.usage),
                    calls=[call.sealed for call in book.calls.values()],
                )
                self._stream, self._book = stream, book
                self.dropped_calls = tuple(
                    call_id for call_id, call in book.calls.items() if call.dropped
                )
                self._shut = "the step is sealed"
                self._message = message or Message.assistant("")
                self._ending = False
                self._tell("seal", stream.last_seq)
            return self._message

    def discard(self) -> int:
        """Forget the step and everything in it; how many events were removed."""
        with self._engine.lock:
            again = self._ending
            self._engine.admit()
            self._resolve_doubt()
            if not again:
                self._refuse_when_closed()
            removed = self._seq
            if self._closed is None:
                self._begin_ending("the step is being discarded")
                removed = self._engine.discard(self._step_id)
                self._close("the step was discarded")
                self._tell("discard", removed)
        # Behind the lock, which is where a signal gets in: until here the caller may ask again.
        self._ending = False
        return removed

    # --- the calls ------------------------------------------------------------------------------

    def start_call(self, call_id: str, *, replay: str = "never") -> None:
        """On record before the tool runs: after a crash the call is in doubt, not forgotten.

        `replay="safe"` tells whoever recovers that this tool may run again without harm.  A call
        that was never announced is `UnknownCall`; one that was announced and cannot be run,
        because the step is not sealed or its arguments are no JSON object, is `CallNotReady`.
        """
        with self._engine.lock:
            self._need_seal(call_id)
            self._calls.start(self._step_id, self._book, call_id, replay)

    def record_process(self, call_id: str, pid: int) -> None:
        """A child process runs the call; its start time goes on record with its pid."""
        with self._engine.lock:
            self._need_seal(call_id)
            self._calls.put_process(self._step_id, self._book, call_id, pid)

    def operation_id(self, call_id: str) -> str:
        """An idempotency key for the tool: stable across crashes, unique for ever."""
        with self._engine.lock:
            self._admit()
            call = self._calls.known(self._step_id, self._book, call_id)
            return operation_id(self._book.nonce, call.position)

    def record_result(
        self, call_id: str, content: str | Sequence[Text | Image], *, is_error: bool = False
    ) -> ToolResult:
        """What the tool gave back, on record when this returns. The first result stands."""
        return self._answer(ToolResult(call_id, content, is_error=is_error))

    def execute(self, call: ToolUse, fn: Callable[..., Any]) -> ToolResult:
        """Start the call, run `fn(**call.input)`, record what it gives back.

        Nothing runs when the start cannot be recorded.  An answered call gives its result and is
        not run again.  An Exception becomes an error result; KeyboardInterrupt and cancellation
        leave the call started and go on.
        """
        known = self._before_run(call, fn)
        if known is not None:
            return known
        try:
            value = fn(**call.input)
        except Exception as error:
            return self._record_failure(call.id, error)
        return self._record_value(call.id, value)

    def _before_run(self, call: ToolUse, fn: object) -> ToolResult | None:
        """Everything that must be on record before a tool runs; its result if it has one."""
        if not isinstance(call, ToolUse) or not callable(fn):
            raise InvalidArgument(
                "execute takes a call out of seal().tool_calls and a function, not"
                f" {type(call).__name__} and {type(fn).__name__}; nothing was written or run"
            )
        with self._engine.lock:
            self._need_seal(call.id)
            journaled = self._calls.known(self._step_id, self._book, call.id)
            if journaled.result is not None:
                return journaled.result
            if call.id in self._unrecorded:
                return self._record_run(self._unrecorded[call.id])
            if call.id in self._executed and journaled.replay != "safe":
                raise CallNotReady(
                    self._engine.name,
                    self._step_id,
                    call.id,
                    "it ran before and was interrupted, so its outcome is unknown; it was not run"
                    " again: look at the world, then record_result",
                )
            self._calls.start(self._step_id, self._book, call.id, journaled.replay or "never")
            self._executed.add(call.id)
            return None

    def _record_value(self, call_id: str, value: object) -> ToolResult:
        """A tool has run and gave this back."""
        return self._record_run(ToolResult(call_id, as_content(value)))

    def _record_failure(self, call_id: str, error: Exception) -> ToolResult:
        """A tool has run and raised this."""
        status = "timeout" if isinstance(error, TimeoutError) else "failed"
        words = f"{type(error).__name__}: {_words_of(error)}".rstrip(": ")
        return self._record_run(ToolResult(call_id, words, is_error=True, status=status))

    def _record_run(self, result: ToolResult) -> ToolResult:
        """Kept until it is on record: a tool that ran must not run again for want of disk space."""
        self._unrecorded[result.tool_use_id] = result
        answered = self._answer(result)
        self._unrecorded.pop(result.tool_use_id, None)
        return answered

    def _answer(self, result: ToolResult) -> ToolResult:
        with self._engine.lock:
            self._need_seal(result.tool_use_id)
            return self._calls.answer(self._step_id, self._book, result)

    # --- inside ---------------------------------------------------------------------------------

    def _admit(self) -> None:
        """See what is on record; raise if nothing may be done here any more."""
        self._engine.admit()
        self._resolve_doubt()
        self._refuse_when_closed()

    def _need_seal(self, call_id: str) -> None:
        """Raise unless this is a call that may be started or answered."""
        self._admit()
        call = self._calls.known(self._step_id, self._book, call_id)
        if self._stream is None:
            raise CallNotReady(
                self._engine.name,
                self._step_id,
                call_id,
                "the step is not sealed, so its arguments may still change; nothing was written:"
                " seal() first",
            )
        if call.dropped:
            raise self._calls.no_arguments(self._step_id, call_id)

    def _begin_ending(self, reason: str) -> None:
        """No event is taken from here on, unless a look finds that the step is open after all."""
        self._shut = reason
        self._ending = True

    def _resolve_doubt(self) -> None:
        """Look what landed: the last event, and a seal or discard that was cut short."""
        if self._ending and self._closed is None:
            row = self._engine.step(self._step_id)
            if row is None:
                self._close("the step was discarded")
            else:
                self._shut = self._terminal if row.state == "open" else "the step is sealed"
                self._ending = False
        super()._resolve_doubt()

    def _refuse_when_closed(self) -> None:
        if self._closed is not None:
            raise StepClosed(
                self._engine.name, self._step_id, f"{self._closed}; nothing was written"
            )

    def _close(self, reason: str) -> None:
        self._closed = self._shut = reason

    def _tell(self, kind: str, data: object = None) -> None:
        if self._engine.observer is not None:
            self._engine.observer(
                StoreEvent(kind, self._step_id, self._seq, self._session_id, data=data)
            )


def _json_object(what: str, value: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return clean_object(value)
    except NotJson as error:
        raise InvalidMessage(f"{what}: {error}; nothing was written") from None


def as_content(value: object) -> str | list[Text | Image]:
    """What a tool gave back, as a result can hold it. It ran: whatever it gave must be kept."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(b, Text | Image) for b in value):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except Exception:  # Circular, too deep, keys that are no text, or its own `__str__` raised.
        return _words_of(value)


def _words_of(value: object) -> str:
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__name__}>"
