"""Reading without writing: beside a living writer, after a kill, and for every refusal."""

from __future__ import annotations

import pytest

import holdfast
from holdfast.journal.engine.engine import SqliteEngine


def bytes_of(path):
    log = path.with_name(path.name + "-wal")
    return path.read_bytes(), log.read_bytes()


def test_a_reader_beside_a_living_writer_changes_neither_database_nor_log(tmp_path, fork):
    path = tmp_path / "a.db"

    def work(child):
        store = holdfast.open(path)
        session = store.create_session("s")
        session.add_user("one")
        child.tell(None)
        child.wait()
        session.add_user("two")
        child.tell(None)
        child.wait()

    child = fork(work)
    child.hear()
    before = bytes_of(path)
    with holdfast.open(path, read_only=True) as store:
        assert store.owner_id is None
        assert store.recovery.is_empty
        assert [m.text for m in store.session("s").messages()] == ["one"]
        assert bytes_of(path) == before
        child.go_on()
        child.hear()
        before = bytes_of(path)
        assert [m.text for m in store.session("s").messages()] == ["one", "two"]
    assert bytes_of(path) == before


def test_a_reader_after_a_kill_recovers_nothing(tmp_path, fork):
    path = tmp_path / "a.db"

    def work(child):
        step = holdfast.open(path).create_session("s").begin_step()
        step.append_text("half")
        child.tell(None)
        child.wait()

    child = fork(work)
    child.hear()
    child.kill()
    before = bytes_of(path)
    with holdfast.open(path, read_only=True) as store:
        assert store.stats().open_steps == 1
        assert store.stats().journal_events == 1
    assert bytes_of(path) == before


def test_a_reader_refuses_every_write(tmp_path):
    path = tmp_path / "a.db"
    with holdfast.open(path) as store:
        store.create_session("s")
    before = bytes_of(path)
    with holdfast.open(path, read_only=True) as store:
        session = store.session("s")
        for write in (
            store.create_session,
            lambda: store.delete_session("s"),
            lambda: session.add_user("x"),
            session.begin_step,
        ):
            with pytest.raises(holdfast.ReadOnlyStore, match="nothing was written"):
                write()
        store.backup(tmp_path / "b.db")
    assert bytes_of(path) == before
    holdfast.open(tmp_path / "b.db", create=False).close()


def test_a_closed_reader_says_so(tmp_path):
    SqliteEngine.open(tmp_path / "a.db").close()
    reader = SqliteEngine.open_read_only(tmp_path / "a.db")
    reader.close()
    reader.close()
    with pytest.raises(holdfast.StoreClosed):
        reader.counts()
    with pytest.raises(holdfast.StoreClosed):
        reader.is_alive(1)


def test_a_store_that_is_not_finished_cannot_be_read(tmp_path):
    """Its maker was killed behind the application id, before the tables."""
    path = tmp_path / "a.db"
    import sqlite3

    with sqlite3.connect(path) as db:
        db.execute("PRAGMA application_id = 1215253572")
    db.close()
    with pytest.raises(holdfast.StoreNotWritable, match="open it once without read_only"):
        holdfast.open(path, read_only=True)
    holdfast.open(path).close()
    holdfast.open(path, read_only=True).close()
