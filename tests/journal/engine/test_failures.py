"""A disk without room and a disk that fails: what is refused, what stays usable, what heals."""

from __future__ import annotations

import resource
import signal
import subprocess

import apsw
import pytest

import holdfast
from holdfast.journal.engine import log
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.recovery import doctor, salvage
from holdfast.recovery.faults import FaultDisk


@pytest.fixture
def disk():
    with FaultDisk() as disk:
        yield disk


# --- no room ------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ["full", "short", "edquot", "efbig"])
@pytest.mark.parametrize("durability", ["process", "barrier", "power"])
def test_a_step_goes_on_without_a_gap_once_there_is_room(tmp_path, disk, error, durability):
    with holdfast.open(tmp_path / "a.db", vfs=disk.name, durability=durability) as store:
        session = store.create_session("s")
        step = session.begin_step()
        step.append_text("one ")
        disk.fail("write", error=error, times=None)
        for _ in range(3):
            with pytest.raises(holdfast.StoreFull, match="not on record"):
                step.append_text("two ")
        with pytest.raises(holdfast.StoreFull):
            store.create_session("t")
        assert step.text == "one "
        disk.clear_faults()
        step.append_text("two ")
        step.append_text("three")
        assert [event.seq for event in store.engine.events(step.step_id)] == [1, 2, 3]
        step.commit()
        assert [info.id for info in store.sessions()] == ["s"]
        assert session.messages()[0].text == "one two three"


@pytest.mark.parametrize("lose_pages", [False, True])
def test_a_sync_that_finds_no_room_leaves_no_hole_in_the_log(tmp_path, disk, lose_pages):
    """Deltas before it were never synced; were they lost, the commit behind them would be too."""
    store = holdfast.open(tmp_path / "a.db", vfs=disk.name)
    step = store.create_session("s").begin_step()
    for number in range(5):
        step.append_text(f"<{number}>")
    disk.fail("sync", error="full", lose_pages=lose_pages, file="wal")
    with pytest.raises(holdfast.StoreFull):
        step.commit()
    step.commit()
    image = disk.image(len(disk.ops), tmp_path / "image", "power", "none")
    with holdfast.open(image) as found:
        assert found.session("s").messages()[0].text == "<0><1><2><3><4>"
    store.close()


