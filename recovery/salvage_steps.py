"""The steps of a damaged store, in rows that a new one takes; what cannot be told is in doubt."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from itertools import groupby

from holdfast.journal.engine.inspect import Event, Inspection, Unreadable
from holdfast.journal.engine.restore import Restoration
from holdfast.journal.engine.rows import CallRow, EventRow, ResultRow, StepRow
from holdfast.journal.engine.schema import SEQ_BITS, SEQ_MASK
from holdfast.journal.engine.steps import event_record, now_us
from holdfast.journal.errors import HoldfastError
from holdfast.journal.stream import fold

ROWS_AT_ONCE = 1000
_NONCE = re.compile(r"[0-9a-f]{1,64}")
_STATES = ("open", "sealed", "committed", "quarantined")
_STATUSES = ("complete", "errored", "interrupted")


class StepCopy:
    """Copies the steps, once the sessions and their entries are there."""

    def __init__(
        self,
        source: Inspection,
        new: Restoration,
        sessions: set[str],
        settled: set[tuple[int, int]],
    ) -> None:
        self.source = source
        self.new = new
        self.sessions = sessions
        self.in_history = {step_id for step_id, _ in settled}
        self.occupied: set[str] = set()
        self.lost: list[tuple[str, str]] = []
        self.unfinished = 0
        self.newest = max(self.in_history, default=0)

    def lose(self, where: str, why: str) -> None:
        """Note what cannot be copied."""
        self.lost.append((where, why))

    def lose_rows(self, lost: Unreadable) -> None:
        """Note rows that cannot be read."""
        self.lose(f"{lost.table}, keys {lost.low} to {lost.high}", lost.why)

    def run(self) -> None:
        """Copy all steps, settled ones by their rows and unfinished ones with all they have."""
        in_journal: dict[int, StepRow] = {}
        for row in self.source.scan_steps():
            if isinstance(row, Unreadable):
                self.lose_rows(row)
                continue
            self.newest = max(self.newest, row.step_id)
            step = self.sound(row)
            if step.state == "committed" or step.step_id in self.in_history:
                self.in_history.add(step.step_id)
                self.new.restore_step(step._replace(state="committed"))
            else:
                in_journal[step.step_id] = step
        for step_id, events in groupby(self.events(), lambda found: found.step_id):
            if step_id in self.in_history:
                continue  # Left behind by the damage: history has the step.
            known = in_journal.pop(step_id, None)
            if known is None:
                self.lose(f"step {step_id}", "its row; its events are kept without a session")
                known = self.unknown(step_id)
            self.copy_step(known, [found.event for found in events])
            self.newest = max(self.newest, step_id)
        for step in in_journal.values():
            self.copy_step(step, [])

    def unknown(self, step_id: int) -> StepRow:
        """A row for events whose own row is lost."""
        nonce = os.urandom(8).hex()
        facts = (step_id, None, "step", self.new.owner_id, None, "open", nonce, now_us())
        return StepRow(*facts, None, None, None, None, 0, None)

    def events(self) -> Iterator[Event]:
        """The events that can be trusted, in order."""
        for found in self.source.scan_events():
            if isinstance(found, Unreadable):
                self.lose_rows(found)
            elif not 0 < found.step_id < 1 << 31 or not found.event.valid:
                where = f"step {found.step_id}, event {found.event.seq}"
                self.lose(where, "its crc does not match")
            else:
                yield found

    def sound(self, row: StepRow) -> StepRow:
        """The row with values that the tables take; what could not be kept is told."""
        where = f"step {row.step_id}"
        session = row.session
        if session is not None and session not in self.sessions:
            self.lose(where, f"its session {session}; it is kept without one")
            session = None
        state = row.state if row.state in _STATES else "sealed"
        unfinished = state in ("open", "sealed") and row.step_id not in self.in_history
        if unfinished and session is not None:
            if session in self.occupied:
                self.lose(where, f"its place in session {session}, where another is unfinished")
                state = "quarantined"
            self.occupied.add(session)
        return StepRow(
            row.step_id,
            session,
            row.kind if row.kind in ("step", "batch") else "step",
            self.new.owner_id,
            text_or_none(row.model_name),
            state,
            row.nonce
            if isinstance(row.nonce, str) and _NONCE.fullmatch(row.nonce)
            else os.urandom(8).hex(),
            integer(row.begun_us),
            row.last_seq if isinstance(row.last_seq, int) else None,
            row.status if row.status in _STATUSES else None,
            text_or_none(row.stop_reason),
            row.usage if is_object(row.usage) else None,
            0,
            text_or_none(row.problem),
        )

    def copy_step(self, row: StepRow, events: list[EventRow]) -> None:
        """Put an unfinished step into the new store, with all that is on record of it."""
        calls, results, text = self.calls(row, events)
        self.new.restore_step(row, calls, results, text)
        records = [
            event_record(row.step_id << SEQ_BITS | seq & SEQ_MASK, kind, call, _string(content))
            for seq, kind, call, content, _ in events
        ]
        for start in range(0, len(records), ROWS_AT_ONCE):
            self.new.restore_events(records[start : start + ROWS_AT_ONCE])
        self.unfinished += 1

    def calls(
        self, row: StepRow, events: list[EventRow]
    ) -> tuple[list[CallRow], list[ResultRow], str | None]:
        """What is on record of a step's calls; what cannot be told counts as in doubt."""
        where = f"step {row.step_id}"
        calls: dict[int, CallRow] = {}
        results: list[ResultRow] = []
        text: str | None = None
        try:
            text = self.source.batch_text(row.step_id)
        except HoldfastError as error:
            self.lose(f"{where}, what was said beside its calls", str(error))
        try:
            calls = {call.position: _sound_call(call) for call in self.source.calls(row.step_id)}
        except HoldfastError as error:
            self.lose(f"{where}, its calls", str(error))
            if row.state != "open" or row.kind == "batch":
                calls = {call.position: call for call in _started(events)}
        try:
            results = self.source.results(row.step_id)
        except HoldfastError as error:
            self.lose(f"{where}, its results", str(error))
            calls = {at: call._replace(state="started") for at, call in calls.items()}
        for result in results:
            if not result.valid:
                self.lose(f"{where}, result of call {result.position}", "its crc does not match")
                if result.position in calls:
                    damaged = calls[result.position]._replace(state="started")
                    calls[result.position] = damaged
        kept = [one for one in results if one.valid and one.position in calls]
        return list(calls.values()), kept, text


