"""Salvage: copy everything that can still be read from a damaged store into a new one.

INVARIANT  The damaged store is not written to.  The new one appears under its name when it is
           whole; it is sound, and what is in it was checked by its crc.

Where an entry is lost, a call may be left without its result or the other way round: messages()
pairs them when it is asked, and repair() for good.  Entries are numbered anew without gaps, and
summaries follow them.  Steps keep their ids.  What was unfinished is unfinished in the new store,
left by an owner that is gone, so that recovery settles it at the first open.  A call of which it
cannot be read whether it ran counts as started: in doubt.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from holdfast.history.entries import entry_of
from holdfast.journal.engine.inspect import Entry, Inspection, Unreadable, inspect_store
from holdfast.journal.engine.restore import Restoration, SessionTimes
from holdfast.journal.engine.rows import EntryRow, NewEntry, NewSession, SessionRow
from holdfast.journal.errors import (
    HoldfastError,
    InvalidArgument,
    InvalidPath,
    StoreNotFound,
    StoreNotWritable,
)
from holdfast.journal.locations import locate, make_folder
from holdfast.recovery.salvage_steps import StepCopy, integer, is_object, text_or_none

ROWS_AT_ONCE = 1000
_SESSION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class Lost:
    """Something that could not be saved: its place, and why."""

    where: str
    why: str


@dataclass(frozen=True, slots=True)
class SalvageReport:
    """What was saved, in numbers, and what was not, by place."""

    path: Path
    into: Path
    sessions: int = 0
    entries: int = 0
    summaries: int = 0
    steps: int = 0  # unfinished ones: recovery settles them when the new store is opened
    lost: tuple[Lost, ...] = ()

    def summary(self) -> str:
        """The report in words."""
        lines = [
            f"Saved {self.sessions} session(s), {self.entries} entries, {self.summaries}"
            f" summaries and {self.steps} unfinished step(s) from {self.path} into {self.into}."
        ]
        if self.lost:
            lines.append(f"{len(self.lost)} thing(s) could not be saved:")
            lines += [f"  {lost.where}: {lost.why}" for lost in self.lost]
        else:
            lines.append("Nothing was lost.")
        return "\n".join(lines)


def salvage(path: str | os.PathLike[str], into: str | os.PathLike[str]) -> SalvageReport:
    """Copy all that can be read from the store at `path` into a new store at `into`.

    `into` must not exist.  Raises, and makes nothing, if not even the tables can be found.
    """
    target = locate(into)
    if target.path.exists():
        raise InvalidArgument(f"{target.path}: there is a file; nothing was copied: choose another")
    make_folder(target, create=True)
    source, rebuilt = _open(path)
    with closing(source), tempfile.TemporaryDirectory(dir=target.path.parent) as folder:
        new = Restoration.open(Path(folder) / "store", durability="process")
        with closing(new):
            copy = _Copy(source, new)
            if rebuilt is not None:
                copy.lose("the file", f"its {rebuilt} was damaged and made anew")
            copy.run()
            new.back_up(target.path)
    return SalvageReport(
        locate(path).path,
        target.path,
        len(copy.sessions),
        copy.entries,
        copy.summaries,
        copy.unfinished,
        tuple(copy.lost),
    )


def _open(path: str | os.PathLike[str]) -> tuple[Inspection, str | None]:
    """The damaged store, and what had to be made anew to get at its tables."""
    first: HoldfastError | None = None
    for rebuild in (None, "header", "schema"):
        try:
            source = inspect_store(path, rebuild=rebuild)
        except (StoreNotFound, InvalidPath):
            raise
        except HoldfastError as error:
            first = first or error
            continue
        try:
            source.refuse_other_tables()
            return source, rebuild
        except HoldfastError as error:
            source.close()
            if isinstance(error, StoreNotWritable):
                raise
            first = first or error
    assert first is not None
    raise first


@dataclass(slots=True)
class _Copy:
    """One salvage under way."""

    source: Inspection
    new: Restoration
    lost: list[Lost] = field(default_factory=list)
    sessions: dict[int, str] = field(default_factory=dict)  # number there, id here
    times: list[SessionTimes] = field(default_factory=list)
    rows: dict[int, SessionRow] = field(default_factory=dict)
    owners: dict[int, str | None] = field(default_factory=dict)  # step there, its session
    settled: set[tuple[int, int]] = field(default_factory=set)  # step and part in history
    entries: int = 0
    summaries: int = 0
    unfinished: int = 0

    def lose(self, where: str, why: str) -> None:
        self.lost.append(Lost(where, why))

    def lose_rows(self, lost: Unreadable) -> None:
        self.lose(f"{lost.table}, keys {lost.low} to {lost.high}", lost.why)

    def run(self) -> None:
        log = self.source.log_state()
        if log.header_problem is not None:
            self.lose("the log", f"{log.header_problem}: all of its {log.bytes} bytes")
        if log.bad_frame is not None:
            what = f"it is damaged: {log.cut_commits} commit(s) behind it are cut off"
            self.lose(f"the log, frame {log.bad_frame}", what)
        for step in self.source.scan_steps():
            if not isinstance(step, Unreadable):
                self.owners[step.step_id] = step.session
        for row in self.source.scan_sessions():
            if isinstance(row, Unreadable):
                self.lose_rows(row)
            else:
                self.rows[row.session_no] = row
                self.make_session(row.session_no, row)
        for number, entries in groupby(self.readable_entries(), lambda entry: entry.session_no):
            self.copy_session(number, entries)
        steps = StepCopy(self.source, self.new, set(self.sessions.values()), self.settled)
        steps.run()
        self.unfinished = steps.unfinished
        self.lost += [Lost(*lost) for lost in steps.lost]
        counter = self.source.next_step_id() or 0
        self.new.restore_counters(max(counter, steps.newest + 1), self.times)

    # --- sessions -------------------------------------------------------------------------------

    def make_session(self, number: int, row: SessionRow | None, name: str | None = None) -> None:
        wanted = name if row is None else row.session_id
        session_id = str(wanted) if _is_id(wanted) else f"salvaged-{number}"
        metadata = "{}"
        if row is not None:
            metadata = row.metadata
            if not is_object(metadata):
                self.lose(f"session {session_id}", "its metadata is no JSON object")
                metadata = "{}"
        made = NewSession(
            session_id,
            integer(row and row.created_us),
            text_or_none(row and row.title),
            text_or_none(row and row.provider),
            text_or_none(row and row.model),
            metadata,
        )
        if self.new.create_session(made) is None:
            made = NewSession(f"{session_id[:100]}-salvaged-{number}", made.created_us)
            self.new.create_session(made)
        if row is None:
            self.lose(f"session number {number}", f"its row; it is called {made.session_id} now")
        elif made.session_id != row.session_id:
            self.lose(f"session number {number}", f"its id; it is called {made.session_id} now")
        self.sessions[number] = made.session_id
        if row is not None:
            changed = integer(row.changed)
            self.times.append(SessionTimes(made.session_id, integer(row.updated_us), changed))

    def readable_entries(self) -> Iterator[Entry]:
        for found in self.source.scan_entries():
            if isinstance(found, Unreadable):
                self.lose_rows(found)
            else:
                yield found

    def copy_session(self, number: int, found: Iterator[Entry]) -> None:
        entries = list(found) if number not in self.sessions else found
        if number not in self.sessions:
            self.make_session(number, None, self.name_by_step(list(entries)))
        session_id = self.sessions[number]
        numbers: dict[int, int] = {}
        page: list[NewEntry] = []
        last_step = expected = 0
        for _, entry in entries:
            if entry.entry_id != expected:
                self.lose(f"session {session_id}", f"entries {expected} to {entry.entry_id - 1}")
            expected = entry.entry_id + 1
            new = self.checked(session_id, entry, last_step)
            if new is None:
                continue
            last_step = new.stream_step_id or last_step
            numbers[entry.entry_id] = len(numbers)
            page.append(new)
            if len(page) >= ROWS_AT_ONCE:
                self.new.add_entries(session_id, page)
                page = []
        if page:
            self.new.add_entries(session_id, page)
        row = self.rows.get(number)
        if row is not None and isinstance(row.entries, int) and 0 <= expected < row.entries:
            self.lose(f"session {session_id}", f"entries {expected} to {row.entries - 1}")
        self.entries += len(numbers)
        self.copy_summaries(number, session_id, numbers)

    def name_by_step(self, entries: list[Entry]) -> str | None:
        """The id of a session whose row is lost, as the steps of its entries tell it."""
        linked = (entry.stream_step_id for _, entry in entries if entry.valid)
        names = (self.owners.get(step) for step in linked if step is not None)
        taken = set(self.sessions.values())
        return next((name for name in names if name is not None and name not in taken), None)

    def checked(self, session_id: str, entry: EntryRow, last_step: int) -> NewEntry | None:
        where = f"session {session_id}, entry {entry.entry_id}"
        if not entry.valid:
            self.lose(where, "its crc does not match")
            return None
        try:
            entry_of(entry)
        except (HoldfastError, ValueError, TypeError, OverflowError) as error:
            self.lose(where, f"it is no message: {error}")
            return None
        step_id, part = entry.stream_step_id, entry.part
        if step_id is not None:
            place = (step_id, part or 0)
            if place in self.settled:
                self.lose(where, f"part {part} of step {step_id} is in history already")
                return None
            elsewhere = self.owners.get(step_id, session_id) not in (None, session_id)
            if elsewhere or (step_id in self.owners and step_id < last_step):
                self.lose(where, f"its link to step {step_id}, which is not where it came from")
                step_id = part = None
            elif part and step_id in self.owners and (step_id, 0) not in self.settled:
                self.lose(where, f"its link to step {step_id}, whose words are lost")
                step_id = part = None
            else:
                self.settled.add(place)
        return NewEntry(
            entry.role,
            entry.body,
            entry.created_us,
            entry.status,
            step_id,
            part,
            entry.model_name,
            entry.stop_reason,
            entry.usage,
            entry.metadata,
            entry.token_count if isinstance(entry.token_count, int) else None,
            text_or_none(entry.counter),
        )

    def copy_summaries(self, number: int, session_id: str, numbers: dict[int, int]) -> None:
        try:
            rows = self.source.scan_summaries(number)
        except HoldfastError as error:
            self.lose(f"session {session_id}, its summaries", str(error))
            return
        for row in rows:
            where = f"session {session_id}, summary {row.summary_id}"
            if not row.valid:
                self.lose(where, "its crc does not match")
                continue
            covered = [new for old, new in numbers.items() if row.start_id <= old < row.end_id]
            if not covered:
                self.lose(where, "none of the entries that it stands for is there")
                continue
            moved = row._replace(start_id=covered[0], end_id=covered[-1] + 1)
            self.new.add_summary(session_id, moved, lambda entries: None)
            self.summaries += 1


def _is_id(value: object) -> bool:
    return isinstance(value, str) and bool(_SESSION_ID.fullmatch(value)) and ".." not in value


__all__ = ["Lost", "SalvageReport", "salvage"]
