"""The length of the log: no checkpoint in an append, one when a step ends, a cap, and shrinking."""

from __future__ import annotations

import apsw
import pytest

import holdfast
from holdfast.journal.engine import log
from holdfast.journal.engine.connection import WAL_KEEP_BYTES
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.recovery.faults import FaultDisk


def test_an_append_never_writes_to_the_database_file(tmp_path):
    with FaultDisk() as disk, holdfast.open(tmp_path / "a.db", vfs=disk.name) as store:
        step = store.create_session("s").begin_step()
        before = disk.count("write", "db")
        for number in range(2000):
            step.append_text(f"{number} " * 100)
        assert disk.count("write", "db") == before
        step.commit()
        assert disk.count("write", "db") > before  # It had grown, and the step has ended.


def test_a_short_step_ends_without_a_checkpoint(tmp_path):
    with FaultDisk() as disk, holdfast.open(tmp_path / "a.db", vfs=disk.name) as store:
        session = store.create_session("s")
        before = disk.count("write", "db")
        for _ in range(5):
            with session.begin_step() as step:
                step.append_text("short")
        assert disk.count("write", "db") == before


@pytest.mark.parametrize("size", [1, 5000, 300_000])
def test_an_endless_step_does_not_outgrow_the_cap(tmp_path, size, monkeypatch, steps):
    monkeypatch.setattr(log, "LOG_CAP_PAGES", 6000)
    events: list[str] = []
    engine = SqliteEngine.open(
        tmp_path / "a.db", durability="process", observer=lambda event: events.append(event.kind)
    )
    step = steps.begin(engine)
    content = "x" * size
    for seq in range(1, 30_000_000 // (size + 1500)):
        steps.append(engine, step, seq, content)
    longest = (6000 + log.LOG_LOOK_PAGES) * 1048 + 2 * size
    assert (tmp_path / "a.db-wal").stat().st_size <= longest
    assert events.count("checkpoint") in range(1, 9)
    engine.close()


def test_large_results_count_towards_the_cap_too(tmp_path, monkeypatch):
    monkeypatch.setattr(log, "LOG_CAP_PAGES", 6000)
    with holdfast.open(tmp_path / "a.db", durability="process") as store:
        step = store.create_session("s").begin_step()
        for number in range(12):
            step.announce_call(f"c{number}", "tool")
        step.append_done()
        step.seal()
        for number in range(12):
            step.record_result(f"c{number}", "x" * 4_000_000)
        assert store.stats().wal_bytes < 20_000_000
        step.discard()


def test_the_cap_is_some_32_megabytes():
    assert 28 << 20 < log.LOG_CAP_PAGES * 1048 < 34 << 20


def test_the_log_shrinks_once_a_reader_that_held_a_snapshot_has_gone(tmp_path, steps):
    path = tmp_path / "a.db"
    engine = SqliteEngine.open(path, durability="process")
    step = steps.begin(engine)
    steps.append(engine, step, 1)
    reader = apsw.Connection(str(path))
    reader.execute("BEGIN; SELECT count(*) FROM stream_journal").fetchall()
    seq = 1
    while (tmp_path / "a.db-wal").stat().st_size < WAL_KEEP_BYTES + (2 << 20):
        seq += 1
        steps.append(engine, step, seq, "x" * 50_000)
    engine.discard(step)
    assert (tmp_path / "a.db-wal").stat().st_size > WAL_KEEP_BYTES
    reader.close()
    for _ in range(2):
        step = steps.begin(engine)
        for seq in range(1, 1200):
            steps.append(engine, step, seq)
        engine.discard(step)
    assert (tmp_path / "a.db-wal").stat().st_size <= WAL_KEEP_BYTES
    engine.close()


def test_a_log_in_memory_has_no_length(steps):
    engine = SqliteEngine.open_in_memory()
    step = steps.begin(engine)
    for seq in range(1, log.LOG_LOOK_PAGES + 10):
        steps.append(engine, step, seq)
    assert engine.discard(step) == log.LOG_LOOK_PAGES + 9
    assert engine.checkpoint()
    engine.close()
