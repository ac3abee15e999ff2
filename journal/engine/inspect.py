"""A store opened to be looked at, sound or not: everything is read, nothing is changed.

INVARIANT  Neither the database nor its log is written to, whatever state they are in.  All answers
           come from one snapshot, so a writer beside us cannot make two tables disagree.

Damage is told, not raised, as far as anything can be read.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import apsw

from holdfast.journal import owners
from holdfast.journal.durability import Durability
from holdfast.journal.engine import connection as connections
from holdfast.journal.engine import failures, schema
from holdfast.journal.engine.checks import row_crc
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.journal.engine.events import is_sound
from holdfast.journal.engine.frames import LogState, read_log
from holdfast.journal.engine.history import CHECKED
from holdfast.journal.engine.invariants import RULES
from holdfast.journal.engine.rows import EntryRow, EventRow, SessionRow, StepRow, SummaryRow
from holdfast.journal.engine.scan import BROKEN, Unreadable, raw, raw_columns, scan, text
from holdfast.journal.engine.schema import SEQ_BITS, SEQ_MASK, STEP_ID_MAX
from holdfast.journal.engine.summaries import SUMMARY_COLUMNS
from holdfast.journal.errors import HoldfastError, NotAStore, StoreCorrupt, StoreNotFound
from holdfast.journal.locations import Location, locate

T = TypeVar("T")
COPY_BYTES = 1 << 16  # SQLite's unix layer fails to write 128 KB or more at once.


class Broken(NamedTuple):
    """A rule that does not hold, and where."""

    code: str
    where: str
    what: str


class Event(NamedTuple):
    """One event with the step that it belongs to, and its row as it stands."""

    step_id: int
    event: EventRow
    crc: object


class Entry(NamedTuple):
    """One entry with the number of its session."""

    session_no: int
    entry: EntryRow


class Inspection(SqliteEngine):
    """One look at a store. Made by `inspect_store`, ended by `close`."""

    _copy: tempfile.TemporaryDirectory[str] | None = None

    def read(self, work: Callable[[apsw.Cursor], T]) -> T:
        """Run `work` on the one snapshot that all answers come from."""
        with self._reader_lock:
            cursor = self._db.cursor()
            try:
                if not self._db.in_transaction:
                    cursor.execute("BEGIN")
                return work(cursor)
            except BROKEN as error:
                raise self.translate(error) from error
            finally:
                cursor.close()

    def close(self) -> None:
        """End the look. Idempotent."""
        super().close()
        if self._copy is not None:
            self._copy.cleanup()

    # --- what SQLite itself knows ---------------------------------------------------------------

    def integrity(self, limit: int = 50) -> list[str]:
        """What SQLite finds wrong with its pages, indexes and constraints."""
        lines = self._lines(f"PRAGMA integrity_check({limit})")
        return [line for line in lines if line != "ok"]

    def broken_references(self) -> list[str]:
        """Rows that point to a row that is not there."""
        return self._lines(
            "SELECT \"table\" || ' row ' || ifnull(rowid, '?') || ' points to ' || parent"
            " FROM pragma_foreign_key_check LIMIT 50"
        )

    def _lines(self, sql: str) -> list[str]:
        lines: list[str] = []

        def work(cursor: apsw.Cursor) -> None:
            lines.extend(str(row[0]) for row in cursor.execute(sql))

        try:
            self.read(work)
        except HoldfastError as error:
            lines.append(str(error))
        return [part for line in lines for part in line.splitlines() if not part.startswith("***")]

    def schema_differences(self) -> list[str]:
        """How the tables, indexes and views differ from ours; raises where they cannot be read."""
        sql = "SELECT type, name, tbl_name, sql FROM sqlite_schema"
        mine = apsw.Connection(":memory:")
        try:
            schema.migrate(mine, 0)
            expected = {(row[0], row[1]): row for row in mine.execute(sql)}
        finally:
            mine.close()
        found = {
            (row[0], row[1]): row for row in self.read(lambda cursor: list(cursor.execute(sql)))
        }
        return [
            *(f"{kind} {name} is missing" for kind, name in expected.keys() - found.keys()),
            *(f"{kind} {name} is none of ours" for kind, name in found.keys() - expected.keys()),
            *(
                f"{kind} {name} is not as it was made"
                for kind, name in expected.keys() & found.keys()
                if expected[kind, name] != found[kind, name]
            ),
        ]

    def refuse_other_tables(self) -> None:
        """Raise unless the tables are those of this format, whatever the state of their rows."""
        assert self.location is not None
        version = self.settings()[0]
        if version:
            connections.refuse_older(self.location, version)
        wrong = [line for line in self.schema_differences() if line.startswith("table ")]
        if version != schema.FORMAT or any(not line.endswith("none of ours") for line in wrong):
            found = "; ".join(wrong) or f"format {version}"
            raise StoreCorrupt(self.location.path, f"its tables are damaged ({found})")

    def settings(self) -> tuple[int, int, str]:
        """Format, size in bytes, and journal mode, as SQLite sees them."""

        def work(cursor: apsw.Cursor) -> tuple[int, int, str]:
            pages = int(cursor.execute("PRAGMA page_count").get)
            size = int(cursor.execute("PRAGMA page_size").get)
            mode = str(cursor.execute("PRAGMA journal_mode").get)
            return int(cursor.execute("PRAGMA user_version").get), pages * size, mode

        return self.read(work)

    def log_state(self) -> LogState:
        """What the log holds, and what damage has cut off."""
        assert self.location is not None
        return read_log(self.location, self._vfs)

    # --- what we know ---------------------------------------------------------------------------

    def broken_rules(self) -> Iterator[Broken]:
        """Every rule between rows that does not hold."""
        for rule in RULES:
            rows: list[Any] = []
            try:
                self.read(lambda cursor: rows.extend(cursor.execute(rule.sql)))  # noqa: B023
            except HoldfastError as error:
                yield Broken("unreadable", f"the rule {rule.code}", str(error))
            for row in rows:
                yield Broken(rule.code, rule.where.format(*row), rule.what.format(*row))

    def scan_events(self) -> Iterator[Event | Unreadable]:
        """Every event of the journal, in order."""
        columns = f"{raw('event_type')}, call, {raw('content')}, crc, typeof(content)"
        for row in scan(self._db, "stream_journal", "id", columns):
            if isinstance(row, Unreadable):
                yield row
                continue
            key, kind, call, content, crc, type_name = row
            name = text(kind)
            valid = is_sound(key, name, call, content, crc)
            with suppress(UnicodeDecodeError, AttributeError):
                content = content if type_name == "blob" else content.decode()
            event = EventRow(key & SEQ_MASK, str(name), call, content, valid)
            yield Event(key >> SEQ_BITS, event, crc)

    def scan_entries(self) -> Iterator[Entry | Unreadable]:
        """Every entry of every session, in order."""
        columns = raw_columns(f"{CHECKED}, crc, token_count, counter, summary_id")
        for row in scan(self._db, "history_entries", "id", columns):
            if isinstance(row, Unreadable):
                yield row
                continue
            row = [text(value) for value in row]
            valid = row[11] == row_crc(*row[:11])
            entry = EntryRow._make((row[0] & SEQ_MASK, *row[1:11], *row[12:15], valid))
            yield Entry(row[0] >> SEQ_BITS, entry)

    def scan_sessions(self) -> Iterator[SessionRow | Unreadable]:
        """Every session, by number."""
        return self._scan_rows(SessionRow, "sessions", "session_no")

    def scan_steps(self) -> Iterator[StepRow | Unreadable]:
        """Every step, finished or not, oldest first."""
        return self._scan_rows(StepRow, "step_metadata", "step_id")

    def scan_summaries(self, session_no: int) -> list[SummaryRow]:
        """The summaries of a session; raises where they cannot be read."""
        columns = raw_columns(SUMMARY_COLUMNS)
        sql = f"SELECT summary_id, {columns}, crc FROM summaries WHERE session_no = ?"

        def work(cursor: apsw.Cursor) -> list[SummaryRow]:
            rows = [[text(v) for v in row] for row in cursor.execute(sql, (session_no,))]
            return [
                SummaryRow._make((*row[:-1], row[-1] == row_crc(session_no, *row[:-1])))
                for row in sorted(rows, key=lambda row: str(row[0]).zfill(20))
            ]

        return self.read(work)

    def bad_results(self) -> list[tuple[int, int]]:
        """Step and position of every result whose crc does not match."""
        sql = f"SELECT step_id, position, {raw('body')}, crc FROM tool_results"

        def work(cursor: apsw.Cursor) -> list[tuple[int, int]]:
            return [
                (step_id, position)
                for step_id, position, body, crc in cursor.execute(sql)
                if crc != row_crc(step_id, position, text(body))
            ]

        return self.read(work)

    def next_step_id(self) -> int | None:
        """The step id to be given out next, if that can be read."""
        try:
            found = self.read(
                lambda cursor: cursor.execute("SELECT next_step_id FROM step_counter").get
            )
        except HoldfastError:
            return None
        return found if isinstance(found, int) and 0 < found <= STEP_ID_MAX else None

    # --- reading past damage --------------------------------------------------------------------

    def _scan_rows(self, kind: Any, table: str, key: str) -> Iterator[Any]:
        columns = raw_columns(", ".join(kind._fields[1:]))
        for row in scan(self._db, table, key, columns):
            yield row if isinstance(row, Unreadable) else kind(*(text(value) for value in row))


def inspect_store(path: str | os.PathLike[str], *, rebuild: str | None = None) -> Inspection:
    """Open a store to look at it; raises only if nothing of it can be read.

    In a folder that cannot be written, a log can be read only from a copy.  `rebuild` looks at a
    copy too, whose "header" or "schema" is made anew as every store of this format has it.
    """
    connections.require_sqlite()
    location = locate(path)
    if not location.path.exists():
        raise StoreNotFound(location.path, "there is no store here; nothing was created")
    if location.path.stat().st_size == 0:
        raise NotAStore(location.path, "the file is empty; it was left as it was")
    if rebuild is None:
        connections.look(location, create=False)
    lock_file = owners.enter_to_look(location)
    copy: tempfile.TemporaryDirectory[str] | None = None
    try:
        try:
            if rebuild is None:
                db, copy = _connect(location)
            else:
                copy = _copy_of(location)
                _rebuild(_inside(copy), rebuild)
                db = connections.connect_read_only(_inside(copy), vfs=None)
        except BROKEN as error:
            raise failures.translate(str(location.path), error, 0) from error
        found = Inspection(
            location, db, durability=Durability.PROCESS, lock_file=lock_file, read_only=True
        )
        found._copy = copy
    except BaseException:
        if lock_file is not None:
            owners.leave(lock_file)
        if copy is not None:
            copy.cleanup()
        raise
    if lock_file is not None:
        found._depart_with(lock_file)
    return found


def _connect(
    location: Location,
) -> tuple[apsw.Connection, tempfile.TemporaryDirectory[str] | None]:
    if not location.wal.exists():
        # A read-only connection would leave an empty log behind. Nobody has the store open: a
        # living writer has a log.
        db = connections.connect(location, vfs=None, read_only=True, immutable=True)
        try:
            db.execute("SELECT count(*) FROM sqlite_schema").fetchall()
        except BaseException:
            db.close()
            raise
        return db, None
    try:
        return connections.connect_read_only(location, vfs=None), None
    except HoldfastError:
        copy = _copy_of(location)
        try:
            return connections.connect_read_only(_inside(copy), vfs=None), copy
        except BaseException:
            copy.cleanup()
            raise


def _inside(folder: tempfile.TemporaryDirectory[str]) -> Location:
    return Location(Path(folder.name) / "copy")


def _copy_of(location: Location) -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="holdfast-")
    copy = _inside(folder)
    for source, target, kind in (
        (location.path, copy.path, apsw.SQLITE_OPEN_MAIN_DB),
        (location.wal, copy.wal, apsw.SQLITE_OPEN_WAL),
    ):
        if not source.exists():
            continue
        reader = apsw.VFSFile("", str(source), [kind | apsw.SQLITE_OPEN_READONLY, 0])
        flags = kind | apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
        writer = apsw.VFSFile("", str(target), [flags, 0])
        try:
            size = reader.xFileSize()
            for offset in range(0, size, COPY_BYTES):
                writer.xWrite(reader.xRead(min(COPY_BYTES, size - offset), offset), offset)
        finally:
            reader.xClose()
            writer.xClose()
    return folder


def _rebuild(location: Location, what: str) -> None:
    """Give a copy the header, or all pages of the schema, that every store of this format has."""
    fresh = apsw.Connection(":memory:")
    try:
        fresh.execute(f"PRAGMA page_size = {schema.PAGE_BYTES}")
        fresh.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
        schema.migrate(fresh, 0)
        image = fresh.serialize("main")
        pages = [
            number
            for (number,) in fresh.execute(
                "SELECT pageno FROM dbstat WHERE name = 'sqlite_schema' AND pageno > 1"
            )
        ]
    finally:
        fresh.close()
    header = bytearray(image[:100])
    flags = [apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READWRITE, 0]
    file = apsw.VFSFile("", str(location.path), flags)
    try:
        header[18:20] = b"\2\2"  # WAL
        header[28:32] = (file.xFileSize() // schema.PAGE_BYTES).to_bytes(4, "big")
        header[24:28] = header[92:96]  # So that the size above counts.
        header[32:40] = bytes(8)  # No free pages: nothing will be written here.
        file.xWrite(bytes(header), 0)
        if what == "schema":
            file.xWrite(image[100 : schema.PAGE_BYTES], 100)
            for number in pages:
                start = (number - 1) * schema.PAGE_BYTES
                file.xWrite(image[start : start + schema.PAGE_BYTES], start)
    finally:
        file.xClose()


__all__ = ["Broken", "Entry", "Event", "Inspection", "Unreadable", "inspect_store"]
