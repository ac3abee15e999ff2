"""Operations on sessions, owners and the store as a whole. Each is one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apsw

from holdfast.journal.engine import connection as connections
from holdfast.journal.engine import failures
from holdfast.journal.engine.core import Core
from holdfast.journal.engine.history import insert_entries
from holdfast.journal.engine.rows import (
    Counts,
    NewEntry,
    NewSession,
    OwnerRow,
    SessionRow,
    SummaryRow,
)
from holdfast.journal.engine.scan import select
from holdfast.journal.engine.schema import FORMAT, SEQ_BITS, SEQ_MASK
from holdfast.journal.engine.steps import now_us
from holdfast.journal.engine.summaries import insert_summary
from holdfast.journal.errors import InvalidArgument
from holdfast.journal.locations import locate
from holdfast.journal.owners import this_process

SESSION_COLUMNS = ", ".join(SessionRow._fields)
OWNER_COLUMNS = ", ".join(OwnerRow._fields)


class SessionOperations(Core):
    """Sessions, and who has the store open."""

    def create_session(
        self,
        session: NewSession,
        entries: Sequence[NewEntry] = (),
        summaries: Sequence[SummaryRow] = (),
    ) -> SessionRow | None:
        """Make a session, with history if it is imported: all or nothing. None: the id is taken."""

        def work(cursor: apsw.Cursor) -> SessionRow | None:
            if _session(cursor, session.session_id) is not None:
                return None
            cursor.execute(
                "INSERT INTO sessions (session_id, title, provider, model, metadata, created_us,"
                " updated_us, changed) VALUES (?, ?, ?, ?, ?, ?, ?,"
                " (SELECT ifnull(max(changed), 0) + 1 FROM sessions))",
                (
                    session.session_id,
                    session.title,
                    session.provider,
                    session.model,
                    session.metadata,
                    session.created_us,
                    session.created_us,
                ),
            )
            session_no = self._db.last_insert_rowid()
            insert_entries(cursor, session.session_id, entries)
            for summary in summaries:
                insert_summary(cursor, session_no, summary, point=False)
            return _session(cursor, session.session_id)

        return self.write(work)

    def session(self, session_id: str) -> SessionRow | None:
        """One session's row."""
        return self.read(lambda cursor: _session(cursor, session_id))

    def sessions(self) -> list[SessionRow]:
        """Every session, last changed first."""

        def work(cursor: apsw.Cursor) -> list[SessionRow]:
            rows = cursor.execute(f"SELECT {SESSION_COLUMNS} FROM sessions ORDER BY changed DESC")
            return [SessionRow(*row) for row in rows]

        return self.read(work)

    def delete_session(self, session_id: str, *, expect: int | None) -> bool:
        """Remove a session with all that belongs to it.

        `expect` is the unfinished step that the caller may remove with it; False if there is
        another one, and nothing was removed.
        """

        def work(cursor: apsw.Cursor) -> bool:
            row = _session(cursor, session_id)
            if row is None:
                return True
            found = cursor.execute(
                "SELECT step_id FROM step_metadata"
                " WHERE session = ? AND state IN ('open', 'sealed')",
                (session_id,),
            ).fetchone()
            if found is not None and found[0] != expect:
                return False
            steps: list[Any] = cursor.execute(
                "SELECT step_id FROM step_metadata"
                " WHERE session = ? AND state IN ('open', 'sealed', 'quarantined')",
                (session_id,),
            ).fetchall()
            for (step_id,) in steps:
                low = step_id << SEQ_BITS
                cursor.execute(
                    "DELETE FROM stream_journal WHERE id BETWEEN ? AND ?", (low, low | SEQ_MASK)
                )
            low = row.session_no << SEQ_BITS
            cursor.execute(
                "DELETE FROM history_entries WHERE id BETWEEN ? AND ?", (low, low | SEQ_MASK)
            )
            cursor.execute("DELETE FROM sessions WHERE session_no = ?", (row.session_no,))
            return True

        deleted = self.write(work)
        self.tidy_log()
        return deleted

    def purge(self) -> bool:
        """Leave no trace of deleted text in free pages, the log or a migration's backup.

        False if a reader is in the way: it keeps old text in the log until it has gone.
        """
        with self.lock:
            self.admit()
            self._level(True)
            try:
                self._db.execute("PRAGMA temp_store = MEMORY")
                self._db.execute("VACUUM")
            except apsw.Error as error:
                self._doubt_log()
                raise self.translate(error) from error
            if self.location is not None:
                for version in range(1, FORMAT):
                    self.location.backup_of(version).unlink(missing_ok=True)
            return self.checkpoint(apsw.SQLITE_CHECKPOINT_TRUNCATE)

    # --- owners ---------------------------------------------------------------------------------

    def register_owner(self) -> int:
        """Record that this opening of the store lives: first its lock, then its row."""
        who, file = this_process(), self._lock_file
        held: list[int] = []

        def work(cursor: apsw.Cursor) -> int:
            while True:
                cursor.execute(
                    "INSERT INTO owners (pid, host, boot, pid_space, opened_us)"
                    " VALUES (?, ?, ?, ?, ?)",
                    (who.pid, who.host, who.boot, who.pid_space, now_us()),
                )
                owner_id = self._db.last_insert_rowid()
                if file is None or file.try_hold(owner_id):
                    held.append(owner_id)
                    return owner_id
                # Taken, by somebody whose row did not land: that id is not given out again.
                cursor.execute("DELETE FROM owners WHERE owner_id = ?", (owner_id,))

        try:
            self.owner_id = self.write(work)
        finally:
            for owner_id in held:
                if file is not None and owner_id != self.owner_id:
                    file.release(owner_id)
        return self.owner_id

    def owners(self) -> list[OwnerRow]:
        """Everyone who opened the store and is not known to have left nothing behind."""

        def work(cursor: apsw.Cursor) -> list[OwnerRow]:
            rows = select(cursor, OWNER_COLUMNS, "FROM owners ORDER BY owner_id")
            return [OwnerRow(*row) for row in rows]

        return self.read(work)

    def owner(self, owner_id: int) -> OwnerRow | None:
        """One owner's row."""
        return next((row for row in self.owners() if row.owner_id == owner_id), None)

    def is_alive(self, owner_id: int) -> bool:
        """Whether an owner lives, in this process or another."""
        if self.refusal in (self._closed, self._forked):
            self.admit()
        if self._lock_file is None:
            return owner_id == self.owner_id and owner_id > 0
        return self._lock_file.is_alive(owner_id)

    def forget_owners(self, owner_ids: Sequence[int]) -> None:
        """Drop the rows of owners that left no unfinished step."""

        def work(cursor: apsw.Cursor) -> None:
            cursor.executemany(
                "DELETE FROM owners WHERE owner_id = ? AND NOT EXISTS (SELECT 1 FROM step_metadata"
                " WHERE state IN ('open', 'sealed') AND owner = owners.owner_id)",
                [(owner_id,) for owner_id in owner_ids],
            )

        if owner_ids:
            self.write(work)

    # --- the whole store ------------------------------------------------------------------------

    def counts(self) -> Counts:
        """Numbers about the whole store."""

        def work(cursor: apsw.Cursor) -> Counts:
            def one(sql: str) -> int:
                return int(cursor.execute(sql).get or 0)

            return Counts(
                sessions=one("SELECT count(*) FROM sessions"),
                entries=one("SELECT sum(entries) FROM sessions"),
                open_steps=one("SELECT count(*) FROM step_metadata WHERE state = 'open'"),
                sealed_steps=one("SELECT count(*) FROM step_metadata WHERE state = 'sealed'"),
                journal_events=one("SELECT count(*) FROM stream_journal"),
                bytes=one("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"),
                wal_bytes=self._log_bytes(),
            )

        return self.read(work)

    def _log_bytes(self) -> int:
        if self.location is None:
            return 0
        try:
            return self.location.wal.stat().st_size
        except OSError:
            return 0

    def back_up(self, target: Path) -> None:
        """Copy a consistent state of the live store into a new file, without its owners."""
        target = locate(target).path
        if target.exists():
            raise InvalidArgument(f"{target}: there is a file; nothing was copied: choose another")
        with self._reader_lock:
            if self.refusal not in (None, self._failed, self._read_only):
                self.admit()
            try:
                connections.back_up(self._reading(), target, owners=False)
            except (apsw.Error, OSError) as error:
                code = getattr(error, "errno", None) or self._db.system_errno
                raise failures.translate(str(target), error, code) from error


def _session(cursor: apsw.Cursor, session_id: str) -> SessionRow | None:
    row = cursor.execute(
        f"SELECT {SESSION_COLUMNS} FROM sessions WHERE session_id = ?", (session_id,)
    ).fetchone()
    return None if row is None else SessionRow(*row)
