"""Operations on steps: begin, append, seal, settle, discard, claim. Each is one transaction.

A crash cannot split any of them: a step is either where it was, or where the operation put it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any
from zlib import crc32

import apsw

from holdfast.journal.engine.checks import PRIME, SEEDS, event_crc
from holdfast.journal.engine.core import Core, undo_interrupted
from holdfast.journal.engine.events import read_events
from holdfast.journal.engine.history import Occupied, insert_entries, occupant
from holdfast.journal.engine.log import LOG_LOOK_PAGES
from holdfast.journal.engine.rows import EventRow, SealedCall, Settlement, StepRow
from holdfast.journal.engine.scan import raw_columns, select, text
from holdfast.journal.engine.schema import SEQ_BITS, SEQ_MASK, STEP_ID_MAX
from holdfast.journal.engine.step_ids import give_step_id, next_step_id
from holdfast.journal.errors import StepClosed, StoreCorrupt

APPEND = "INSERT INTO stream_journal (id, event_type, call, content, crc) VALUES (?, ?, ?, ?, ?)"
APPEND_TEXT = (
    "INSERT INTO stream_journal (id, event_type, content, crc) VALUES (?, 'text_delta', ?, ?)"
)
TEXT_SEED = SEEDS["text_delta"]
STEP_COLUMNS = ", ".join(StepRow._fields)
EVENTS_A_PAGE = 4096

# One event ready to be stored: id, event_type, call, content, crc.
EventRecord = tuple[int, str, int | None, str | bytes, int]


def event_record(key: int, kind: str, call: int | None, content: str) -> EventRecord:
    """Make the row of an event. What UTF-8 cannot hold is kept as bytes, without loss."""
    try:
        data = content.encode()
        return key, kind, call, content, event_crc(key, kind, call, data)
    except UnicodeEncodeError:
        data = content.encode("utf-8", "surrogatepass")
        return key, kind, call, data, event_crc(key, kind, call, data)


class StepOperations(Core):
    """The write-ahead side."""

    # --- the hot path ---------------------------------------------------------------------------

    def append(self, key: int, kind: str, call: int | None, content: str) -> None:
        """Put one event on record. The caller holds the lock and counts `seq` within the key."""
        if self.refusal is not None:
            raise self.refusal()
        if self._full is not self._deltas_full:
            self._level(self._deltas_full)
        try:
            if (
                kind == "text_delta"
            ):  # Most of all events: as below, without two bindings and a call.
                crc = crc32(content.encode(), TEXT_SEED ^ key % PRIME)
                self._execute(APPEND_TEXT, (key, content, crc))
            else:
                crc = event_crc(key, kind, call, content.encode())
                self._execute(APPEND, (key, kind, call, content, crc))
        except (UnicodeEncodeError, apsw.Error) as error:
            self._append_again(event_record(key, kind, call, content), error)
        self._pages += 1 if len(content) < 1024 else len(content) >> 9
        if self._pages > LOG_LOOK_PAGES:
            self.bound_log()

    def append_many(self, records: Sequence[EventRecord]) -> None:
        """Put events of any number of steps on record in one commit. All or none."""

        def work(cursor: apsw.Cursor) -> None:
            cursor.executemany(APPEND, records)

        self.write(work, barrier=False)

    def _append_again(self, record: EventRecord, error: apsw.Error | UnicodeEncodeError) -> None:
        """The slow way: what UTF-8 cannot hold; what failed and may have landed all the same."""
        if isinstance(error, UnicodeEncodeError):
            try:
                self._execute(APPEND, record)
                return
            except apsw.Error as failed:
                error = failed
        if not self._has_event(record):
            if isinstance(error, apsw.ConstraintError):
                step_id, seq = record[0] >> SEQ_BITS, record[0] & SEQ_MASK
                raise StoreCorrupt(
                    self.name, f"step {step_id}: event {seq} stands already with other content"
                ) from error
            self._prepare_retry(error)
            self._level(self._deltas_full)
            try:
                self._execute(APPEND, record)
            except apsw.Error as again:
                if not self._has_event(record):
                    raise self._give_up(again) from again

    def _has_event(self, record: EventRecord) -> bool:
        try:
            found = self._db.execute(
                "SELECT crc FROM stream_journal WHERE id = ?", (record[0],)
            ).fetchone()
        except apsw.Error as error:
            # Whatever failed before this may have left a hole.
            self._doubt_log()
            raise self.translate(error) from error
        return found is not None and found[0] == record[4]

    # --- the life of a step ---------------------------------------------------------------------

    def begin_step(
        self,
        *,
        session: str | None,
        kind: str,
        model_name: str | None,
        nonce: str,
        session_no: int | None = None,
    ) -> int | Occupied:
        """Give out the next step id and record whose it is."""

        def work(cursor: apsw.Cursor) -> int | Occupied:
            if session is not None:
                held = occupant(cursor, self.name, session, session_no)
                if held is not None:
                    return held
            step_id = give_step_id(cursor, self.name)
            cursor.execute(
                "INSERT INTO step_metadata"
                " (step_id, session, kind, owner, model_name, state, nonce, begun_us)"
                " VALUES (?, ?, ?, ?, ?, 'open', ?, ?)",
                (step_id, session, kind, self.owner_id, model_name, nonce, now_us()),
            )
            return step_id

        return self.write(work)

    def seal(
        self,
        step_id: int,
        *,
        last_seq: int,
        status: str,
        stop_reason: str | None,
        usage: str | None,
        calls: Sequence[SealedCall],
    ) -> None:
        """Close the stream: one row for the step and one a call, whatever the stream's length."""

        def work(cursor: apsw.Cursor) -> None:
            cursor.execute(
                "UPDATE step_metadata SET state = 'sealed', last_seq = ?, status = ?,"
                " stop_reason = ?, usage = ? WHERE step_id = ? AND state = 'open'",
                (last_seq, status, stop_reason, usage, step_id),
            )
            if calls and self._db.changes():
                insert_calls(cursor, step_id, calls)

        self.write(work)

    def settle(self, settlements: Sequence[Settlement]) -> list[list[int] | None]:
        """Move steps from the journal into history, all in one transaction.

        Answers with the entry ids of each; a step that the claimant has settled already answers
        with the ids it has, and None stands for one that is not, or no longer, the claimant's.
        """

        def work(cursor: apsw.Cursor) -> list[list[int] | None]:
            settled = [_settle_one(cursor, settlement) for settlement in settlements]
            landed = zip(settlements, settled, strict=True)
            delete_journals(cursor, [step.step_id for step, ids in landed if ids is not None])
            return settled

        settled = self.write(work)
        self.tidy_log()
        return settled

    def discard(self, step_id: int) -> int:
        """Forget an unfinished step of this owner with all that is in it; how many events went."""

        def work(cursor: apsw.Cursor) -> int:
            row = _step(cursor, step_id)
            if row is None or row.owner != self.owner_id or row.state not in ("open", "sealed"):
                raise StepClosed(
                    self.name,
                    step_id,
                    "is not an unfinished step of this store; nothing was removed",
                )
            events = delete_journal(cursor, step_id)
            cursor.execute("DELETE FROM step_metadata WHERE step_id = ?", (step_id,))
            return events

        events = self.write(work)
        self.tidy_log()
        return events

    def claim(self, step_id: int, *, dead_owner: int) -> StepRow | None:
        """Take over a dead owner's step; None if somebody else was quicker."""

        def work(cursor: apsw.Cursor) -> StepRow | None:
            cursor.execute(
                "UPDATE step_metadata SET owner = ?, attempts = attempts + 1"
                " WHERE step_id = ? AND owner = ? AND state IN ('open', 'sealed')",
                (self.owner_id, step_id, dead_owner),
            )
            return _step(cursor, step_id) if self._db.changes() else None

        return self.write(work)

    def claim_many(self, steps: Sequence[tuple[int, int]]) -> list[StepRow]:
        """Take over many (step_id, dead_owner) at once; answers with those that were to be had."""

        def work(cursor: apsw.Cursor) -> list[StepRow]:
            rows = cursor.executemany(
                "UPDATE step_metadata SET owner = ?, attempts = attempts + 1"
                " WHERE step_id = ? AND owner = ? AND state IN ('open', 'sealed')"
                f" RETURNING {raw_columns(STEP_COLUMNS)}",
                [(self.owner_id, step_id, dead_owner) for step_id, dead_owner in steps],
            )
            return [StepRow(*map(text, row)) for row in rows]

        return self.write(work)

    def quarantine(self, step_id: int, problem: str) -> None:
        """Set a step aside that cannot be settled: its rows stay, and it blocks nobody."""

        def work(cursor: apsw.Cursor) -> None:
            cursor.execute(
                "UPDATE step_metadata SET state = 'quarantined', problem = ?"
                " WHERE step_id = ? AND owner = ? AND state IN ('open', 'sealed')",
                (problem[:2000], step_id, self.owner_id),
            )

        self.write(work)

    # --- reading --------------------------------------------------------------------------------

    def step(self, step_id: int) -> StepRow | None:
        """One step's row."""
        return self.read(lambda cursor: _step(cursor, step_id))

    def step_by_nonce(self, nonce: str) -> StepRow | None:
        """The unfinished step of this nonce: did an interrupted `begin_step` land?"""

        def work(cursor: apsw.Cursor) -> StepRow | None:
            row = cursor.execute(
                f"SELECT {STEP_COLUMNS} FROM step_metadata"
                " WHERE state IN ('open', 'sealed') AND nonce = ?",
                (nonce,),
            ).fetchone()
            return None if row is None else StepRow(*row)

        return self.read(work)

    def unfinished(self, *, session: str | None = None) -> list[StepRow]:
        """Every unfinished step, oldest first, or the one of a session."""
        where = "" if session is None else " AND session = ?"
        bindings = () if session is None else (session,)

        def work(cursor: apsw.Cursor) -> list[StepRow]:
            rows = select(
                cursor,
                STEP_COLUMNS,
                f"FROM step_metadata WHERE state IN ('open', 'sealed'){where} ORDER BY step_id",
                bindings,
            )
            return [StepRow(*row) for row in rows]

        return self.read(work)

    def journal_counts(self) -> tuple[int, int, int, int]:
        """Of steps without a session: events, sealed ones, unsealed ones; newest step id."""

        def work(cursor: apsw.Cursor) -> tuple[int, int, int, int]:
            sealed = unsealed = 0
            steps: list[Any] = cursor.execute(
                "SELECT step_id, state FROM step_metadata"
                " WHERE state IN ('open', 'sealed') AND session IS NULL AND kind = 'step'"
            ).fetchall()
            for step_id, state in steps:
                low = step_id << SEQ_BITS
                events = cursor.execute(
                    "SELECT count(*) FROM stream_journal WHERE id BETWEEN ? AND ?",
                    (low, low | SEQ_MASK),
                ).get
                sealed += events if state == "sealed" else 0
                unsealed += events if state == "open" else 0
            newest = next_step_id(cursor, self.name) - 1
            return sealed + unsealed, sealed, unsealed, newest

        return self.read(work)

    def last_event(self, step_id: int) -> tuple[int, str] | None:
        """Seq and kind of a step's newest event, on the writer's own connection."""
        low = step_id << SEQ_BITS
        with self.lock:
            self.admit()
            try:
                undo_interrupted(self._db)
                row = self._db.execute(
                    "SELECT id, event_type FROM stream_journal WHERE id BETWEEN ? AND ?"
                    " ORDER BY id DESC LIMIT 1",
                    (low, low | SEQ_MASK),
                ).fetchone()
            except (apsw.Error, UnicodeDecodeError) as error:
                raise self.translate(error) from error
        return None if row is None else (row[0] & SEQ_MASK, row[1])

    def events(self, step_id: int) -> Iterator[EventRow]:
        """A step's events in order, a page at a time: no cursor stays open between two pages."""
        low = step_id << SEQ_BITS
        after, high = low - 1, low | SEQ_MASK
        while True:
            page = self.read(lambda cursor: read_events(cursor, after, high, EVENTS_A_PAGE))  # noqa: B023
            yield from page
            if len(page) < EVENTS_A_PAGE:
                return
            after = low | page[-1].seq