def test_a_limit_on_file_sizes_is_no_room(tmp_path, fork):
    def work(child):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        store = holdfast.open(tmp_path / "a.db")
        step = store.create_session("s").begin_step()
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
        given = 0
        try:
            while True:
                step.append_text(f"{given:8}" * 16)
                given += 1
        except holdfast.StoreFull as error:
            child.tell(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        step.append_text(f"{given:8}" * 16)
        step.commit()
        child.tell((given + 1, [m.text for m in store.session("s").messages()]))
        store.close()

    child = fork(work)
    assert isinstance(child.hear(), holdfast.StoreFull)
    given, texts = child.hear()
    assert child.join() == 0
    assert texts == ["".join(f"{number:8}" * 16 for number in range(given))]


@pytest.fixture
def small(tmp_path):
    """A file system of a megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True
    )
    if done.returncode:
        pytest.skip("no leave to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_no_room_and_everything_before_is_there(small):
    filler = small / "filler"
    with holdfast.open(small / "a.db") as store:
        step = store.create_session("s").begin_step()
        filler.write_bytes(bytes(500_000))
        given = 0
        with pytest.raises(holdfast.StoreFull):
            while True:
                step.append_text(f"{given:8}" * 100)
                given += 1
        with pytest.raises(holdfast.StoreFull):
            store.backup(small / "b.db")
        assert not list(small.glob("b.db*"))
        filler.unlink()
        step.append_text("the end")
        step.commit()
    with holdfast.open(small / "a.db") as store:
        wanted = "".join(f"{number:8}" * 100 for number in range(given)) + "the end"
        assert store.session("s").messages()[0].text == wanted


def test_a_store_cannot_be_made_on_a_full_disk(small):
    (small / "filler").write_bytes(bytes((1 << 20) - 8192))
    with pytest.raises(holdfast.StoreFull):
        holdfast.open(small / "a.db")
    (small / "filler").unlink()
    holdfast.open(small / "a.db").close()


# --- failing syncs and writes -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "write"])
@pytest.mark.parametrize("durability", ["barrier", "power"])
def test_one_failure_is_healed_and_the_caller_hears_nothing(tmp_path, disk, kind, durability):
    with holdfast.open(tmp_path / "a.db", vfs=disk.name, durability=durability) as store:
        session = store.create_session("s")
        step = session.begin_step()
        fault = disk.fail(kind, file="wal")
        step.append_text("a")
        step.append_text("b")
        step.commit()
        assert fault.fired == 1
        assert session.messages()[0].text == "ab"
        assert not (tmp_path / "a.db-failed").exists()


@pytest.mark.parametrize("durability", ["barrier", "power"])
def test_a_disk_that_goes_on_failing_latches_the_store_until_it_is_reopened(
    tmp_path, disk, durability
):
    path = tmp_path / "a.db"
    store = holdfast.open(path, vfs=disk.name, durability=durability)
    session = store.create_session("s")
    step = session.begin_step()
    step.append_text("before")
    disk.fail("sync", times=None)
    with pytest.raises(holdfast.StoreFailed, match="may or may not be on record"):
        step.seal() if durability == "barrier" else step.append_text("?")
    assert (tmp_path / "a.db-failed").stat().st_mode & 0o777 == 0o600
    disk.clear_faults()  # Too late: what is on the disk is not known any more.
    for write in (
        lambda: step.append_text("x"),
        step.seal,
        step.commit,
        step.discard,
        store.create_session,
        lambda: store.delete_session("s"),
        lambda: store.engine.append_many([]),
        store.engine.purge,
    ):
        with pytest.raises(holdfast.StoreFailed):
            write()
    assert [info.id for info in store.sessions()] == ["s"]  # It can still be read.
    store.close()
    with holdfast.open(path, vfs=disk.name) as store:
        assert not (tmp_path / "a.db-failed").exists()
        assert store.session("s").messages()[0].text.startswith("before")


def test_a_failed_read_latches_nothing(tmp_path, disk):
    with holdfast.open(tmp_path / "a.db", vfs=disk.name) as store:
        session = store.create_session("s")
        for number in range(50):
            session.add_user(f"{number} " * 200)
        store.engine.checkpoint()
        store.engine._reading().execute("PRAGMA cache_size = 0")
        disk.fail("read", times=None)
        with pytest.raises(holdfast.StoreFailed, match="input/output"):
            session.messages()
        disk.clear_faults()
        session.add_user("it goes on")
        assert len(session.messages()) == 51


def test_a_failed_checkpoint_loses_nothing_and_is_made_up_for(tmp_path, disk, monkeypatch):
    monkeypatch.setattr(log, "LOG_TIDY_PAGES", 1)
    path = tmp_path / "a.db"
    store = holdfast.open(path, vfs=disk.name)
    session = store.create_session("s")
    fault = disk.fail("write", file="db", times=2)
    with session.begin_step() as step:
        step.append_text("one")
    assert fault.fired == 2
    with session.begin_step() as step:
        step.append_text("two")
    store.close()
    with holdfast.open(path) as store:
        assert [m.text for m in store.session("s").messages()] == ["one", "two"]


def test_whoever_closes_last_leaves_an_empty_log_and_no_row(tmp_path):
    path = tmp_path / "a.db"
    first, second = SqliteEngine.open(path), SqliteEngine.open(path)
    first.close()
    assert (tmp_path / "a.db-wal").stat().st_size
    second.close()
    assert not (tmp_path / "a.db-wal").stat().st_size
    third = SqliteEngine.open(path)
    assert [row.owner_id for row in third.owners()] == [third.owner_id]
    third.close()


def test_a_clean_store_is_opened_without_writing_its_log_again(tmp_path, disk):
    """Only what somebody died over is in doubt: opening a clean store costs no second sync."""
    path = tmp_path / "a.db"
    SqliteEngine.open(path, vfs=disk.name).close()
    before = disk.count("sync", "wal")
    engine = SqliteEngine.open(path, vfs=disk.name)
    first = disk.count("sync", "wal") - before
    other = SqliteEngine.open(path, vfs=disk.name)
    assert disk.count("sync", "wal") - before - first == 1
    other.close()
    engine.close()
    assert first <= 2  # The header of a new log, and the row of the owner.


# --- a counter that is gone ---------------------------------------------------------------------


@pytest.mark.parametrize("found", [None, 0, -5, 1 << 40], ids=str)
def test_a_damaged_counter_of_steps_is_named_and_no_step_begins(tmp_path, found):
    path = tmp_path / "a.db"
    with holdfast.open(path) as store:
        store.create_session("s").begin_step().commit()
    db = apsw.Connection(str(path))
    db.execute(
        "DELETE FROM step_counter"
        if found is None
        else f"UPDATE step_counter SET next_step_id = {found}"
    )
    db.close()
    with holdfast.open(path) as store:
        with pytest.raises(holdfast.StoreCorrupt, match="counter of step ids"):
            store.session("s").begin_step()
        store.session("s").add_user("the rest of the store is good")
    with holdfast.StreamJournal.open(path) as stream, holdfast.ToolJournal.open(path) as tools:
        for act in (stream.begin_step, stream.stats, lambda: tools.begin_streaming_batch("m")):
            with pytest.raises(holdfast.StoreCorrupt, match="counter of step ids"):
                act()
    assert [problem.code for problem in doctor(path).problems] == ["step-counter-behind"]
    salvage(path, tmp_path / "b.db")
    with holdfast.open(tmp_path / "b.db") as store:
        store.session("s").begin_step().commit()
