"""The stream journal: steps without a session, for whoever brings an own history.

INVARIANT  A step that was sealed stays until somebody says that it is stored elsewhere
           (`commit_and_prune_step`) or not wanted (`discard_step`); looking never writes.

It sees only steps without a session, and a leftover never stands in the way of a new one.  A step
that was left stays recoverable until it is committed or discarded, sealed or not.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import NamedTuple

from holdfast.journal.active import ActiveJournal
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.journal.engine.rows import StepRow
from holdfast.journal.errors import StepBusy, StepClosed
from holdfast.journal.recovered import RecoveredStream, classify, read_leftover
from holdfast.journal.standalone import StandaloneJournal
from holdfast.journal.stream import fold
from holdfast.journal.tool_journal import checked_text


class JournalStats(NamedTuple):
    """Events in the journal, and the newest step id that was given out (0: none yet)."""

    total: int
    sealed: int
    unsealed: int
    current_step_id: int


class StreamJournal(StandaloneJournal):
    """Crash-safe streams, on their own."""

    def __init__(self, engine: SqliteEngine) -> None:
        super().__init__(engine)
        self._active: dict[int, ActiveJournal] = {}
        self._beginning: str | None = None  # nonce of a step whose handle was not given to anyone
        self._ending: tuple[int, int] | None = None  # a step (and its events) whose end was begun

    def begin_step(self, model_name: str | None = None) -> ActiveJournal:
        """Begin a step; several may be active at once."""
        nonce = secrets.token_hex(8)
        begun = None
        try:
            with self._engine.lock:
                self._engine.admit()
                self._forget_interrupted_begin()
                name = checked_text("model_name", model_name)
                self._beginning = begun = nonce
                step_id = self._engine.begin_step(
                    session=None, kind="step", model_name=name, nonce=nonce
                )
                assert isinstance(step_id, int), "only a session can be occupied"
                active = ActiveJournal(self._engine, step_id, nonce=nonce, model_name=name)
                self._active = {at: one for at, one in self._active.items() if not one._closed}
                self._active[step_id] = active
                self._beginning = None
        except BaseException:
            if begun is not None:
                self._beginning = begun  # Its caller has no handle and will begin another one.
            raise
        return active

    begin_session = begin_step

    def recover(self) -> RecoveredStream | None:
        """The oldest step that a dead owner or a closed journal has left. Writes nothing."""
        return next(self._recoverable(), None)

    def recover_all(self) -> list[RecoveredStream]:
        """Every such step, oldest first. Writes nothing."""
        return list(self._recoverable())

    def seal_unsealed(self, step_id: int) -> str:
        """Seal a step that was left; its text. One that is sealed already keeps its seal."""
        with self._engine.lock:
            row = self._take(step_id)
            if row.state == "sealed":
                return fold(self._engine.events(step_id)).text
            if step_id in self._active:
                raise self._still_active(step_id)
            handle = ActiveJournal(
                self._engine, step_id, nonce=row.nonce, model_name=row.model_name
            )
            return handle.seal().text

    def discard_unsealed(self, step_id: int) -> int:
        """Forget a step that was left open; how many events were removed."""
        return self._end(step_id, needs="open")

    def commit_and_prune_step(self, step_id: int) -> int:
        """The step is in somebody's history: events, calls and metadata go, in one transaction."""
        return self._end(step_id, needs="sealed", reason="the step was committed")

    def discard_step(self, step_id: int) -> int:
        """Forget a step, sealed or not; how many events were removed."""
        return self._end(step_id)

    def stats(self) -> JournalStats:
        """Count what is in the journal."""
        return JournalStats(*self._engine.journal_counts())

    def _recoverable(self) -> Iterator[RecoveredStream]:
        with self._engine.lock:
            left = [row for row in self._engine.unfinished() if self._is_leftover(row)]
        for row in left:
            yield classify(read_leftover(self._engine, row), sealed_is_complete=True)

    def _is_leftover(self, row: StepRow) -> bool:
        """Nobody has a handle of it: its owner is dead, or we took it over from one who is."""
        if row.session is not None or row.kind != "step":
            return False
        if row.owner == self._engine.owner_id:
            return row.step_id not in self._active
        return not self._engine.is_alive(row.owner)

    def _take(self, step_id: int, *, needs: str | None = None) -> StepRow:
        """A step that this journal may end: one of its own, or one that nobody is left to end.

        What is refused is not taken over either.
        """
        self._engine.admit()
        row = self._engine.step(step_id)
        if row is None or row.session is not None or row.kind != "step":
            raise StepClosed(
                self._engine.name, step_id, "no such step in this journal; nothing was changed"
            )
        if row.owner != self._engine.owner_id and self._engine.is_alive(row.owner):
            raise self._lost(step_id)
        if needs == "sealed" and row.state == "open":
            raise StepBusy(
                self._engine.name, step_id, "is still streaming; nothing was removed: seal it first"
            )
        if needs == "open" and row.state == "sealed":
            raise StepClosed(
                self._engine.name, step_id, "is sealed; nothing was removed: use discard_step"
            )
        if needs == "open" and step_id in self._active:
            raise self._still_active(step_id)
        if row.owner == self._engine.owner_id:
            return row
        claimed = self._engine.claim(step_id, dead_owner=row.owner)
        if claimed is None:
            raise self._lost(step_id)
        return claimed

    def _lost(self, step_id: int) -> StepBusy:
        return StepBusy(
            self._engine.name, step_id, "another living journal has this step; nothing was changed"
        )

    def _still_active(self, step_id: int) -> StepBusy:
        return StepBusy(
            self._engine.name,
            step_id,
            "is active in this journal; nothing was changed: use its own handle",
        )

    def _end(
        self, step_id: int, *, needs: str | None = None, reason: str = "the step was discarded"
    ) -> int:
        """Remove a step; how many events went. One that was interrupted can be called again."""
        begun = None
        try:
            with self._engine.lock:
                self._engine.admit()
                removed = self._ended_before(step_id)
                if removed is None:
                    self._take(step_id, needs=needs)
                    newest = self._engine.last_event(step_id)
                    self._ending = begun = (step_id, 0 if newest is None else newest[0])
                    removed = self._engine.discard(step_id)
                begun = (step_id, removed)
                active = self._active.pop(step_id, None)
                if active is not None:
                    active._close(reason)
                self._ending = None
        except BaseException:
            if begun is not None:
                self._ending = begun  # Its caller does not know that it is gone, and may ask again.
            raise
        return removed

    def _ended_before(self, step_id: int) -> int | None:
        """Events of a step that is gone, if its end landed and its caller was not told."""
        if self._ending is None or self._ending[0] != step_id:
            return None
        return self._ending[1] if self._engine.step(step_id) is None else None

    def _forget_interrupted_begin(self) -> None:
        """Discard a step that an interrupted `begin_step` left: nobody has its handle."""
        if self._beginning is not None:
            row = self._engine.step_by_nonce(self._beginning)
            if row is not None:
                self._engine.discard(row.step_id)
                self._active.pop(row.step_id, None)
            self._beginning = None


__all__ = ["JournalStats", "StreamJournal"]
