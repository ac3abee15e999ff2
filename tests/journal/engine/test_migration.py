"""Making and migrating a store: a backup first, nobody beside it, and either old or new."""

from __future__ import annotations

import threading
from pathlib import Path

import apsw
import pytest

import holdfast
from holdfast.journal.engine import connection, schema
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.recovery.faults import FaultDisk


def make_format_1(path: Path, *, vfs: str | None = None) -> None:
    """A store as format 1 left it, with an unfinished step of an owner that is dead."""
    db = apsw.Connection(str(path), vfs=vfs)
    db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    db.execute(f"PRAGMA page_size = {schema.PAGE_BYTES}")
    db.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
    db.pragma("journal_mode", "wal")
    db.execute("BEGIN IMMEDIATE")
    db.execute(schema.JOURNAL_SIDE)
    db.execute("INSERT INTO owners VALUES (7, 1, 'host', 'boot', 'pids', 0)")
    db.execute("UPDATE step_counter SET next_step_id = 42")
    db.execute("PRAGMA user_version = 1")
    db.execute("COMMIT")
    db.close()


def version(path: Path) -> int:
    db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)  # Else closing waits for the real disk.
    try:
        assert db.pragma("quick_check") == "ok"
        found = db.pragma("user_version")
        assert isinstance(found, int)
        return found
    finally:
        db.close()


def test_a_store_of_format_1_is_migrated_after_a_backup(tmp_path, steps):
    path = tmp_path / "a.db"
    make_format_1(path)
    engine = SqliteEngine.open(path)
    assert steps.begin(engine) == 42
    assert engine.owner_id == 8
    engine.close()
    assert version(path) == schema.FORMAT
    backup = tmp_path / "a.db-format1-backup"
    assert backup.stat().st_mode & 0o777 == 0o600
    assert version(backup) == 1
    assert not list(tmp_path.glob("*.partial*"))
    with holdfast.open(path) as store:
        store.create_session("s").add_user("the new side works")


def test_a_backup_can_be_migrated_in_its_turn(tmp_path):
    path = tmp_path / "a.db"
    make_format_1(path)
    SqliteEngine.open(path).close()
    SqliteEngine.open(tmp_path / "a.db-format1-backup").close()
    assert version(tmp_path / "a.db-format1-backup") == schema.FORMAT


def test_a_migration_is_refused_while_another_owner_lives(tmp_path, fork):
    path = tmp_path / "a.db"
    make_format_1(path)

    def work(child):
        # An owner of the old format: it holds its byte and knows nothing of the new one.
        from holdfast.journal import locations, owners

        file = owners.enter(locations.locate(path), exclusive=False)
        assert file.try_hold(7)
        child.tell(None)
        child.wait()

    child = fork(work)
    child.hear()
    before = (path.read_bytes(), (tmp_path / "a.db-wal").read_bytes())
    with pytest.raises(holdfast.StoreBusy, match=r"migrated to format .* pid 1 on host"):
        holdfast.open(path)
    assert (path.read_bytes(), (tmp_path / "a.db-wal").read_bytes()) == before
    assert not (tmp_path / "a.db-format1-backup").exists()
    child.kill()
    holdfast.open(path).close()


def test_a_reader_does_not_migrate(tmp_path):
    make_format_1(tmp_path / "a.db")
    with pytest.raises(holdfast.StoreNotWritable, match="format 1 must be migrated"):
        holdfast.open(tmp_path / "a.db", read_only=True)
    assert version(tmp_path / "a.db") == 1


def test_a_migration_that_raises_leaves_the_old_format(tmp_path, monkeypatch):
    def broken(db):
        db.execute("CREATE TABLE half (x)")
        raise RuntimeError("a bug in a migration")

    path = tmp_path / "a.db"
    make_format_1(path)
    steps = (schema.MIGRATIONS[0], broken, *schema.MIGRATIONS[2:])
    monkeypatch.setattr(schema, "MIGRATIONS", steps)
    with pytest.raises(RuntimeError):
        SqliteEngine.open(path)
    monkeypatch.undo()
    assert version(path) == 1
    SqliteEngine.open(path).close()
    assert version(path) == schema.FORMAT


@pytest.mark.parametrize("made", [0, 1], ids=["making", "migrating"])
def test_a_crash_at_any_operation_leaves_a_file_that_opens_and_is_old_or_new(tmp_path, made, steps):
    """Both by a kill and by a power cut: no image is half a store, and each can go on."""
    path = tmp_path / "a.db"
    seen: set[str] = set()
    found: set[int] = set()
    with FaultDisk() as disk:
        if made:
            make_format_1(path, vfs=disk.name)
        start = len(disk.ops)
        engine = SqliteEngine.open(path, vfs=disk.name)
        engine.close()
        for at in range(start, len(disk.ops) + 1):
            cuts = [("kill", "none")]
            cuts += [("power", keep) for keep in disk.strategies(at, randoms=1, limit=3)]
            for loss, keep in cuts:
                snapshot = disk.snapshot(at, loss, keep)
                if snapshot.digest in seen or path.name not in snapshot.files:
                    continue
                seen.add(snapshot.digest)
                folder = tmp_path / f"{len(seen)}"
                image = disk.image(at, folder, loss, keep)
                if made:
                    found.add(version(image))
                with FaultDisk() as quick:  # Never waits for the real disk.
                    again = SqliteEngine.open(image, vfs=quick.name)
                    assert steps.begin(again) == (42 if made else 1)
                    assert again.counts().sessions == 0
                    again.close()
    assert len(seen) > 20
    if made:
        assert found == {1, schema.FORMAT}


def test_threads_that_open_an_old_store_at_once_migrate_it_once(tmp_path, monkeypatch):
    path = tmp_path / "a.db"
    make_format_1(path)
    backups = []
    real = connection.back_up
    monkeypatch.setattr(connection, "back_up", lambda *a, **k: (backups.append(1), real(*a, **k)))
    errors: list[BaseException] = []

    def work():
        try:
            SqliteEngine.open(path).close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert backups == [1]


def test_a_database_that_another_program_made_in_between_is_not_ours(tmp_path, monkeypatch):
    path = tmp_path / "a.db"
    monkeypatch.setattr(connection, "look", lambda *_, **__: False)
    db = apsw.Connection(str(path))
    db.execute("CREATE TABLE theirs (x)")
    db.close()
    before = path.read_bytes()
    with pytest.raises(holdfast.NotAStore):
        SqliteEngine.open(path)
    assert path.read_bytes() == before


def test_a_migration_does_not_build_upon_a_log_that_a_failed_sync_left_in_doubt(
    tmp_path, monkeypatch
):
    path = tmp_path / "a.db"
    with FaultDisk() as disk:
        make_format_1(path, vfs=disk.name)
        db = apsw.Connection(str(path), vfs=disk.name)
        db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        disk.fail("sync", error="eio", lose_pages=True)
        with pytest.raises(apsw.IOError):
            db.execute("UPDATE step_counter SET next_step_id = 43")
        db.close()
        # Not by the healing that comes behind a migration.
        monkeypatch.setattr(SqliteEngine, "heal_log", lambda engine: None)
        SqliteEngine.open(path, vfs=disk.name)
        image = disk.image(len(disk.ops), tmp_path / "cut", "power", "none")
    assert version(image) == schema.FORMAT
