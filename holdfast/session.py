"""A session: one conversation in a store, with one writer at a time."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Literal, NoReturn

from holdfast.history.entries import HistoryEntry, MessageId
from holdfast.history.full_history import FullHistory
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.journal.engine.history import Occupied
from holdfast.journal.engine.rows import SessionRow
from holdfast.journal.errors import (
    InvalidArgument,
    InvalidMessage,
    SessionBusy,
    SessionUnrecovered,
    StepBusy,
)
from holdfast.journal.jsontext import clean_text
from holdfast.journal.messages import Message, Thinking
from holdfast.recovery.pairing import normalize
from holdfast.recovery.recover import settle_dead
from holdfast.recovery.validation import ValidationReport
from holdfast.repair import repair_session
from holdfast.step import SessionStep

if TYPE_CHECKING:
    from holdfast.store import Store

RECOVERY_WAIT_S = 10.0


class Session:
    """One conversation. Its writer is the one step open in it; anybody may read.

    `id` is its name, `history` its entries with all that is known of each.
    """

    def __init__(self, store: Store, row: SessionRow) -> None:
        self.id = row.session_id
        self.history = FullHistory(
            store.engine,
            row.session_id,
            row.session_no,
            make_way=self._make_way,
            counter=store.counter_for(row.model),
        )
        self._store = store
        self._engine: SqliteEngine = store.engine
        self._row = row

    def __repr__(self) -> str:
        return f"<Session {self.id!r} in {self._engine.name}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"session {self.id!r} cannot be pickled: open the store in the other process"
        )

    # --- writing --------------------------------------------------------------------------------

    def add(self, message: Message) -> MessageId:
        """Append a message; it is on record when this returns."""
        return self.history.push(message)

    def add_user(self, text: str) -> MessageId:
        """Append what the user said."""
        return self.add(_message("user", text))

    def add_system(self, text: str) -> MessageId:
        """Append a system prompt."""
        return self.add(_message("system", text))

    def begin_step(self, model: str | None = None) -> SessionStep:
        """Begin the assistant's turn. What a dead owner left in this session is settled first."""
        if model is not None and not isinstance(model, str):
            raise InvalidArgument(f"model must be text, not {type(model).__name__}")
        model = self._row.model if model is None else clean_text(model)
        step: SessionStep | None = None
        try:
            while True:
                with self._engine.lock:
                    begun = self._begin(model)
                    if not isinstance(begun, Occupied):
                        step = begun
                        self._store.active[step.step_id] = step
                        step._tell("begin")
                        return step
                # Without the lock: this may ask a resolver, which may take its time.
                self._make_way(begun)
        except BaseException:
            # A signal came before the caller had the handle, so nobody can ever finish this step.
            if step is not None:
                step._leave_to_recovery()
            raise

    def _begin(self, model_name: str | None) -> SessionStep | Occupied:
        nonce = secrets.token_hex(8)
        begun = self._engine.begin_step(
            session=self.id,
            kind="step",
            model_name=model_name,
            nonce=nonce,
            session_no=self._row.session_no,
        )
        if isinstance(begun, Occupied):
            return begun
        store = self._store
        return SessionStep(
            self._engine,
            begun,
            nonce=nonce,
            model_name=model_name,
            session_id=self.id,
            provider=self._row.provider,
            policy=store.policy,
            count=self.history.count,
            ended=lambda: store.ended(begun),
            together=store.together,
        )

    def repair(self) -> ValidationReport:
        """Store a normalisation of this session, in one transaction; what was wrong before.

        For imported or hand-made sessions: a session of our own steps is never in need of it.
        """
        return repair_session(self._engine, self.id, self.history, self._make_way)

    # --- reading --------------------------------------------------------------------------------

    def messages(self) -> list[Message]:
        """What is stored, always legal to send: every call has its one output in its place.

        Thinking that was cut off before it was signed is kept in history and left out here: no
        provider takes it back.
        """
        legal = (_sendable(entry) for entry in self.history.entries())
        return normalize([message for message in legal if message is not None])

    # --- who writes -----------------------------------------------------------------------------

    def _make_way(self, occupied: Occupied) -> None:
        """A step is in the way: settle it if nobody can finish it, else say whose it is."""
        engine, step_id = self._engine, occupied.step_id
        if occupied.owner == engine.owner_id:
            if step_id in self._store.active:
                raise StepBusy(
                    engine.name,
                    step_id,
                    f"is open in session {self.id!r} of this store; nothing was written:"
                    " commit or discard it first",
                )
            # Nobody has its handle any more: it was never handed out, or could not be settled.
        elif engine.is_alive(occupied.owner):
            if self._recovery_has_ended(step_id):
                return
            raise SessionBusy(
                engine.name,
                self.id,
                f"step {step_id} is open in it, by {self._store.who_is(occupied.owner)}; nothing"
                " was written: wait for it, or use another session",
            )
        elif not self._store.recovers:
            raise SessionUnrecovered(
                engine.name,
                self.id,
                f"step {step_id} of a dead owner is unfinished in it and the store was opened with"
                " recover=False; nothing was written: call holdfast.recovery.recover",
            )
        self._settle_leftovers()

    def _recovery_has_ended(self, step_id: int) -> bool:
        """Wait while another store recovers this step; False if it does no such thing, or hangs.

        Two stores that open at once after a crash share the work, and neither should see an error
        because the other was quicker.
        """
        deadline = time.monotonic() + RECOVERY_WAIT_S
        while True:
            row = self._engine.step(step_id)
            if row is None or row.state not in ("open", "sealed"):
                return True
            if row.attempts == 0:
                return False
            if not self._engine.is_alive(row.owner):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)

    def _settle_leftovers(self) -> None:
        store, engine = self._store, self._engine
        rows = [
            row
            for row in engine.unfinished(session=self.id)
            if row.step_id not in store.active
            and (row.owner == engine.owner_id or not engine.is_alive(row.owner))
        ]
        store.note_recovered(settle_dead(engine, rows, store.policy, store.resolver))


def _message(role: Literal["user", "system"], text: str) -> Message:
    if not isinstance(text, str) or not text:
        raise InvalidMessage(
            f"a {role} message must be text that is not empty; nothing was written"
        )
    return Message(role, text)


def _sendable(entry: HistoryEntry) -> Message | None:
    """The message without what no provider takes back; None if nothing is left of it."""
    message = entry.message
    if entry.status == "complete":
        return message
    blocks = [b for b in message.content if not isinstance(b, Thinking) or b.signature]
    if len(blocks) == len(message.content):
        return message
    return Message(message.role, blocks, message.metadata) if blocks else None
