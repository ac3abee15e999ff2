"""Operations on history: entries and their counters. Each is one transaction."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import apsw

from holdfast.journal.engine.checks import row_crc
from holdfast.journal.engine.core import Core
from holdfast.journal.engine.rows import EntryRow, NewEntry
from holdfast.journal.engine.scan import refuse_disorder, select
from holdfast.journal.engine.schema import SEQ_BITS, SEQ_MASK
from holdfast.journal.errors import SessionNotFound, StepBusy, StepClosed

CHECKED = (
    "role, body, status, created_us, stream_step_id, part, model_name, stop_reason, usage, metadata"
)
TOUCH = (
    "UPDATE sessions SET changed = (SELECT ifnull(max(changed), 0) + 1 FROM sessions),"
    " updated_us = max(updated_us, ?)"
)


@dataclass(frozen=True, slots=True)
class Occupied:
    """Answer to a writer where a session has an unfinished step: nothing was written."""

    step_id: int
    owner: int


class HistoryOperations(Core):
    """The settled side.

    Who gives `session_no` means that very session: it may have been deleted, and another one may
    have its id since.
    """

    def add_entries(
        self, session: str, entries: Sequence[NewEntry], *, session_no: int | None = None
    ) -> list[int] | Occupied:
        """Append messages; nothing was added if a step is unfinished in the session."""

        def work(cursor: apsw.Cursor) -> list[int] | Occupied:
            held = occupant(cursor, self.name, session, session_no)
            if held is not None:
                return held
            _reserve_steps(cursor, entries)
            return insert_entries(cursor, session, entries)

        return self.write(work)

    def replace_entries(
        self,
        session: str,
        start: int,
        entries: Sequence[NewEntry],
        *,
        expected_count: int,
        session_no: int | None = None,
    ) -> bool:
        """Put repaired messages in the place of those from `start` on; False if it has changed.

        A summary that covers any of them says nothing true any more and goes with them.
        """

        def work(cursor: apsw.Cursor) -> bool:
            number, count = find_session(cursor, session, session_no)
            if count != expected_count or occupant(cursor, self.name, session) is not None:
                return False
            low = number << SEQ_BITS
            cursor.execute(
                "DELETE FROM history_entries WHERE id BETWEEN ? AND ?",
                (low | start, low | SEQ_MASK),
            )
            cursor.execute(
                "UPDATE history_entries SET summary_id = NULL WHERE id BETWEEN ? AND ? AND"
                " summary_id >= (SELECT min(summary_id) FROM summaries"
                " WHERE session_no = ? AND end_id > ?)",
                (low, low | SEQ_MASK, number, start),
            )
            cursor.execute(
                "DELETE FROM summaries WHERE session_no = ?1 AND summary_id >="
                " (SELECT min(summary_id) FROM summaries WHERE session_no = ?1 AND end_id > ?2)",
                (number, start),
            )
            _recount(cursor, number)
            insert_entries(cursor, session, entries)
            return True

        return self.write(work)

    def pop_entry(
        self, session: str, entry_id: int, *, session_no: int | None = None
    ) -> EntryRow | Occupied | None:
        """Take back the last entry if it is this one, unsummarised and from no step."""

        def work(cursor: apsw.Cursor) -> EntryRow | Occupied | None:
            held = occupant(cursor, self.name, session, session_no)
            if held is not None:
                return held
            number, count = find_session(cursor, session)
            if entry_id != count - 1:
                return None
            found = _entries(cursor, number, entry_id, entry_id + 1, 1)
            if not found or found[0].summary_id is not None or found[0].stream_step_id is not None:
                return None
            row = found[0]
            cursor.execute(
                "DELETE FROM history_entries WHERE id = ?", (number << SEQ_BITS | entry_id,)
            )
            before = _entries(cursor, number, entry_id - 1, entry_id, 1) if entry_id else []
            cursor.execute(
                f"{TOUCH}, entries = entries - 1, tokens = tokens - ?, last_status = ?"
                " WHERE session_no = ?",
                (
                    time.time_ns() // 1000,
                    row.token_count or 0,
                    before[0].status if before else None,
                    number,
                ),
            )
            return row

        return self.write(work)

    def entries(self, session_no: int, start: int, stop: int, limit: int) -> list[EntryRow]:
        """A page of entries [start, stop), in order."""
        return self.read(lambda cursor: _entries(cursor, session_no, start, stop, limit))

    def has_step(self, session_no: int, step_id: int) -> bool:
        """Whether an entry of this session came from this step."""

        def work(cursor: apsw.Cursor) -> bool:
            rows = cursor.execute(
                "SELECT id FROM history_entries WHERE stream_step_id = ?", (step_id,)
            )
            return any(key >> SEQ_BITS == session_no for (key,) in rows)

        return self.read(work)

    def uncounted(self, session_no: int, limit: int, *, after: int = -1) -> list[int]:
        """Entries behind `after` whose tokens nobody has counted yet, oldest first."""
        low = session_no << SEQ_BITS

        def work(cursor: apsw.Cursor) -> list[int]:
            rows: Any = cursor.execute(
                "SELECT id FROM history_entries INDEXED BY entries_uncounted"
                " WHERE token_count IS NULL AND id BETWEEN ? AND ? ORDER BY id LIMIT ?",
                (low + after + 1, low | SEQ_MASK, limit),
            )
            return [key & SEQ_MASK for (key,) in rows]

        return self.read(work)

    def set_token_counts(
        self,
        session: str,
        counts: Sequence[tuple[int, int, str]],
        *,
        session_no: int | None = None,
    ) -> None:
        """Fill in (entry_id, count, counter) of entries, and the session's total with them."""

        def work(cursor: apsw.Cursor) -> None:
            number, _ = find_session(cursor, session, session_no)
            for entry_id, count, counter in counts:
                key = number << SEQ_BITS | entry_id
                row = cursor.execute(
                    "SELECT token_count FROM history_entries WHERE id = ?", (key,)
                ).fetchone()
                if row is None:
                    continue
                cursor.execute(
                    "UPDATE history_entries SET token_count = ?, counter = ? WHERE id = ?",
                    (count, counter, key),
                )
                cursor.execute(
                    "UPDATE sessions SET tokens = tokens + ? WHERE session_no = ?",
                    (count - (row[0] or 0), number),
                )

        self.write(work)


