"""The store as a whole: backups, purges, and what others can read in the file."""

from __future__ import annotations

import re
import sqlite3
import threading

import apsw
import pytest

import holdfast
from holdfast.journal.engine import schema
from holdfast.journal.engine.engine import SqliteEngine

SECRET = "the marker that must vanish"


def test_a_backup_of_a_live_store_is_one_file_without_owners(tmp_path):
    with holdfast.open(tmp_path / "a.db") as store:
        session = store.create_session("s")
        session.add_user("hello")
        step = session.begin_step()
        step.append_text("in flight")
        store.backup(tmp_path / "b.db")
        step.append_text("later")
        assert [file.name for file in tmp_path.glob("b.db*")] == ["b.db"]
        assert (tmp_path / "b.db").stat().st_mode & 0o777 == 0o600
        db = sqlite3.connect(tmp_path / "b.db")
        assert db.execute("SELECT count(*) FROM owners").fetchone() == (0,)
        db.close()
        with holdfast.open(tmp_path / "b.db") as copy:
            # Nobody lives in it, so what was in flight is recovered there, and only there.
            assert [message.text for message in copy.session("s").messages()] == [
                "hello",
                "in flight",
            ]
        step.commit()


def test_a_backup_is_consistent_while_others_write(tmp_path):
    with holdfast.open(tmp_path / "a.db", durability="process") as store:
        stop = threading.Event()

        def work():
            session = store.create_session("s")
            while not stop.is_set():
                with session.begin_step() as step:
                    step.append_text("one ")
                    step.append_text("two")

        thread = threading.Thread(target=work)
        thread.start()
        try:
            for number in range(5):
                store.backup(tmp_path / f"b{number}.db")
        finally:
            stop.set()
            thread.join()
    for number in range(5):
        with holdfast.open(tmp_path / f"b{number}.db") as copy:
            for info in copy.sessions():
                texts = [message.text for message in copy.session(info.id).messages()]
                assert texts[:-1] == ["one two"] * (len(texts) - 1)


def test_a_backup_replaces_nothing(tmp_path):
    with holdfast.open(tmp_path / "a.db") as store:
        (tmp_path / "precious").write_text("mine")
        for target in ("precious", "a.db"):
            with pytest.raises(ValueError, match="choose another"):
                store.backup(tmp_path / target)
        with pytest.raises(holdfast.NotAStore):
            store.backup(tmp_path)
        with pytest.raises(holdfast.HoldfastError):
            store.backup(tmp_path / "no" / "such" / "folder" / "b.db")
        store.create_session("s")
    assert (tmp_path / "precious").read_text() == "mine"
    with holdfast.open(tmp_path / "a.db") as store:
        assert len(store.sessions()) == 1


def everywhere(folder):
    return [file.name for file in folder.iterdir() if SECRET.encode() in file.read_bytes()]


def test_a_purge_leaves_no_trace_of_the_text_in_any_file(tmp_path):
    with holdfast.open(tmp_path / "a.db") as store:
        session = store.create_session("s", title=SECRET)
        session.add_user(SECRET)
        with session.begin_step() as step:
            for _ in range(50):
                step.append_text(SECRET)
        keep = store.create_session("t")
        keep.add_user("stays")
        # As a migration would have left it.
        store.engine.location.backup_of(1).write_text(SECRET)
        assert everywhere(tmp_path)
        store.delete_session("s", purge=True)
        assert everywhere(tmp_path) == []
        assert keep.messages()[0].text == "stays"
    assert everywhere(tmp_path) == []


def test_a_purge_says_when_a_reader_is_in_the_way(tmp_path, monkeypatch):
    from holdfast.journal.engine import connection

    monkeypatch.setattr(connection, "BUSY_TIMEOUT_S", 0.1)
    engine = SqliteEngine.open(tmp_path / "a.db")
    reader = apsw.Connection(str(tmp_path / "a.db"))
    reader.execute("BEGIN; SELECT * FROM sessions").fetchall()
    assert engine.purge() is False
    reader.close()
    assert engine.purge() is True
    engine.close()


# --- for those who open the file with something else ---------------------------------------------


def test_the_views_can_be_read_with_plain_sqlite(tmp_path):
    with holdfast.open(tmp_path / "a.db") as store:
        session = store.create_session("s", title="A talk", model="m")
        session.add_user("hello")
        store.create_session("t").begin_step("model").append_text("half a")
        db = sqlite3.connect(f"file:{tmp_path / 'a.db'}?mode=ro", uri=True)
        rows = db.execute("SELECT session_id, title, entries FROM v_sessions").fetchall()
        assert sorted(rows) == [("s", "A talk", 1), ("t", None, 0)]
        ((session_id, entry, role, body),) = db.execute(
            "SELECT session_id, entry_id, role, body FROM v_messages"
        )
        assert (session_id, entry, role) == ("s", 0, "user")
        assert "hello" in body
        assert db.execute(
            "SELECT step_id, session, state, pid IS NOT NULL, events, text FROM v_unfinished"
        ).fetchall() == [(1, "t", "open", 1, 1, "half a")]
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        db.close()


def test_the_schema_in_the_file_explains_itself(tmp_path):
    SqliteEngine.open(tmp_path / "a.db").close()
    db = sqlite3.connect(tmp_path / "a.db")
    tables = dict(db.execute("SELECT name, sql FROM sqlite_schema WHERE type IN ('table', 'view')"))
    db.close()
    for name in (
        "stream_journal step_metadata step_counter owners sessions tool_batches tool_calls"
        " tool_results history_entries summaries v_sessions v_messages v_unfinished"
    ).split():
        assert "--" in tables[name], f"{name} has no comment"
        assert name.startswith("v_") or re.search(r"\bSTRICT\b", tables[name])


def test_the_settings_of_the_file(tmp_path):
    engine = SqliteEngine.open(tmp_path / "a.db")
    wanted = {
        "journal_mode": "wal",
        "page_size": 1024,
        "foreign_keys": 1,
        "application_id": schema.APPLICATION_ID,
        "user_version": schema.FORMAT,
        "wal_autocheckpoint": 0,
    }
    assert {name: engine._db.pragma(name) for name in wanted} == wanted
    engine.close()


@pytest.mark.parametrize(
    ("durability", "delta", "barrier"), [("process", 0, 0), ("barrier", 0, 1), ("power", 1, 1)]
)
def test_a_commit_waits_for_the_disk_where_its_level_says_so(tmp_path, durability, delta, barrier):
    from holdfast.recovery.faults import FaultDisk

    with (
        FaultDisk() as disk,
        holdfast.open(tmp_path / "a.db", vfs=disk.name, durability=durability) as store,
    ):
        session = store.create_session("s")

        def syncs(work):
            before = disk.count("sync")
            work()
            return disk.count("sync") - before

        assert syncs(lambda: session.add_user("x")) == barrier
        step = session.begin_step()
        assert syncs(lambda: step.append_text("x")) == delta
        assert syncs(lambda: step.announce_call("c", "tool")) == delta
        assert syncs(lambda: step.append_done()) == delta
        assert syncs(step.seal) == barrier
        assert syncs(lambda: step.start_call("c")) == barrier
        assert syncs(lambda: step.record_result("c", "r")) == barrier
        assert syncs(step.commit) == barrier
