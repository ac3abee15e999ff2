"""Who is alive: owners that are killed, stopped, copied, closed, or have a number used again."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

import holdfast
from holdfast.journal import owners
from holdfast.journal.engine.engine import SqliteEngine


def open_and_hold(path):
    """What a child does: open, begin a step, say who it is, live on."""

    def work(child):
        engine = SqliteEngine.open(path)
        child.tell(engine.owner_id)
        child.wait()

    return work


def test_an_owner_in_another_process_is_alive_until_it_is_killed(tmp_path, fork):
    path = tmp_path / "a.db"
    child = fork(open_and_hold(path))
    owner = child.hear()
    with_store = SqliteEngine.open(path)
    assert with_store.is_alive(owner)
    child.kill()
    assert not with_store.is_alive(owner)
    with_store.close()


def test_a_killed_owner_is_dead_although_its_forked_child_lives_on(tmp_path, fork):
    path = tmp_path / "a.db"

    def work(child):
        engine = SqliteEngine.open(path)
        heir = os.fork()
        if heir == 0:
            time.sleep(600)
            os._exit(0)
        child.tell((engine.owner_id, heir))
        child.wait()

    child = fork(work)
    owner, heir = child.hear()
    engine = SqliteEngine.open(path)
    try:
        assert engine.is_alive(owner)
        child.kill()
        os.kill(heir, 0)  # It lives.
        assert not engine.is_alive(owner)
    finally:
        os.kill(heir, signal.SIGKILL)
        engine.close()


def test_a_stopped_owner_is_alive(tmp_path, fork):
    path = tmp_path / "a.db"
    child = fork(open_and_hold(path))
    owner = child.hear()
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    with_store = SqliteEngine.open(path)
    assert with_store.is_alive(owner)
    with_store.close()


def test_a_process_that_got_the_pid_of_a_dead_owner_is_not_that_owner(tmp_path, fork):
    path = tmp_path / "a.db"
    child = fork(open_and_hold(path))
    owner = child.hear()
    child.kill()
    with SqliteEngineContext(path) as engine:
        # As if this very process had been given the number of the dead one.
        engine.write(
            lambda cursor: cursor.execute(
                "UPDATE owners SET pid = ? WHERE owner_id = ?", (os.getpid(), owner)
            )
        )
        assert engine.owner(owner).pid == os.getpid()
        assert not engine.is_alive(owner)


class SqliteEngineContext:
    def __init__(self, path):
        self.engine = SqliteEngine.open(path)

    def __enter__(self):
        return self.engine

    def __exit__(self, *_):
        self.engine.close()


def test_closing_one_of_two_stores_in_a_process_leaves_the_other_alive(tmp_path, fork):
    path = tmp_path / "a.db"

    def work(child):
        first, second = SqliteEngine.open(path), SqliteEngine.open(path)
        first.close()
        child.tell((first.owner_id, second.owner_id))
        child.wait()

    first, second = fork(work).hear()
    engine = SqliteEngine.open(path)
    assert not engine.is_alive(first)
    assert engine.is_alive(second)
    engine.close()


def test_a_reader_that_closes_leaves_the_writer_of_its_process_alive(tmp_path, fork):
    path = tmp_path / "a.db"

    def work(child):
        SqliteEngine.open(path).close()
        reader = SqliteEngine.open_read_only(path)
        writer = SqliteEngine.open(path)
        later = SqliteEngine.open_read_only(path)
        reader.close()
        later.close()
        child.tell(writer.owner_id)
        child.wait()

    owner = fork(work).hear()
    engine = SqliteEngine.open(path)
    assert engine.is_alive(owner)
    engine.close()


def test_a_reader_sees_who_is_alive(tmp_path, fork):
    path = tmp_path / "a.db"

    def work(child):
        store = holdfast.open(path)
        store.create_session("s").begin_step()
        child.tell(None)
        child.wait()

    child = fork(work)
    child.hear()
    with holdfast.open(path, read_only=True) as store:
        assert [info.live for info in store.sessions()] == [True]
        child.kill()
        assert [info.live for info in store.sessions()] == [False]


def test_a_copied_store_has_no_live_owners(tmp_path):
    engine = SqliteEngine.open(tmp_path / "a.db")
    copied = tmp_path / "copy"
    shutil.copytree(tmp_path, copied, ignore=lambda *_: ["copy"])
    copy = SqliteEngine.open(copied / "a.db")
    assert engine.owner_id in [row.owner_id for row in copy.owners()]
    assert not copy.is_alive(engine.owner_id)
    assert copy.owner_id != engine.owner_id
    copy.close()
    engine.close()


def test_an_owner_id_is_never_used_again(tmp_path):
    ids = []
    for _ in range(3):
        engine = SqliteEngine.open(tmp_path / "a.db")
        ids.append(engine.owner_id)
        engine.close()
    assert len(set(ids)) == 3
    assert ids == sorted(ids)


def test_after_a_kill_there_is_nothing_to_clean(tmp_path, fork):
    path = tmp_path / "a.db"

    def work(child):
        store = holdfast.open(path)
        step = store.create_session("s").begin_step()
        step.append_text("half a th")
        child.tell(None)
        child.wait()

    for exclusive in (False, True):
        child = fork(work)
        child.hear()
        child.kill()
        with holdfast.open(path, exclusive=exclusive) as store:
            assert [step.outcome for step in store.recovery.steps] == ["interrupted"]
            store.delete_session("s")
            assert len(store.engine.owners()) == 1


def test_a_store_that_was_forgotten_is_dead_once_it_is_collected(tmp_path):
    forgotten = SqliteEngine.open(tmp_path / "a.db")
    owner = forgotten.owner_id
    engine = SqliteEngine.open(tmp_path / "a.db")
    assert engine.is_alive(owner)
    del forgotten
    gc.collect()
    assert not engine.is_alive(owner)
    engine.close()


def test_a_store_made_again_under_the_name_of_a_deleted_one_is_another_store(tmp_path):
    path = tmp_path / "a.db"
    old = SqliteEngine.open(path)
    for file in tmp_path.iterdir():
        file.unlink()
    new = SqliteEngine.open(path)
    assert new._lock_file is not old._lock_file
    new.close()
    old.close()


def test_a_lock_that_is_taken_is_passed_over(tmp_path):
    """Somebody holds the byte of the next id, though its row did not land."""
    path = tmp_path / "a.db"
    first = SqliteEngine.open(path)
    assert first._lock_file.try_hold(first.owner_id + 1)
    second = SqliteEngine.open(path)
    assert second.owner_id == first.owner_id + 2
    assert second.owner(first.owner_id + 1) is None
    second.close()
    first.close()


def test_no_descriptor_is_left_when_all_stores_are_closed(tmp_path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    stores = [SqliteEngine.open(tmp_path / "a.db") for _ in range(3)]
    stores.append(SqliteEngine.open_read_only(tmp_path / "a.db"))
    for store in stores:
        store.close()
        store.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert not owners._open_files


def test_a_symbolic_link_shares_the_lock(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real" / "a.db")
    first = SqliteEngine.open(tmp_path / "real" / "a.db")
    with SqliteEngineContext(tmp_path / "link") as second:
        assert second.is_alive(first.owner_id)
        assert second._lock_file is first._lock_file
    first.close()
    assert not (tmp_path / "link-lock").exists()


# --- modes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", ["shared", "exclusive", "read only"])
def test_a_second_process_is_told_who_has_the_store_exclusively(tmp_path, fork, wanted):
    path = tmp_path / "a.db"

    def work(child):
        engine = SqliteEngine.open(path, exclusive=True)
        child.tell(engine.owner_id)
        child.wait()

    child = fork(work)
    child.hear()
    with pytest.raises(holdfast.StoreBusy) as caught:
        holdfast.open(path, exclusive=wanted == "exclusive", read_only=wanted == "read only")
    assert f"pid {child.pid} on {os.uname().nodename}" in str(caught.value)
    child.kill()
    holdfast.open(path, exclusive=True).close()


def test_exclusive_is_refused_while_another_process_shares_the_store(tmp_path, fork):
    path = tmp_path / "a.db"
    child = fork(open_and_hold(path))
    child.hear()
    with pytest.raises(holdfast.StoreBusy, match=f"pid {child.pid} on"):
        holdfast.open(path, exclusive=True)


@pytest.mark.parametrize("first", [False, True])
def test_one_process_has_one_mode_for_a_store(tmp_path, first):
    path = tmp_path / "a.db"
    with holdfast.open(path, exclusive=first):
        with pytest.raises(holdfast.StoreBusy, match="one mode"):
            holdfast.open(path, exclusive=not first)
        holdfast.open(path, exclusive=first).close()
    holdfast.open(path, exclusive=not first).close()