def occupant(
    cursor: apsw.Cursor, store: str, session: str, session_no: int | None = None
) -> Occupied | None:
    """The unfinished step of a session, which is its one writer; raises if there is no session."""
    found = cursor.execute(
        "SELECT (SELECT step_id FROM step_metadata WHERE session = ?1"
        " AND state IN ('open', 'sealed')), (SELECT owner FROM step_metadata WHERE session = ?1"
        " AND state IN ('open', 'sealed')) FROM sessions WHERE session_id = ?1"
        " AND session_no = ifnull(?2, session_no)",
        (session, session_no),
    ).fetchone()
    if found is None:
        raise SessionNotFound(store, session, "no such session (any more); nothing was written")
    return None if found[0] is None else Occupied(*found)


def insert_entries(cursor: apsw.Cursor, session: str, entries: Sequence[NewEntry]) -> list[int]:
    """Append messages to a session and count them; the caller has the transaction."""
    if not entries:
        return []
    session_no, first = find_session(cursor, session)
    for entry_id, entry in enumerate(entries, first):
        key = session_no << SEQ_BITS | entry_id
        checked = (
            entry.role,
            entry.body,
            entry.status,
            entry.created_us,
            entry.stream_step_id,
            entry.part,
            entry.model_name,
            entry.stop_reason,
            entry.usage,
            entry.metadata,
        )
        try:
            cursor.execute(
                f"INSERT INTO history_entries (id, {CHECKED}, crc, token_count, counter,"
                " summary_id) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    key,
                    *checked,
                    row_crc(key, *checked),
                    entry.token_count,
                    entry.counter,
                    entry.summary_id,
                ),
            )
        except apsw.ConstraintError as error:
            raise StepClosed(
                _name(cursor),
                entry.stream_step_id or 0,
                "is in history already; nothing was written",
            ) from error
    tokens = sum(entry.token_count or 0 for entry in entries)
    summarized = sum(entry.summary_id is not None for entry in entries)
    cursor.execute(
        f"{TOUCH}, entries = entries + ?, tokens = tokens + ?, summarized = summarized + ?,"
        " last_status = ? WHERE session_no = ?",
        (
            entries[-1].created_us,
            len(entries),
            tokens,
            summarized,
            entries[-1].status,
            session_no,
        ),
    )
    return list(range(first, first + len(entries)))


def find_session(
    cursor: apsw.Cursor, session: str, session_no: int | None = None
) -> tuple[int, int]:
    """Number and entries of a session; raises if there is none, or not this very one."""
    row = cursor.execute(
        "SELECT session_no, entries FROM sessions"
        " WHERE session_id = ?1 AND session_no = ifnull(?2, session_no)",
        (session, session_no),
    ).fetchone()
    if row is None:
        raise SessionNotFound(
            _name(cursor), session, "no such session (any more); nothing was written"
        )
    return row[0], row[1]


def _name(cursor: apsw.Cursor) -> str:
    return cursor.connection.filename or ":memory:"


def _reserve_steps(cursor: apsw.Cursor, entries: Sequence[NewEntry]) -> None:
    """See that no step to come gets an id that a message pushed by hand names as its own.

    It could never be settled: its place in history would be taken.
    """
    for entry in entries:
        if entry.stream_step_id is None:
            continue
        cursor.execute(
            "UPDATE step_counter SET next_step_id = max(next_step_id, ?)",
            (entry.stream_step_id + 1,),
        )
        unfinished = cursor.execute(
            "SELECT session FROM step_metadata WHERE step_id = ? AND session IS NOT NULL"
            " AND state IN ('open', 'sealed')",
            (entry.stream_step_id,),
        ).fetchone()
        if unfinished is not None:
            raise StepBusy(
                _name(cursor),
                entry.stream_step_id,
                f"is unfinished in session {unfinished[0]!r}; nothing was written: commit it there",
            )


def _recount(cursor: apsw.Cursor, session_no: int) -> None:
    low = session_no << SEQ_BITS
    cursor.execute(
        "UPDATE sessions SET (entries, tokens, summarized) = (SELECT count(*),"
        " ifnull(sum(token_count), 0), count(summary_id) FROM history_entries"
        " WHERE id BETWEEN ?1 AND ?2), summaries = (SELECT count(*) FROM summaries"
        " WHERE session_no = ?3) WHERE session_no = ?3",
        (low, low | SEQ_MASK, session_no),
    )


def _entries(
    cursor: apsw.Cursor, session_no: int, start: int, stop: int, limit: int
) -> list[EntryRow]:
    low = session_no << SEQ_BITS
    rows = select(
        cursor,
        f"id, {CHECKED}, crc, token_count, counter, summary_id",
        "FROM history_entries WHERE id >= ? AND id < ? ORDER BY id LIMIT ?",
        (low | start, low | min(stop, SEQ_MASK), limit),
    )
    refuse_disorder([row[0] for row in rows], low | start)
    return [
        EntryRow._make((row[0] & SEQ_MASK, *row[1:11], *row[12:15], row[11] == row_crc(*row[:11])))
        for row in rows
    ]
