"""Archives: one session as one JSON file, in the form that other tools know as `history.json`.

ON DISK (one JSON object)
    entries            [{id, message {role, content}, token_count, summary_id, created_at,
                         stream_step_id?}]; ids run 0, 1, 2 ...
    summaries          [{id, covers {start, end}, content, token_count, original_tokens,
                         created_at, generated_by}]; ids run 0, 1, 2 ...
    next_message_id    how many entries there are
    next_summary_id    how many summaries there are
    a moment           {secs_since_epoch, nanos_since_epoch}

Content that is one plain text is that text, else a list of blocks.  Where we know more than the
form has a place for, more fields stand there (`session`; an entry's status, model_name, ...):
other readers pass over them, and they may be missing.

An archive is valid if and only if the six rules of `archive_reader` hold; another one is refused
with the field and the index, and nothing is imported.  A step id is of the store that gave it out,
so it is kept as a note (metadata.imported_step_id) and never as the id of a step here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from holdfast.history.archive_reader import read_archive
from holdfast.history.atomic_file import atomic_file, refuse_store_files
from holdfast.history.entries import HistoryEntry, Summary, microseconds_of
from holdfast.history.full_history import FullHistory
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.journal.engine.rows import NewEntry, SummaryRow
from holdfast.journal.errors import ExportFailed
from holdfast.journal.messages import Message, Text

S_co = TypeVar("S_co", covariant=True)


class Exportable(Protocol):
    """What an export wants of a session."""

    @property
    def id(self) -> str:
        """Its name."""

    @property
    def history(self) -> FullHistory:
        """Its messages."""


class ImportTarget(Protocol[S_co]):
    """What an import wants of a store."""

    @property
    def engine(self) -> SqliteEngine:
        """Where the rows go."""

    def put_session(
        self,
        session_id: str | None,
        *,
        model: str | None = None,
        provider: str | None = None,
        title: str | None = None,
        metadata: dict[str, Any] | None = None,
        entries: Sequence[NewEntry] = (),
        summaries: Sequence[SummaryRow] = (),
    ) -> S_co:
        """Make a session with its history in one transaction."""


def export_history(session: Exportable, path: str | os.PathLike[str]) -> None:
    """Write a session to `path`, whole or not at all; a file that stood there is replaced.

    Messages that are added meanwhile are not in it.  A damaged entry is not passed over: the
    export is refused, and the old file stays.
    """
    history = session.history
    refuse_store_files(path)
    history.fill_in_counts()
    row = history.row()
    summaries = history.summaries()
    facts = {
        "id": row.session_id,
        "title": row.title,
        "provider": row.provider,
        "model": row.model,
        "metadata": json.loads(row.metadata),
    }
    with atomic_file(path) as file:
        file.write('{"entries": [')
        count = 0
        for entry in whole_entries(history, row.entries):
            file.write(",\n" if count else "\n")
            file.write(_json(_entry(entry, history, summaries)))
            count += 1
        if any(summary.covers.stop > count for summary in summaries):
            raise ExportFailed(
                os.fspath(path),
                f"session {session.id!r} was repaired meanwhile; what stood there before is as it"
                " was: export again",
            )
        file.write('\n],\n"summaries": [')
        file.write(",".join("\n" + _json(_summary(summary)) for summary in summaries))
        file.write(f'\n],\n"next_message_id": {count},\n"next_summary_id": {len(summaries)},\n')
        file.write(f'"session": {_json(facts)}\n}}\n')


def import_history(
    store: ImportTarget[S_co], path: str | os.PathLike[str], session_id: str | None = None
) -> S_co:
    """Make a session from the archive at `path`: all of it, in one transaction, or nothing.

    Without a `session_id` it gets a new one, whatever it was called where it came from.
    """
    store.engine.admit()
    refuse_store_files(path)
    archive = read_archive(Path(path))
    return store.put_session(
        session_id,
        model=archive.model,
        provider=archive.provider,
        title=archive.title,
        metadata=archive.metadata,
        entries=archive.entries,
        summaries=archive.summaries,
    )


def whole_entries(history: FullHistory, count: int) -> Iterator[HistoryEntry]:
    """The first `count` entries without a hole: a damaged one raises, one taken back ends them."""
    expected = 0
    for entry in history.entries(0, count):
        if entry.id != expected:
            history.get_entry(expected)  # Says what is wrong with it.
        yield entry
        expected += 1
    if expected < min(count, len(history)):
        history.get_entry(expected)


def _entry(
    entry: HistoryEntry, history: FullHistory, summaries: Sequence[Summary]
) -> dict[str, Any]:
    tokens = entry.token_count
    if tokens is None:
        tokens, _ = history.count(entry.message)  # Where it could be counted and not stored.
    fields = {
        "id": entry.id,
        "message": _message(entry.message),
        "token_count": tokens,
        "summary_id": _summary_in(entry, summaries),
        "created_at": _moment(microseconds_of(entry.created_at)),
    }
    step_id = entry.stream_step_id
    if step_id is None:
        step_id = entry.metadata.get("imported_step_id")
    more = {
        "stream_step_id": step_id,
        "status": None if entry.status == "complete" else entry.status,
        "model_name": entry.model_name,
        "stop_reason": entry.stop_reason,
        "usage": entry.usage,
        "metadata": entry.metadata or None,
        "counter": entry.counter,
    }
    return {**fields, **{name: value for name, value in more.items() if value is not None}}


def _summary_in(entry: HistoryEntry, summaries: Sequence[Summary]) -> int | None:
    """Its summary, or the newest before it: one made since the export began is not in the file."""
    if entry.summary_id is None or entry.summary_id < len(summaries):
        return entry.summary_id
    return max((s.id for s in summaries if entry.id in s.covers), default=None)


def _message(message: Message) -> dict[str, Any]:
    content: Any = [block.model_dump(mode="json") for block in message.content]
    match message.content:
        case [Text(text=text, signature=None)]:
            content = text
    fields = {"role": message.role, "content": content}
    return {**fields, "metadata": message.metadata} if message.metadata else fields


def _summary(summary: Summary) -> dict[str, Any]:
    return {
        "id": summary.id,
        "covers": {"start": summary.covers.start, "end": summary.covers.stop},
        "content": summary.content,
        "token_count": summary.token_count,
        "original_tokens": summary.original_tokens,
        "created_at": _moment(microseconds_of(summary.created_at)),
        "generated_by": summary.generated_by,
    }


def _moment(microseconds: int) -> dict[str, int]:
    seconds, rest = divmod(microseconds, 1_000_000)
    return {"secs_since_epoch": seconds, "nanos_since_epoch": rest * 1000}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
