"""Doctor: look at a store, sound or damaged, and say what is wrong and what to do.

INVARIANT  Nothing is written, whatever is found: neither the database nor its log changes a byte.
           A finding is a fact about the file: a healthy store has none, in mid-stream, beside a
           living writer, after a kill and after recovery.

What is looked at, in this order: the file and its log; SQLite's own integrity; the tables; every
rule between rows; every crc; gaps; each session's calls and outputs; who has the store open; and,
as a dry run, what recovery would do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from holdfast.history.entries import entry_of, microseconds_of, summary_of, time_of
from holdfast.journal.engine.frames import LogState, read_log
from holdfast.journal.engine.inspect import Inspection, Unreadable, inspect_store
from holdfast.journal.engine.rows import SessionRow
from holdfast.journal.engine.scan import Garbled
from holdfast.journal.engine.schema import FORMAT
from holdfast.journal.errors import (
    HoldfastError,
    InvalidPath,
    NotAStore,
    StoreBusy,
    StoreNotFound,
    StoreNotWritable,
    StoreTooNew,
)
from holdfast.journal.locations import locate
from holdfast.journal.recovered import Leftover, read_leftover
from holdfast.recovery.dry_run import StepPlan, plan
from holdfast.recovery.findings import DoctorReport, Problem, problem
from holdfast.recovery.pairing_check import PairingCheck

FINDINGS_A_CODE = 25  # One torn page must not fill a screen; the rest is counted.


def doctor(path: str | os.PathLike[str]) -> DoctorReport:
    """Look at the store at `path` and report; raises only if there is no file.

    Reads every row once.  Works beside a living writer and in a folder that cannot be written.
    """
    findings: list[Problem] = []
    try:
        location = locate(path)
    except InvalidPath:
        raise
    except NotAStore as error:
        return DoctorReport(Path(path), (problem("not-a-store", "the path", _words(error)),))
    try:
        store = inspect_store(path)
    except (StoreNotFound, InvalidPath):
        raise
    except HoldfastError as error:
        findings.append(problem(_code_of(error), "the file", _words(error)))
        log = LogState(0)
        if not isinstance(error, StoreBusy):
            try:
                log = read_log(location)
            except HoldfastError as failed:
                findings.append(problem(_code_of(failed), "the log", _words(failed)))
        findings += _log_findings(log)
        size = location.path.stat().st_size
        return DoctorReport(location.path, tuple(findings), bytes=size, wal_bytes=log.bytes)
    with closing(store):
        return _Look(store, location.path).report()


def _code_of(error: HoldfastError) -> str:
    match error:
        case NotAStore():
            return "not-a-store"
        case StoreTooNew():
            return "too-new"
        case StoreBusy():
            return "busy"
        case StoreNotWritable():
            return "no-access"
        case _:
            return "unreadable"


def _words(error: HoldfastError) -> str:
    return str(getattr(error, "problem", error))


def _log_findings(log: LogState) -> Iterator[Problem]:
    if log.header_problem is not None:
        yield problem(
            "log-header",
            "the log",
            f"{log.header_problem}: SQLite passes over all of its {log.bytes} bytes",
        )
    if log.bad_frame is not None:
        yield problem(
            "log-cut",
            f"the log, frame {log.bad_frame}",
            f"it is damaged, and SQLite silently leaves out {log.cut_commits} commit(s) behind it",
        )


class _Look:
    """One look at a store that SQLite can open."""

    def __init__(self, store: Inspection, path: Path) -> None:
        self.store = store
        self.path = path
        self.problems: list[Problem] = []
        self.notes: list[Problem] = []
        self.plans: list[StepPlan] = []
        self.sessions: dict[int, SessionRow] = {}
        self.entries = self.events = 0
        self._told: dict[str, int] = {}

    def report(self) -> DoctorReport:
        size = log_bytes = 0
        try:
            version, size, mode = self.store.settings()
            log = self.store.log_state()
            log_bytes = log.bytes
        except HoldfastError as error:
            self.tell("unreadable", "the file", _words(error))
            return self._finish(size, log_bytes)
        for found in _log_findings(log):
            self.tell(found.code, found.where, found.what)
        if version < FORMAT:
            self.tell("old-format", "the file", f"format {version}, the present one is {FORMAT}")
            return self._finish(size, log_bytes)
        if mode != "wal":
            self.notes.append(problem("not-in-log-mode", "the file", f"journal mode {mode}"))
        self._file()
        self._rules()
        self._journal()
        self._sessions()
        self._history()
        self._steps()
        self._owners()
        return self._finish(size, log_bytes)

    def _finish(self, size: int, log_bytes: int) -> DoctorReport:
        for code, count in self._told.items():
            if count > FINDINGS_A_CODE:
                more = count - FINDINGS_A_CODE
                self.problems.append(problem(code, "elsewhere", f"{more} more of this kind"))
        return DoctorReport(
            self.path,
            tuple(self.problems),
            tuple(self.notes),
            tuple(self.plans),
            len(self.sessions),
            self.entries,
            self.events,
            size,
            log_bytes,
        )

    def tell(self, code: str, where: str, what: str) -> None:
        self._told[code] = self._told.get(code, 0) + 1
        if self._told[code] <= FINDINGS_A_CODE:
            self.problems.append(problem(code, where, what))

    def tell_unreadable(self, lost: Unreadable) -> None:
        self.tell("unreadable", f"{lost.table}, keys {lost.low} to {lost.high}", lost.why)

    # --- the file -------------------------------------------------------------------------------

    def _file(self) -> None:
        for line in self.store.integrity():
            self.tell("integrity", "SQLite's check", line)
        for line in self.store.broken_references():
            self.tell("broken-reference", "SQLite's check", line)
        try:
            for line in self.store.schema_differences():
                self.tell("schema", "the tables", line)
        except HoldfastError as error:
            self.tell("unreadable", "the tables", _words(error))

    def _rules(self) -> None:
        for broken in self.store.broken_rules():
            self.tell(*broken)

    # --- the journal ----------------------------------------------------------------------------

    def _journal(self) -> None:
        step_id = last_seq = 0
        for found in self.store.scan_events():
            if isinstance(found, Unreadable):
                self.tell_unreadable(found)
                continue
            self.events += 1
            event = found.event
            if found.step_id != step_id:
                step_id, last_seq = found.step_id, 0
            if event.seq != last_seq + 1:
                gap = f"{last_seq + 1}" if event.seq == last_seq + 2 else f"{last_seq + 1} and more"
                self.tell("event-gap", f"step {step_id}", f"event {gap} is not there")
            if not event.valid:
                self.tell(
                    "event-damaged", f"step {step_id}, event {event.seq}", "its crc does not match"
                )
            last_seq = event.seq
        try:
            for step_id, position in self.store.bad_results():
                where = f"step {step_id}, call {position}"
                self.tell("result-damaged", where, "the crc of its result does not match")
        except HoldfastError as error:
            self.tell("unreadable", "tool_results", _words(error))

    def _steps(self) -> None:
        """Each unfinished step as recovery would read it; those of dead owners are a plan."""
        for step in self.store.scan_steps():
            if isinstance(step, Unreadable):
                self.tell_unreadable(step)
            else:
                self._garbled("step-damaged", f"step {step.step_id}", step)
        try:
            rows = self.store.unfinished()
        except HoldfastError as error:
            self.tell("unreadable", "step_metadata", _words(error))
            return
        for row in rows:
            try:
                leftover = read_leftover(self.store, row)
                self._calls(leftover)
                if row.session is not None and not self.store.is_alive(row.owner):
                    self.plans.append(plan(leftover))
            except Exception as error:  # Whatever it raises here it would raise in recovery.
                words = f"{type(error).__name__}: {error}"
                self.tell("step-unreadable", f"step {row.step_id}", words)

    def _calls(self, leftover: Leftover) -> None:
        step_id = leftover.row.step_id
        on_record = {call.position: call for call in self.store.calls(step_id)}
        for call_row in on_record.values():
            self._garbled("call-differs", f"step {step_id}, call {call_row.position}", call_row)
        for call in leftover.calls:
            record = on_record.pop(call.position, None)
            if record is not None and (record.call_id, record.name) != (call.call_id, call.name):
                self.tell(
                    "call-differs",
                    f"step {step_id}, call {call.position}",
                    f"its row says {record.call_id!r} ({record.name!r}), and the stream says"
                    f" {call.call_id!r} ({call.name!r})",
                )
        if leftover.stream.gap_at is None:
            for position in on_record:
                self.tell(
                    "call-without-event",
                    f"step {step_id}, call {position}",
                    "it is on record, and the stream never announced it",
                )

    # --- history --------------------------------------------------------------------------------

    def _sessions(self) -> None:
        for row in self.store.scan_sessions():
            if isinstance(row, Unreadable):
                self.tell_unreadable(row)
                continue
            self.sessions[row.session_no] = row
            self._garbled("session-damaged", self._name(row.session_no), row)
            for name in ("created_us", "updated_us"):
                moment = getattr(row, name)
                if moment != microseconds_of(time_of(moment)):
                    what = f"{name} is {moment!r}, which is no time"
                    self.tell("session-damaged", self._name(row.session_no), what)
            try:
                if not isinstance(json.loads(row.metadata), dict):
                    raise ValueError("it is no object")
            except (ValueError, TypeError, RecursionError) as error:
                self.tell("session-damaged", self._name(row.session_no), f"its metadata: {error}")
            self._summaries(row.session_no)

    def _summaries(self, session_no: int) -> None:
        name = self._name(session_no)
        try:
            for row in self.store.scan_summaries(session_no):
                if not row.valid:
                    where = f"{name}, summary {row.summary_id}"
                    self.tell("summary-damaged", where, "its crc does not match")
                else:
                    summary_of(row)
        except (HoldfastError, ValueError, TypeError, OverflowError) as error:
            self.tell("unreadable", f"summaries of {name}", str(error))

    def _history(self) -> None:
        pairing = PairingCheck(self.tell)
        session_no, next_id = -1, 0
        for found in self.store.scan_entries():
            if isinstance(found, Unreadable):
                self.tell_unreadable(found)
                pairing.doubt()
                continue
            entry = found.entry
            self.entries += 1
            if found.session_no != session_no:
                pairing.end()
                session_no, next_id = found.session_no, 0
                pairing.begin(self._name(session_no))
            where = f"{self._name(session_no)}, entry {entry.entry_id}"
            if entry.entry_id != next_id:
                self.tell("entry-gap", where, f"entry {next_id} before it is not there")
            next_id = entry.entry_id + 1
            if not entry.valid:
                self.tell("entry-damaged", where, "its crc does not match")
                pairing.doubt()
                continue
            self._garbled("entry-damaged", where, entry)
            try:
                pairing.add(entry, entry_of(entry).message)
            except (HoldfastError, ValueError, TypeError, OverflowError) as error:
                self.tell("entry-damaged", where, f"it is no message: {error}")
                pairing.doubt()
        pairing.end()

    def _garbled(self, code: str, where: str, row: NamedTuple) -> None:
        """Tell of texts that no crc covers and that are no UTF-8."""
        names = [n for n, value in zip(row._fields, row, strict=True) if isinstance(value, Garbled)]
        if names:
            self.tell(code, where, f"no UTF-8: {', '.join(names)}")

    def _name(self, session_no: int) -> str:
        row = self.sessions.get(session_no)
        return f"session number {session_no}" if row is None else f"session {row.session_id}"

    # --- owners ---------------------------------------------------------------------------------

    def _owners(self) -> None:
        assert self.store.location is not None
        try:
            busy = {row.owner for row in self.store.unfinished()}
            for owner in self.store.owners():
                where = f"owner {owner.owner_id}"
                self._garbled("owner-damaged", where, owner)
                who = f"pid {owner.pid} on {owner.host}"
                if self.store.is_alive(owner.owner_id):
                    self.notes.append(problem("living-owner", where, f"{who} has the store open"))
                elif owner.owner_id not in busy:
                    what = f"{who} is gone and left nothing behind but its row"
                    self.notes.append(problem("dead-owner", where, what))
        except HoldfastError as error:
            self.tell("unreadable", "owners", _words(error))
        if self.store.location.failed.exists():
            what = "a mark says that syncs have failed here"
            self.notes.append(problem("sync-failed", "the file", what))


__all__ = ["DoctorReport", "Problem", "StepPlan", "doctor"]
