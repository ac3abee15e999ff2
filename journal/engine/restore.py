"""Operations that fill a new store with what was saved from another. Each is one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import apsw

from holdfast.journal.engine.calls import CALL_COLUMNS
from holdfast.journal.engine.checks import row_crc
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.journal.engine.rows import CallRow, ResultRow, StepRow
from holdfast.journal.engine.steps import APPEND, STEP_COLUMNS, EventRecord, now_us


class SessionTimes(NamedTuple):
    """When a session was changed, and its place in a listing."""

    session_id: str
    updated_us: int
    changed: int


class Restoration(SqliteEngine):
    """A new store that takes over rows as they were, with their ids."""

    def restore_step(
        self,
        row: StepRow,
        calls: Sequence[CallRow] = (),
        results: Sequence[ResultRow] = (),
        batch_text: str | None = None,
    ) -> None:
        """Put a step back under its own id, with what its calls have come to."""

        def work(cursor: apsw.Cursor) -> None:
            cursor.execute(
                f"INSERT INTO step_metadata ({STEP_COLUMNS}) VALUES ({_marks(len(row))})", row
            )
            cursor.executemany(
                f"INSERT INTO tool_calls (step_id, {CALL_COLUMNS})"
                f" VALUES ({_marks(1 + len(CallRow._fields))})",
                [(row.step_id, *call) for call in calls],
            )
            cursor.executemany(
                "INSERT INTO tool_results VALUES (?, ?, ?, ?, ?)",
                [
                    (row.step_id, at, body, row_crc(row.step_id, at, body), now_us())
                    for at, body, _ in results
                ],
            )
            if batch_text is not None:
                cursor.execute("INSERT INTO tool_batches VALUES (?, ?)", (row.step_id, batch_text))

        self.write(work)

    def restore_events(self, records: Sequence[EventRecord]) -> None:
        """Put events back where they stood."""
        self.write(lambda cursor: cursor.executemany(APPEND, records) and None)

    def restore_counters(self, next_step_id: int, sessions: Sequence[SessionTimes]) -> None:
        """Let no step id be given out twice, and sessions be listed in the order they had."""

        def work(cursor: apsw.Cursor) -> None:
            cursor.execute("UPDATE step_counter SET next_step_id = ?", (next_step_id,))
            cursor.executemany(
                "UPDATE sessions SET updated_us = ?2, changed = ?3 WHERE session_id = ?1", sessions
            )

        self.write(work)


def _marks(count: int) -> str:
    return ", ".join("?" * count)


__all__ = ["Restoration", "SessionTimes"]
