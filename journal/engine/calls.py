"""Operations on tool calls: batches, starts, processes, results. Each is one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import apsw

from holdfast.journal.engine.checks import row_crc
from holdfast.journal.engine.core import Core
from holdfast.journal.engine.rows import CallRow, ResultRow, SealedCall
from holdfast.journal.engine.scan import select
from holdfast.journal.engine.schema import SEQ_BITS
from holdfast.journal.engine.step_ids import give_step_id
from holdfast.journal.engine.steps import (
    APPEND,
    EventRecord,
    event_record,
    insert_calls,
    now_us,
)

CALL_COLUMNS = ", ".join(CallRow._fields)


class CallOperations(Core):
    """What a step asked for, whether it was started, what came back."""

    def begin_batch(
        self,
        *,
        model_name: str | None,
        nonce: str,
        assistant_text: str,
        announce: Sequence[tuple[str, int, str]],
        calls: Sequence[SealedCall],
    ) -> int:
        """Begin a batch with all its calls known: `announce` is (event kind, call, content)."""

        def work(cursor: apsw.Cursor) -> int:
            step_id = give_step_id(cursor, self.name)
            cursor.execute(
                "INSERT INTO step_metadata"
                " (step_id, session, kind, owner, model_name, state, nonce, begun_us)"
                " VALUES (?, NULL, 'batch', ?, ?, 'open', ?, ?)",
                (step_id, self.owner_id, model_name, nonce, now_us()),
            )
            cursor.execute("INSERT INTO tool_batches VALUES (?, ?)", (step_id, assistant_text))
            records: list[EventRecord] = [
                event_record(step_id << SEQ_BITS | seq, kind, call, content)
                for seq, (kind, call, content) in enumerate(announce, 1)
            ]
            cursor.executemany(APPEND, records)
            insert_calls(cursor, step_id, calls)
            return step_id

        return self.write(work)

    def set_batch_text(self, step_id: int, text: str) -> bool:
        """Replace what was said beside a batch's calls; False if there is no such batch."""

        def work(cursor: apsw.Cursor) -> bool:
            cursor.execute(
                "UPDATE tool_batches SET assistant_text = ? WHERE step_id = ?", (text, step_id)
            )
            return self._db.changes() > 0

        return self.write(work)

    def batch_text(self, step_id: int) -> str | None:
        """What was said beside a batch's calls."""

        def work(cursor: apsw.Cursor) -> str | None:
            row = cursor.execute(
                "SELECT assistant_text FROM tool_batches WHERE step_id = ?", (step_id,)
            ).fetchone()
            return None if row is None else str(row[0])

        return self.read(work)

    def start_call(self, step_id: int, call: SealedCall, *, replay: str) -> None:
        """The call is about to run. The first start stands."""

        def work(cursor: apsw.Cursor) -> None:
            insert_calls(cursor, step_id, [call])
            cursor.execute(
                "UPDATE tool_calls SET state = 'started', replay = ?, started_us = ?"
                " WHERE step_id = ? AND position = ? AND state = 'ready'",
                (replay, now_us(), step_id, call.position),
            )

        self.write(work)

    def record_process(
        self, step_id: int, position: int, *, pid: int, started: str
    ) -> tuple[int, str]:
        """A child runs the call. The first one stands; answers with the one on record."""

        def work(cursor: apsw.Cursor) -> tuple[int, str]:
            cursor.execute(
                "UPDATE tool_calls SET process_id = ?, process_started = ?"
                " WHERE step_id = ? AND position = ? AND process_id IS NULL",
                (pid, started, step_id, position),
            )
            found: Any = cursor.execute(
                "SELECT process_id, process_started FROM tool_calls"
                " WHERE step_id = ? AND position = ?",
                (step_id, position),
            ).fetchone()
            return found[0], found[1]

        return self.write(work)

    def put_result(self, step_id: int, call: SealedCall, body: str) -> str:
        """The call is answered. The first answer stands; answers with the one on record."""

        def work(cursor: apsw.Cursor) -> str:
            insert_calls(cursor, step_id, [call])
            cursor.execute(
                "INSERT OR IGNORE INTO tool_results VALUES (?, ?, ?, ?, ?)",
                (step_id, call.position, body, row_crc(step_id, call.position, body), now_us()),
            )
            return str(
                cursor.execute(
                    "SELECT body FROM tool_results WHERE step_id = ? AND position = ?",
                    (step_id, call.position),
                ).get
            )

        return self.write(work)

    def calls(self, step_id: int) -> list[CallRow]:
        """The sealed calls of a step, in order."""

        def work(cursor: apsw.Cursor) -> list[CallRow]:
            rest = "FROM tool_calls WHERE step_id = ? ORDER BY position"
            rows = select(cursor, CALL_COLUMNS, rest, (step_id,))
            return [CallRow(*row) for row in rows]

        return self.read(work)

    def results(self, step_id: int) -> list[ResultRow]:
        """The results of a step, in the order of its calls."""

        def work(cursor: apsw.Cursor) -> list[ResultRow]:
            rows = select(
                cursor,
                "position, body, crc",
                "FROM tool_results WHERE step_id = ? ORDER BY position",
                (step_id,),
            )
            return [
                ResultRow(position, body, crc == row_crc(step_id, position, body))
                for position, body, crc in rows
            ]

        return self.read(work)
