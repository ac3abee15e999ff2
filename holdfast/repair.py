"""Repair: make a stored history legal, for sessions that were imported or made by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from holdfast.history.archive import whole_entries
from holdfast.history.entries import HistoryEntry, microseconds_of, new_entry
from holdfast.history.full_history import FullHistory
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.journal.engine.history import Occupied
from holdfast.journal.engine.rows import NewEntry
from holdfast.journal.engine.steps import now_us
from holdfast.journal.messages import Message
from holdfast.journal.observers import StoreEvent
from holdfast.recovery.pairing import normalize, validate
from holdfast.recovery.validation import ValidationReport


def repair_session(
    engine: SqliteEngine,
    session_id: str,
    history: FullHistory,
    make_way: Callable[[Occupied], None],
) -> ValidationReport:
    """Store a normalisation of a session in one transaction; what was wrong before.

    A damaged entry is not thrown away with what follows it: it raises, and nothing is changed.
    """
    engine.admit()
    while True:
        count = len(history)
        entries = list(whole_entries(history, count))
        messages = [entry.message for entry in entries]
        report = validate(messages)
        if report.is_valid:
            return report
        start, repaired = _repaired(entries, normalize(messages))
        # What was read must be what is replaced: nothing may have come to it since.
        if len(entries) == count and engine.replace_entries(
            session_id,
            start,
            repaired,
            expected_count=count,
            session_no=history.row().session_no,
        ):
            if engine.observer is not None:
                engine.observer(StoreEvent("rewrite", session_id=session_id))
            return report
        for row in engine.unfinished(session=session_id):
            make_way(Occupied(row.step_id, row.owner))


def _repaired(entries: list[HistoryEntry], messages: list[Message]) -> tuple[int, list[NewEntry]]:
    """The first id that changes, and what stands from there on.

    What did not change keeps its facts.
    """
    start = 0
    while start < min(len(entries), len(messages)) and entries[start].message == messages[start]:
        start += 1
    # By identity: equal messages of two turns are two messages, and each has its own facts.
    left = {id(entry.message): entry for entry in entries[start:]}
    repaired = []
    for message in messages[start:]:
        known = left.get(id(message))
        if known is None:
            facts: dict[str, Any] = {"created_us": now_us(), "metadata": '{"repaired": true}'}
        else:
            facts = _facts(known)
        repaired.append(new_entry(message, **facts))
    return start, repaired


def _facts(entry: HistoryEntry) -> dict[str, Any]:
    step_id = entry.stream_step_id
    return {
        "created_us": microseconds_of(entry.created_at),
        "status": entry.status,
        "stream_step_id": step_id,
        "part": None if step_id is None else int(entry.message.role != "assistant"),
        "model_name": entry.model_name,
        "stop_reason": entry.stop_reason,
        "usage": None if entry.usage is None else json.dumps(entry.usage, ensure_ascii=False),
        "metadata": json.dumps(entry.metadata, ensure_ascii=False),
        "token_count": entry.token_count,
        "counter": entry.counter,
    }
