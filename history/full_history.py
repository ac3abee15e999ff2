"""FullHistory: one session's messages, append-only, read lazily from the store.

INVARIANT  Entry ids count 0, 1, 2 ... within a session.  A message that `push` returned for is on
           record; what a step has put here is never taken back.

Nothing is kept in memory: a session of a million entries opens and appends like one of ten.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

from holdfast.history.entries import (
    EntryRange,
    HistoryEntry,
    MessageId,
    Summary,
    SummaryId,
    entry_of,
    new_entry,
    summary_of,
)
from holdfast.history.tokens import TokenCounter, TokenCounting
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.journal.engine.history import Occupied
from holdfast.journal.engine.rows import EntryRow, SessionRow, SummaryRow
from holdfast.journal.engine.schema import SEQ_MASK, STEP_ID_MAX
from holdfast.journal.engine.steps import now_us
from holdfast.journal.errors import (
    EntryNotFound,
    InvalidArgument,
    InvalidMessage,
    SessionNotFound,
    StoreCorrupt,
    StoreError,
)
from holdfast.journal.jsontext import clean_text
from holdfast.journal.messages import Message, message_from_json
from holdfast.journal.observers import StoreEvent

T = TypeVar("T")
log = logging.getLogger("holdfast")
PAGE = 256
# What JSON readers everywhere can hold as a whole number.
NUMBER_MAX = (1 << 53) - 1
# Steps to come get ids above any that was given: a store must not run out of them.
STEP_ID_GIVEN_MAX = STEP_ID_MAX // 2


class FullHistory:
    """The settled side of one session."""

    def __init__(
        self,
        engine: SqliteEngine,
        session_id: str,
        session_no: int,
        *,
        make_way: Callable[[Occupied], None] | None = None,
        counter: TokenCounting | None = None,
    ) -> None:
        self.counter: TokenCounting = counter or TokenCounter()
        self._engine = engine
        self._session_id = session_id
        self._session_no = session_no
        self._make_way = make_way

    def __repr__(self) -> str:
        return f"<FullHistory of {self._session_id!r} in {self._engine.name}>"

    # --- writing --------------------------------------------------------------------------------

    def push(self, message: Message, token_count: int | None = None) -> MessageId:
        """Append a message; it is on record when this returns. Tokens are counted if not given."""
        return self._push(message, token_count, {})

    def push_with_step_id(
        self, message: Message, token_count: int | None, step_id: int
    ) -> MessageId:
        """Append a message that came from a step: what its assistant said, or its tools answered.

        The database itself refuses the same part of a step twice: `StepClosed`.
        """
        _check_number("step_id", step_id, STEP_ID_GIVEN_MAX)
        part = 0 if isinstance(message, Message) and message.role == "assistant" else 1
        return self._push(message, token_count, {"stream_step_id": step_id, "part": part})

    def _push(self, message: Message, token_count: int | None, facts: dict[str, int]) -> MessageId:
        if not isinstance(message, Message):
            raise InvalidMessage(
                f"expected a Message, not {type(message).__name__}; nothing was written"
            )
        if token_count is None:
            count, name = self.count(message)
        else:
            count, name = _check_number("token_count", token_count), "given"
        entry = new_entry(message, created_us=now_us(), token_count=count, counter=name, **facts)
        ids = self._as_writer(
            lambda: self._engine.add_entries(self._session_id, [entry], session_no=self._session_no)
        )
        if self._engine.observer is not None:
            self._engine.observer(StoreEvent("add", None, ids[0], self._session_id, data=message))
        return MessageId(ids[0])

    def pop_if_last(self, id: MessageId) -> Message | None:
        """Take back the last message; None if it is not this one, is summarised or from a step.

        Its id is given to the next message.
        """
        row = self._as_writer(
            lambda: self._engine.pop_entry(self._session_id, id, session_no=self._session_no)
        )
        if row is not None and self._engine.observer is not None:
            self._engine.observer(StoreEvent("pop", None, id, self._session_id))
        return None if row is None else message_from_json(row.body)

    def _as_writer(self, act: Callable[[], T | Occupied]) -> T:
        """Write in the session's name, once no unfinished step is in the way."""
        while True:
            answer = act()
            if not isinstance(answer, Occupied):
                return answer
            assert self._make_way is not None
            self._make_way(answer)  # Settles what a dead owner left, or raises.

    def add_summary(
        self,
        start: int,
        end: int,
        content: str,
        *,
        token_count: int | None = None,
        original_tokens: int | None = None,
        generated_by: str = "unknown",
    ) -> SummaryId:
        """Let `content` stand for the entries [start, end). A summary it covers is orphaned.

        An empty text, an empty range or one past the last entry is refused and changes nothing.
        """
        if not isinstance(content, str) or not content.strip():
            raise InvalidArgument("content must be text that says something; nothing was written")
        if not isinstance(generated_by, str):
            raise InvalidArgument("generated_by must be text; nothing was written")
        _check_number("start", start)
        _check_number("end", end)
        self._refuse_range(start, end, len(self))
        content = clean_text(content)
        if token_count is None:
            token_count = self.count_text(content)
        if original_tokens is None:
            self.fill_in_counts()
            original_tokens = sum(entry.token_count or 0 for entry in self.entries(start, end))
        row = SummaryRow(
            summary_id=-1,  # given by the store
            start_id=start,
            end_id=end,
            content=content,
            token_count=_check_number("token_count", token_count),
            original_tokens=_check_number("original_tokens", original_tokens),
            created_us=now_us(),
            generated_by=clean_text(generated_by),
            valid=True,
        )

        def check(entries: int) -> None:
            # Once more where nothing can come between: entries may have been taken back.
            self._refuse_range(start, end, entries)

        return SummaryId(
            self._engine.add_summary(self._session_id, row, check, session_no=self._session_no)
        )

    def _refuse_range(self, start: int, end: int, entries: int) -> None:
        if not 0 <= start < end <= entries:
            raise InvalidArgument(
                f"a summary of [{start}, {end}) in session {self._session_id!r}, which has"
                f" {entries} entries: the range must not be empty nor end past the last;"
                " nothing was written"
            )

    # --- reading --------------------------------------------------------------------------------

    def entries(self, start: int = 0, stop: int | None = None) -> EntryRange:
        """The entries [start, stop): a lazy sequence that iterates and slices.

        A damaged entry is passed over, logged and told to `on_event`: it hides nothing else.
        """
        return EntryRange(self._pages, self.get_entry, range(len(self))[start:stop])

    def get_entry(self, id: int) -> HistoryEntry:
        """One entry; raises if there is none of this id, or if it is damaged."""
        in_range = 0 <= id <= SEQ_MASK  # Past it the key would be another session's.
        rows = self._engine.entries(self._session_no, id, id + 1, 1) if in_range else []
        if not rows:
            raise EntryNotFound(
                self._engine.name, self._session_id, f"no entry {id}; it has {len(self)}"
            )
        if not rows[0].valid:
            raise StoreCorrupt(self._engine.name, self._damage(id))
        return entry_of(rows[0])

    def summary(self, id: int) -> Summary:
        """One summary; raises if there is none of this id, or if it is damaged."""
        for row in self._engine.summaries(self._session_no):
            if row.summary_id == id:
                return self._summary_of(row)
        raise EntryNotFound(
            self._engine.name, self._session_id, f"no summary {id}; it has {self.summaries_len}"
        )

    def summaries(self) -> list[Summary]:
        """All summaries, oldest first, orphaned ones too; raises if one is damaged."""
        return [self._summary_of(row) for row in self._engine.summaries(self._session_no)]

    def has_step_id(self, id: int) -> bool:
        """Whether a message of this session came from this step."""
        return 0 <= id <= STEP_ID_MAX and self._engine.has_step(self._session_no, id)

    def orphaned_summaries(self) -> list[SummaryId]:
        """Summaries that no entry points to any more, because later ones cover their range."""
        used = self._engine.summaries_in_use(self._session_no)
        rows = self._engine.summaries(self._session_no)
        return [SummaryId(row.summary_id) for row in rows if row.summary_id not in used]

    def __len__(self) -> int:
        return self.row().entries

    def __bool__(self) -> bool:
        return True  # An empty history is still a history.

    @property
    def total_tokens(self) -> int:
        """Tokens of all entries. Counts that are missing are filled in first."""
        unstored = self.fill_in_counts()
        return self.row().tokens + unstored

    @property
    def summarized_count(self) -> int:
        """How many entries a summary stands for."""
        return self.row().summarized

    @property
    def summaries_len(self) -> int:
        """How many summaries there are, orphaned ones too."""
        return self.row().summaries

    def row(self) -> SessionRow:
        """The session with its counters, as it is now."""
        row = self._engine.session(self._session_id)
        if row is None or row.session_no != self._session_no:
            raise SessionNotFound(
                self._engine.name, self._session_id, "it has been deleted; nothing was changed"
            )
        return row

    # --- tokens ---------------------------------------------------------------------------------

    def count(self, message: Message) -> tuple[int | None, str | None]:
        """Tokens of a message and who counted them; no failure of a counter stops a commit."""
        try:
            return _check_number("a count", self.counter.count_message(message)), self.counter.name
        except Exception as error:
            log.warning(
                "session %r: the token counter raised %s; counted when asked for",
                self._session_id,
                type(error).__name__,
            )
            return None, None

    def count_text(self, text: str) -> int:
        """Tokens of a text; 0 where the counter fails."""
        try:
            return _check_number("a count", self.counter.count_str(text))
        except Exception as error:
            log.warning(
                "session %r: the token counter raised %s", self._session_id, type(error).__name__
            )
            return 0

    def fill_in_counts(self) -> int:
        """Count what has not been counted yet and store it; tokens that could not be stored."""
        unstored = 0
        after = -1
        while missing := self._engine.uncounted(self._session_no, PAGE, after=after):
            after = missing[-1]
            counts = []
            for entry_id in missing:
                for entry in self._pages(entry_id, entry_id + 1):
                    tokens, name = self.count(entry.message)
                    if tokens is not None and name is not None:
                        counts.append((entry_id, tokens, name))
            if not self._store_counts(counts):
                unstored += sum(tokens for _, tokens, _ in counts)
        return unstored

    def _store_counts(self, counts: list[tuple[int, int, str]]) -> bool:
        if self._engine.read_only:
            return False
        try:
            if counts:
                self._engine.set_token_counts(self._session_id, counts, session_no=self._session_no)
            return True
        except StoreError as error:
            log.warning("session %r: token counts not stored: %s", self._session_id, error)
            return False

    # --- inside ---------------------------------------------------------------------------------

    def _pages(self, start: int, stop: int) -> Iterator[HistoryEntry]:
        """Entries by key, a page a transaction: no cursor is open while the caller has one."""
        while start < stop:
            page = self._engine.entries(self._session_no, start, stop, PAGE)
            if not page:
                return
            for row in page:
                if row.valid:
                    yield entry_of(row)
                else:
                    self._tell_damage(row)
            start = page[-1].entry_id + 1

    def _summary_of(self, row: SummaryRow) -> Summary:
        if not row.valid:
            raise StoreCorrupt(
                self._engine.name,
                f"session {self._session_id!r}: summary {row.summary_id}: its crc does not match,"
                " so it cannot be trusted; the entries it covers are good: make it again",
            )
        return summary_of(row)

    def _tell_damage(self, row: EntryRow) -> None:
        log.error("%s: %s", self._engine.name, self._damage(row.entry_id))
        if self._engine.observer is not None:
            self._engine.observer(
                StoreEvent("damage", row.stream_step_id, row.entry_id, self._session_id)
            )

    def _damage(self, entry_id: int) -> str:
        return (
            f"session {self._session_id!r}: entry {entry_id}: its crc does not match, so it cannot"
            " be trusted; every other entry is good: run doctor, then salvage"
        )


def _check_number(what: str, value: object, most: int = NUMBER_MAX) -> int:
    """The value, if it is a whole number from 0 on that can be stored."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise InvalidArgument(f"{what} is {value!r}, expected a whole number from 0 to {most}")
    return value
