"""Reading an archive: what other programs wrote is checked here, once, field by field.

The six rules, each refused with the field and the index:

    1  the ids of entries run 0, 1, 2 ...        4  next_summary_id is the number of summaries
    2  the ids of summaries run 0, 1, 2 ...      5  a summary covers entries that are there
    3  next_message_id is the number of entries  6  an entry's summary is there and covers it
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from holdfast.history.entries import new_entry
from holdfast.journal.engine.rows import NewEntry, SummaryRow
from holdfast.journal.errors import ArchiveNotFound, InvalidArchive, InvalidMessage
from holdfast.journal.jsontext import NotJson, clean_object, clean_text
from holdfast.journal.messages import Message

STATUSES = ("complete", "errored", "interrupted")
NUMBER_MAX = (1 << 53) - 1
# The end of the year 9999: what Python can name as a date.
SECONDS_MAX = 253_402_300_799


@dataclass(frozen=True, slots=True)
class Archive:
    """A checked archive, ready to be stored."""

    entries: list[NewEntry]
    summaries: list[SummaryRow]
    title: str | None
    provider: str | None
    model: str | None
    metadata: dict[str, Any]


def read_archive(path: Path) -> Archive:
    """Read and check an archive; raises `InvalidArchive` with the first field that is wrong."""
    try:
        archive = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ArchiveNotFound(path) from None
    except OSError as error:
        raise InvalidArchive(path, "the file", f"cannot be read: {error}") from error
    except RecursionError:
        raise InvalidArchive(path, "the file", "is nested too deeply") from None
    except ValueError as error:
        raise InvalidArchive(path, "the file", f"is no JSON: {error}") from None
    return _Reader(path).archive(archive)


class _Reader:
    """Knows which file it reads, so that every refusal names it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def archive(self, archive: Any) -> Archive:
        top = self._object("the file", archive)
        entries = self._list("entries", top)
        rows = self._list("summaries", top)
        summaries = [self._summary(i, row, len(entries)) for i, row in enumerate(rows)]
        read = [self._entry(i, entry, summaries) for i, entry in enumerate(entries)]
        for name, count, what in (
            ("next_message_id", len(read), "entries"),
            ("next_summary_id", len(summaries), "summaries"),
        ):
            if self._number(name, top.get(name)) != count:
                self._refuse(name, f"is {top[name]}, expected {count}, the number of {what}")
        session = self._json_object("session", top.get("session") or {})
        return Archive(
            read,
            summaries,
            self._optional_text("session.title", session.get("title")),
            self._optional_text("session.provider", session.get("provider")),
            self._optional_text("session.model", session.get("model")),
            self._json_object("session.metadata", session.get("metadata") or {}),
        )

    def _entry(self, index: int, entry: Any, summaries: list[SummaryRow]) -> NewEntry:
        at = f"entries[{index}]"
        fields = self._object(at, entry)
        self._sequential(at, index, fields)
        status = fields.get("status", "complete")
        if status not in STATUSES:
            self._refuse(f"{at}.status", f"is {status!r}, expected one of {', '.join(STATUSES)}")
        tokens = fields.get("token_count")
        counter = self._optional_text(f"{at}.counter", fields.get("counter"))
        usage = fields.get("usage")
        metadata = self._json_object(f"{at}.metadata", fields.get("metadata") or {})
        step_id = fields.get("stream_step_id")
        if step_id is not None:
            metadata["imported_step_id"] = self._number(f"{at}.stream_step_id", step_id)
        return new_entry(
            self._message(f"{at}.message", fields.get("message")),
            created_us=self._moment(f"{at}.created_at", fields.get("created_at")),
            status=status,
            model_name=self._optional_text(f"{at}.model_name", fields.get("model_name")),
            stop_reason=self._optional_text(f"{at}.stop_reason", fields.get("stop_reason")),
            usage=None if usage is None else _dump(self._json_object(f"{at}.usage", usage)),
            metadata=_dump(metadata),
            token_count=None if tokens is None else self._number(f"{at}.token_count", tokens),
            counter=None if tokens is None else counter or "imported",
            summary_id=self._summary_id(f"{at}.summary_id", index, fields, summaries),
        )

    def _summary_id(
        self, at: str, index: int, fields: dict[str, Any], summaries: list[SummaryRow]
    ) -> int | None:
        given = fields.get("summary_id")
        if given is None:
            return None
        summary_id = self._number(at, given)
        if summary_id >= len(summaries):
            self._refuse(at, f"is {summary_id}, but there are {len(summaries)} summaries")
        summary = summaries[summary_id]
        if not summary.start_id <= index < summary.end_id:
            covers = f"[{summary.start_id}, {summary.end_id})"
            self._refuse(at, f"is {summary_id}, which covers {covers} and not entry {index}")
        return summary_id

    def _summary(self, index: int, summary: Any, entries: int) -> SummaryRow:
        at = f"summaries[{index}]"
        fields = self._object(at, summary)
        self._sequential(at, index, fields)
        covers = self._object(f"{at}.covers", fields.get("covers"))
        start = self._number(f"{at}.covers.start", covers.get("start"))
        end = self._number(f"{at}.covers.end", covers.get("end"))
        if not start < end <= entries:
            self._refuse(
                f"{at}.covers",
                f"is [{start}, {end}), expected a range that is not empty and within the"
                f" {entries} entries",
            )
        content = self._text(f"{at}.content", fields.get("content"))
        if not content.strip():
            self._refuse(f"{at}.content", "is empty, expected text")
        return SummaryRow(
            summary_id=index,
            start_id=start,
            end_id=end,
            content=content,
            token_count=self._number(f"{at}.token_count", fields.get("token_count")),
            original_tokens=self._number(f"{at}.original_tokens", fields.get("original_tokens")),
            created_us=self._moment(f"{at}.created_at", fields.get("created_at")),
            generated_by=self._text(f"{at}.generated_by", fields.get("generated_by")),
            valid=True,
        )

    def _sequential(self, at: str, index: int, fields: dict[str, Any]) -> None:
        if self._number(f"{at}.id", fields.get("id")) != index:
            self._refuse(f"{at}.id", f"is {fields['id']}, expected {index}: ids run without a gap")

    def _message(self, at: str, message: Any) -> Message:
        try:
            return Message.model_validate(self._object(at, message))
        except InvalidMessage as error:
            self._refuse(at, error.problem)

    def _moment(self, at: str, moment: Any) -> int:
        fields = self._object(at, moment)
        seconds = self._number(f"{at}.secs_since_epoch", fields.get("secs_since_epoch"))
        nanos = self._number(f"{at}.nanos_since_epoch", fields.get("nanos_since_epoch"))
        if seconds > SECONDS_MAX or nanos >= 1_000_000_000:
            self._refuse(at, f"is {seconds} s and {nanos} ns, which is no date")
        return seconds * 1_000_000 + nanos // 1000

    # --- plain values ---------------------------------------------------------------------------

    def _list(self, name: str, top: dict[str, Any]) -> list[Any]:
        found = top.get(name)
        if not isinstance(found, list):
            self._refuse(name, f"is {_kind(found)}, expected a list")
        return found

    def _object(self, at: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            self._refuse(at, f"is {_kind(value)}, expected an object")
        return value

    def _json_object(self, at: str, value: Any) -> dict[str, Any]:
        try:
            return clean_object(value)
        except NotJson as error:
            self._refuse(at, str(error))

    def _number(self, at: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            self._refuse(at, f"is {_kind(value)}, expected a whole number")
        if not 0 <= value <= NUMBER_MAX:
            self._refuse(at, f"is {value}, expected a number from 0 to {NUMBER_MAX}")
        return value

    def _text(self, at: str, value: Any) -> str:
        if not isinstance(value, str):
            self._refuse(at, f"is {_kind(value)}, expected text")
        return clean_text(value)

    def _optional_text(self, at: str, value: Any) -> str | None:
        return None if value is None else self._text(at, value)

    def _refuse(self, field: str, problem: str) -> NoReturn:
        raise InvalidArchive(self._path, field, problem)


def _kind(value: Any) -> str:
    """What stands there, in a few words: a whole transcript would be no help."""
    names = {dict: "an object", list: "a list", bool: "true or false", type(None): "missing"}
    return names.get(type(value)) or f"{value!r:.40}"


def _dump(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)