def now_us() -> int:
    """Wall clock in microseconds: for people, never for order."""
    return time.time_ns() // 1000


def insert_calls(cursor: apsw.Cursor, step_id: int, calls: Sequence[SealedCall]) -> None:
    """Record the calls of a step as sealing found them."""
    cursor.executemany(
        "INSERT OR IGNORE INTO tool_calls (step_id, position, call_id, name, state)"
        " VALUES (?, ?, ?, ?, ?)",
        [(step_id, call.position, call.call_id, call.name, call.state) for call in calls],
    )


def delete_journal(cursor: apsw.Cursor, step_id: int) -> int:
    """Delete what the journal holds of a step, except for its row; how many events went."""
    low = step_id << SEQ_BITS
    cursor.execute("DELETE FROM stream_journal WHERE id BETWEEN ? AND ?", (low, low | SEQ_MASK))
    events: int = cursor.connection.changes()
    for table in ("tool_calls", "tool_results", "tool_batches"):
        cursor.execute(f"DELETE FROM {table} WHERE step_id = ?", (step_id,))
    return events


def delete_journals(cursor: apsw.Cursor, step_ids: Sequence[int]) -> None:
    """`delete_journal` of many steps, in few statements."""
    cursor.executemany(
        "DELETE FROM stream_journal WHERE id BETWEEN ? AND ?",
        [(step_id << SEQ_BITS, step_id << SEQ_BITS | SEQ_MASK) for step_id in step_ids],
    )
    every = (str(list(step_ids)),)  # A list of integers is JSON as it stands.
    for table in ("tool_calls", "tool_results", "tool_batches"):
        cursor.execute(
            f"DELETE FROM {table} WHERE step_id IN (SELECT value FROM json_each(?))", every
        )


def _settle_one(cursor: apsw.Cursor, settlement: Settlement) -> list[int] | None:
    row = _step(cursor, settlement.step_id)
    if row is None or row.session is None or row.owner != settlement.owner:
        return None
    if row.state == "committed":
        found = cursor.execute(
            "SELECT entry_id FROM history_entries WHERE stream_step_id = ? ORDER BY part",
            (settlement.step_id,),
        )
        return [entry_id for (entry_id,) in found]
    if row.state == "quarantined":
        return None
    ids = insert_entries(cursor, row.session, settlement.entries)
    cursor.execute(
        "UPDATE step_metadata SET state = 'committed', status = ?, stop_reason = ?, usage = ?,"
        " problem = ? WHERE step_id = ?",
        (
            settlement.status,
            settlement.stop_reason,
            settlement.usage,
            settlement.problem,
            settlement.step_id,
        ),
    )
    return ids


def _step(cursor: apsw.Cursor, step_id: int) -> StepRow | None:
    if not 0 <= step_id <= STEP_ID_MAX:
        return None  # SQLite could not even be asked about some of these.
    rows = select(cursor, STEP_COLUMNS, "FROM step_metadata WHERE step_id = ?", (step_id,))
    return StepRow(*rows[0]) if rows else None
