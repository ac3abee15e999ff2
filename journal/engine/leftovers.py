"""Operations on many unfinished steps at once, for a pass over thousands. Each is one transaction.

What they do to one step is what `steps` does to it; only the number of transactions differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import apsw

from holdfast.journal.engine.core import Core
from holdfast.journal.engine.events import is_sound
from holdfast.journal.engine.rows import EventRow
from holdfast.journal.engine.schema import SEQ_BITS, SEQ_MASK
from holdfast.journal.engine.steps import delete_journal

SMALL_STEP_EVENTS = 64
CHARACTERS_A_READ = 4 << 20


class LeftoverOperations(Core):
    """What a pass does to many steps where doing it to each would cost a transaction each."""

    def small_streams(self, step_ids: Iterable[int]) -> dict[int, list[EventRow]]:
        """The events of steps that have few; the others are left out, to be read page by page.

        Reads no more than a few megabytes: what stands behind that is left out too.
        """

        def work(cursor: apsw.Cursor) -> dict[int, list[EventRow]]:
            found: dict[int, list[EventRow]] = {}
            characters = 0
            for step_id in step_ids:
                low = step_id << SEQ_BITS
                stream = []
                for key, kind, call, content, crc in cursor.execute(
                    "SELECT id, event_type, call, content, crc FROM stream_journal"
                    f" WHERE id BETWEEN ? AND ? ORDER BY id LIMIT {SMALL_STEP_EVENTS + 1}",
                    (low, low | SEQ_MASK),
                ):
                    valid = is_sound(key, kind, call, content, crc)
                    stream.append(EventRow(key & SEQ_MASK, kind, call, content, valid))
                    characters += len(content) if isinstance(content, str | bytes) else 0
                    if characters > CHARACTERS_A_READ:
                        return found
                if len(stream) <= SMALL_STEP_EVENTS:
                    found[step_id] = stream
            return found

        return self.read(work)

    def discard_many(self, step_ids: Sequence[int]) -> list[int]:
        """Forget unfinished steps of this owner, all in one transaction; those that went."""

        def work(cursor: apsw.Cursor) -> list[int]:
            gone = []
            for step_id in step_ids:
                mine = cursor.execute(
                    "SELECT 1 FROM step_metadata"
                    " WHERE step_id = ? AND owner = ? AND state IN ('open', 'sealed')",
                    (step_id, self.owner_id),
                ).fetchone()
                if mine is not None:
                    delete_journal(cursor, step_id)
                    cursor.execute("DELETE FROM step_metadata WHERE step_id = ?", (step_id,))
                    gone.append(step_id)
            return gone

        gone = self.write(work)
        self.tidy_log()
        return gone
