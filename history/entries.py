"""What history holds: an entry a message, and summaries that stand for ranges of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NewType, overload

from holdfast.journal.engine.rows import EntryRow, NewEntry, SummaryRow
from holdfast.journal.messages import Message, message_from_json, message_to_json

MessageId = NewType("MessageId", int)
SummaryId = NewType("SummaryId", int)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One message in history, with what is known of it. `status` says how its step ended."""

    id: MessageId
    message: Message
    token_count: int | None
    created_at: datetime
    status: str
    stream_step_id: int | None
    summary_id: SummaryId | None
    model_name: str | None
    stop_reason: str | None
    usage: dict[str, Any] | None
    metadata: dict[str, Any]
    counter: str | None = None  # who counted the tokens: another counter may differ

    @property
    def is_summarized(self) -> bool:
        """Whether a summary stands for it."""
        return self.summary_id is not None


@dataclass(frozen=True, slots=True)
class Summary:
    """What stands for the entries `covers`, a half-open range, in a smaller window."""

    id: SummaryId
    covers: range
    content: str
    token_count: int
    original_tokens: int
    created_at: datetime
    generated_by: str

    def compression_ratio(self) -> float:
        """Tokens of the summary over those of its originals; 1.0 where these had none."""
        return self.token_count / self.original_tokens if self.original_tokens else 1.0

    def tokens_saved(self) -> int:
        """How many tokens the summary saves, never less than 0."""
        return max(0, self.original_tokens - self.token_count)


def entry_of(row: EntryRow) -> HistoryEntry:
    """Read an entry whose crc has been found good."""
    return HistoryEntry(
        id=MessageId(row.entry_id),
        message=message_from_json(row.body),
        token_count=row.token_count,
        created_at=time_of(row.created_us),
        status=row.status,
        stream_step_id=row.stream_step_id,
        summary_id=None if row.summary_id is None else SummaryId(row.summary_id),
        model_name=row.model_name,
        stop_reason=row.stop_reason,
        usage=None if row.usage is None else json.loads(row.usage),
        metadata=json.loads(row.metadata),
        counter=row.counter,
    )


def summary_of(row: SummaryRow) -> Summary:
    """Read a summary whose crc has been found good."""
    return Summary(
        id=SummaryId(row.summary_id),
        covers=range(row.start_id, row.end_id),
        content=row.content,
        token_count=row.token_count,
        original_tokens=row.original_tokens,
        created_at=time_of(row.created_us),
        generated_by=row.generated_by,
    )


def new_entry(message: Message, *, created_us: int, **facts: Any) -> NewEntry:
    """Make a message ready to be stored."""
    return NewEntry(
        role=message.role, body=message_to_json(message), created_us=created_us, **facts
    )


def time_of(microseconds: int) -> datetime:
    """An aware time in UTC, without rounding; 1970 where a damaged one is no time at all."""
    try:
        return EPOCH + timedelta(microseconds=microseconds)
    except (OverflowError, TypeError):
        return EPOCH


def microseconds_of(moment: datetime) -> int:
    """The inverse of `time_of`."""
    return (moment - EPOCH) // timedelta(microseconds=1)


class EntryRange(Sequence[HistoryEntry]):
    """Entries [start, stop), read from the store a page at a time as they are asked for.

    Iterating passes over a damaged entry, which is told; asking for it by its index raises.
    """

    def __init__(
        self,
        pages: Callable[[int, int], Iterator[HistoryEntry]],
        get: Callable[[int], HistoryEntry],
        bounds: range,
    ) -> None:
        self._pages = pages
        self._get = get
        self._bounds = bounds

    def __len__(self) -> int:
        return len(self._bounds)

    def __iter__(self) -> Iterator[HistoryEntry]:
        if self._bounds.step == 1:
            yield from self._pages(self._bounds.start, self._bounds.stop)
        else:
            for entry_id in self._bounds:
                yield from self._pages(entry_id, entry_id + 1)

    def __reversed__(self) -> Iterator[HistoryEntry]:
        return iter(self[::-1])

    @overload
    def __getitem__(self, index: int) -> HistoryEntry: ...
    @overload
    def __getitem__(self, index: slice) -> EntryRange: ...
    def __getitem__(self, index: int | slice) -> HistoryEntry | EntryRange:
        if isinstance(index, slice):
            return EntryRange(self._pages, self._get, self._bounds[index])
        return self._get(self._bounds[index])

    def __repr__(self) -> str:
        return f"<entries {self._bounds.start} to {self._bounds.stop}>"
