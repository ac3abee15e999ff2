"""Step ids: rising for the life of a file, and never given out twice."""

from __future__ import annotations

import apsw

from holdfast.journal.engine.schema import STEP_ID_MAX
from holdfast.journal.errors import StoreCorrupt


def give_step_id(cursor: apsw.Cursor, store: str) -> int:
    """A new step's id; the caller has the transaction."""
    step_id = next_step_id(cursor, store)
    cursor.execute("UPDATE step_counter SET next_step_id = ?", (step_id + 1,))
    return step_id


def next_step_id(cursor: apsw.Cursor, store: str) -> int:
    """The step id to be given out next."""
    found = cursor.execute("SELECT next_step_id FROM step_counter WHERE id = 1").get
    if not isinstance(found, int) or not 0 < found <= STEP_ID_MAX:
        raise StoreCorrupt(
            store,
            f"its counter of step ids is damaged (it says {found}); nothing was written: run"
            " doctor, then salvage into a new store",
        )
    return found
