"""Reading events back: each with the verdict of its crc, and none hidden by a damaged neighbour."""

from __future__ import annotations

from typing import Any

import apsw

from holdfast.journal.engine.checks import event_crc
from holdfast.journal.engine.rows import EventRow
from holdfast.journal.engine.scan import raw, refuse_disorder, text
from holdfast.journal.engine.schema import SEQ_MASK


def read_events(cursor: apsw.Cursor, after: int, high: int, limit: int) -> list[EventRow]:
    """The next events behind the key `after`, up to and with `high`."""
    sql = (
        "SELECT id, {0}, call, {1}, crc FROM stream_journal"
        " WHERE id > ? AND id <= ? ORDER BY id LIMIT ?"
    )
    bindings = (after, high, limit)
    page: Any
    try:
        page = cursor.execute(sql.format("event_type", "content"), bindings).fetchall()
    except UnicodeDecodeError:
        page = cursor.execute(sql.format(raw("event_type"), raw("content")), bindings).fetchall()
        page = [(row[0], text(row[1]), *row[2:]) for row in page]
    refuse_disorder([row[0] for row in page], after + 1)
    return [
        EventRow(key & SEQ_MASK, kind, call, content, is_sound(key, kind, call, content, crc))
        for key, kind, call, content, crc in page
    ]


def is_sound(key: int, kind: object, call: object, content: object, crc: object) -> bool:
    """Whether an event is as it was written; damaged, each column may be of any type."""
    data = content.encode() if isinstance(content, str) else content
    if not isinstance(data, bytes) or not isinstance(kind, str):
        return False
    if call is not None and not isinstance(call, int):
        return False
    return event_crc(key, kind, call, data) == crc