def _started(events: list[EventRow]) -> list[CallRow]:
    """The calls that a stream announced, each as if it had been started."""
    try:
        announced = fold(events).calls
    except Exception:  # What cannot be folded cannot be settled either: recovery will say so.
        return []
    nothing = (None, None, None, None)
    return [
        CallRow(call.position, call.call_id, call.name, "started", *nothing) for call in announced
    ]


def _sound_call(call: CallRow) -> CallRow:
    return call._replace(
        state=call.state if call.state in ("ready", "dropped") else "started",
        replay=call.replay if call.replay in ("never", "safe") else None,
        started_us=call.started_us if isinstance(call.started_us, int) else None,
        process_id=call.process_id if isinstance(call.process_id, int) else None,
        process_started=text_or_none(call.process_started),
    )


def is_object(value: object) -> bool:
    """Whether this is the JSON of an object."""
    try:
        return isinstance(value, str) and isinstance(json.loads(value), dict)
    except (ValueError, RecursionError):
        return False


def integer(value: object) -> int:
    """The value if it is an integer, else 0."""
    return value if isinstance(value, int) else 0


def text_or_none(value: object) -> str | None:
    """The value if it is a text."""
    return value if isinstance(value, str) else None


def _string(content: str | bytes) -> str:
    return content if isinstance(content, str) else content.decode("utf-8", "surrogatepass")
