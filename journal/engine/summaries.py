"""Operations on summaries: what stands for a range of entries. Each is one transaction."""

from __future__ import annotations

from collections.abc import Callable

import apsw

from holdfast.journal.engine.checks import row_crc
from holdfast.journal.engine.core import Core
from holdfast.journal.engine.history import TOUCH, find_session
from holdfast.journal.engine.rows import SummaryRow
from holdfast.journal.engine.scan import select
from holdfast.journal.engine.schema import SEQ_BITS, SEQ_MASK

SUMMARY_COLUMNS = (
    "start_id, end_id, content, token_count, original_tokens, created_us, generated_by"
)


class SummaryOperations(Core):
    """The summaries of a session, and the entries they stand for."""

    def add_summary(
        self,
        session: str,
        summary: SummaryRow,
        check: Callable[[int], None],
        *,
        session_no: int | None = None,
    ) -> int:
        """Let a summary stand for a range; `check` gets the number of entries and may raise."""

        def work(cursor: apsw.Cursor) -> int:
            number, count = find_session(cursor, session, session_no)
            check(count)
            return insert_summary(cursor, number, summary)

        return self.write(work)

    def summaries(self, session_no: int) -> list[SummaryRow]:
        """A session's summaries, oldest first."""

        def work(cursor: apsw.Cursor) -> list[SummaryRow]:
            rows = select(
                cursor,
                f"summary_id, {SUMMARY_COLUMNS}, crc",
                "FROM summaries WHERE session_no = ? ORDER BY summary_id",
                (session_no,),
            )
            return [
                SummaryRow._make((*row[:-1], row[-1] == row_crc(session_no, *row[:-1])))
                for row in rows
            ]

        return self.read(work)

    def summaries_in_use(self, session_no: int) -> set[int]:
        """Summaries that at least one entry points to."""
        low = session_no << SEQ_BITS

        def work(cursor: apsw.Cursor) -> set[int]:
            rows = cursor.execute(
                "SELECT DISTINCT summary_id FROM history_entries"
                " WHERE id BETWEEN ? AND ? AND summary_id IS NOT NULL",
                (low, low | SEQ_MASK),
            )
            return {summary_id for (summary_id,) in rows}

        return self.read(work)


def insert_summary(
    cursor: apsw.Cursor, session_no: int, summary: SummaryRow, *, point: bool = True
) -> int:
    """Store a summary and point its entries to it; the caller has the transaction.

    Entries that come with their summary, as imported ones do, are not pointed to it again.
    """
    summary_id = int(
        cursor.execute("SELECT summaries FROM sessions WHERE session_no = ?", (session_no,)).get
    )
    columns = (
        summary.start_id,
        summary.end_id,
        summary.content,
        summary.token_count,
        summary.original_tokens,
        summary.created_us,
        summary.generated_by,
    )
    cursor.execute(
        f"INSERT INTO summaries (session_no, summary_id, {SUMMARY_COLUMNS}, crc)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (session_no, summary_id, *columns, row_crc(session_no, summary_id, *columns)),
    )
    low = session_no << SEQ_BITS
    fresh = 0
    if point:
        fresh = int(
            cursor.execute(
                "SELECT count(*) FROM history_entries"
                " WHERE id >= ? AND id < ? AND summary_id IS NULL",
                (low | summary.start_id, low | summary.end_id),
            ).get
        )
        cursor.execute(
            "UPDATE history_entries SET summary_id = ? WHERE id >= ? AND id < ?",
            (summary_id, low | summary.start_id, low | summary.end_id),
        )
    cursor.execute(
        f"{TOUCH}, summaries = summaries + 1, summarized = summarized + ? WHERE session_no = ?",
        (summary.created_us, fresh, session_no),
    )
    return summary_id
