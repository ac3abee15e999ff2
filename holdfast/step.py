"""A session's step: an ActiveJournal that can also be settled into its session's history."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from holdfast.history.entries import MessageId
from holdfast.journal.active import ActiveJournal
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.journal.errors import StepClosed, UnansweredCalls
from holdfast.journal.jsontext import clean_text
from holdfast.journal.messages import Message
from holdfast.journal.recovered import read_leftover
from holdfast.journal.writer import StepWriter
from holdfast.recovery.policy import RecoveryPolicy
from holdfast.recovery.settle import answer_calls, prepare, settle_prepared

# Leaving a block by one of these says nothing about the stream: it was interrupted, not wrong.
INTERRUPTIONS = (KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit)


class SessionStep(ActiveJournal):
    """The one writer of a session, from its first delta to its commit.

    As a context manager it is settled when the block is left, however that happens:

        left normally       done is appended, unless a terminal event stands already
        by an Exception     before a terminal event: recorded as error; after it: as a note
        by an interruption  the message counts as interrupted; the exception is a note

    Calls without a result are then answered as recovery does; the resolver is not asked.
    """

    def __init__(
        self,
        engine: SqliteEngine,
        step_id: int,
        *,
        nonce: str,
        model_name: str | None,
        session_id: str,
        provider: str | None,
        policy: RecoveryPolicy,
        count: Callable[[Message], tuple[int | None, str | None]],
        ended: Callable[[], None],
        together: Callable[[StepWriter, str, str], None] | None = None,
    ) -> None:
        super().__init__(
            engine,
            step_id,
            nonce=nonce,
            model_name=model_name,
            session_id=session_id,
            provider=provider,
            together=together,
        )
        self._policy = policy
        self._count = count
        self._ended = ended
        self._cut_off = False  # a followed stream ended without its terminal event
        self._untold: list[MessageId] | None = None  # committed, and the caller was not told

    def commit(self) -> list[MessageId]:
        """Move the step into history; seals first if needed. Every call must have its result.

        Gives the ids of the new entries: none for an empty step, one, or two with tool results.
        """
        with self._engine.lock:
            ids = self._untold
            if ids is None:
                self.seal()
                unanswered = self._book.unanswered()
                if unanswered:
                    raise UnansweredCalls(self._engine.name, self._step_id, unanswered)
                ids = self._settle({})
        # Behind the lock, which is where a signal gets in: until here the caller may ask again.
        self._untold = None
        return ids

    def discard(self) -> int:
        """Forget the step and everything in it; how many events were removed."""
        removed = super().discard()
        self._ended()
        return removed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Settle the step, whatever has happened. If that fails, `error` goes on with a note."""
        with self._engine.lock:
            if self._closed is not None:
                return
            try:
                if error is None:
                    self._finish()
                else:
                    self._finish_after(error)
            except Exception as failed:
                if error is None:
                    raise  # The handle stays usable: `commit` can be tried again.
                error.add_note(
                    f"holdfast: step {self._step_id} could not be settled ({failed});"
                    " what was appended is on record and is left to recovery"
                )
                self._leave_to_recovery()

    def _finish(self) -> None:
        self._admit()
        if self._shut is None and not self._cut_off:
            self.append_done()
        self.seal()
        self._record_kept()
        self._settle({})
        self._untold = None

    def _finish_after(self, error: BaseException) -> None:
        self._admit()
        words = _words(error)
        notes: dict[str, Any] = {}
        if self._shut is not None or isinstance(error, INTERRUPTIONS):
            notes["exception"] = words
        else:
            self.append_error(words)
        self.seal()
        self._record_kept()
        self._settle(notes)
        self._untold = None

    def _record_kept(self) -> None:
        """A tool ran and its result could not be recorded then: better now than never."""
        for result in list(self._unrecorded.values()):
            self._record_run(result)

    def _leave_to_recovery(self) -> None:
        """The session's next write, or whoever opens the store next, settles it: not this handle.

        So the handle must be closed: an event that it appended behind that would be nobody's.
        """
        if self._closed is None:
            self._close("the step was left to recovery")
        self._ended()

    def _settle(self, notes: dict[str, Any]) -> list[MessageId]:
        """Answer what has no answer, then the transaction that recovery uses too."""
        row = self._engine.step(self._step_id)
        if row is None:
            raise StepClosed(
                self._engine.name, self._step_id, "is no longer in the journal; nothing was written"
            )
        leftover = read_leftover(self._engine, row, stream=self._stream)
        answers = answer_calls(leftover, self._policy)
        # A policy that discards is for what a crash leaves; here the caller is alive to discard.
        keep = RecoveryPolicy()
        step = prepare(
            leftover, answers, policy=keep, provider=self._provider, count=self._count, notes=notes
        )
        settled = settle_prepared(self._engine, [step])
        if not settled:
            raise StepClosed(
                self._engine.name,
                self._step_id,
                "somebody else has claimed it; nothing was written",
            )
        ids = [MessageId(entry_id) for entry_id in settled[0].entry_ids]
        self._untold = ids
        self._close("the step was committed")
        self._ended()
        return ids


def _words(error: BaseException) -> str:
    """An exception in words that any store can hold, even where its own `__str__` fails."""
    try:
        said = str(error)
    except Exception:
        said = ""
    return clean_text(f"{type(error).__name__}: {said}".rstrip(": "))
