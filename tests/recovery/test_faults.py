from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.recovery import faults
from holdfast.recovery.faults import FaultDisk, Op
from holdfast.recovery.images import Replay


@pytest.fixture
def disk() -> Iterator[FaultDisk]:
    with FaultDisk(seed=1) as made:
        yield made


def connect(path: Path, level: str = "full", vfs: str | None = None) -> apsw.Connection:
    """A connection that checkpoints only when told to, also when it closes."""
    db = apsw.Connection(str(path), vfs=vfs)
    db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    db.execute("PRAGMA journal_mode=WAL; PRAGMA wal_autocheckpoint=0").fetchall()
    db.execute(f"PRAGMA synchronous={level}")
    db.execute("CREATE TABLE IF NOT EXISTS t (n INTEGER PRIMARY KEY, body TEXT)")
    return db


def insert(db: apsw.Connection, disk: FaultDisk, count: int) -> None:
    for _ in range(count):
        disk.mark("begin")
        db.execute("INSERT INTO t (body) VALUES (?)", ("x" * 300,))
        disk.mark("ack", db.last_insert_rowid())


def workload(path: Path, disk: FaultDisk, level: str) -> None:
    """Commits, checkpoints, a WAL that starts again, one that is deleted, a second life."""
    path.parent.mkdir(exist_ok=True)
    with closing(connect(path, level, disk.name)) as db:
        insert(db, disk, 4)
        db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        insert(db, disk, 3)
        db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        insert(db, disk, 2)
        db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0)
    with closing(connect(path, level, disk.name)) as db:
        insert(db, disk, 2)


class State(NamedTuple):
    where: str
    sound: bool
    rows: list[int]
    acked: int
    begun: int

    @property
    def keeps_its_promise(self) -> bool:
        gapless = self.rows == list(range(1, len(self.rows) + 1))
        return gapless and self.acked <= len(self.rows) <= self.begun


def look(path: Path) -> tuple[bool, list[int]]:
    with closing(apsw.Connection(str(path))) as db:
        try:
            sound = db.execute("PRAGMA integrity_check").get == "ok"
            if not db.table_exists(None, "t"):
                return sound, []
            return sound, [n for (n,) in db.execute("SELECT n FROM t ORDER BY n")]
        except apsw.CorruptError:
            return False, []


def states(disk: FaultDisk, folder: Path, loss: str, start: int = 0) -> Iterator[State]:
    """Every operation times every strategy; equal images are looked at once."""
    seen: dict[str, tuple[bool, list[int]]] = {}
    for at in range(start, len(disk.ops) + 1):
        marks = [op for op in disk.ops[:at] if op.kind == "mark"]
        acked = max((op.payload for op in marks if op.label == "ack"), default=0)
        begun = sum(op.label == "begin" for op in marks)
        for keep in disk.strategies(at, limit=12) if loss == "power" else ["none"]:
            digest = disk.snapshot(at, loss, keep).digest
            if digest not in seen:
                seen[digest] = look(disk.image(at, folder, loss, keep))
            yield State(f"{loss} after {at}, keep {keep}", *seen[digest], acked, begun)


# -- what survives


def test_rows_acknowledged_at_full_survive_every_power_loss(tmp_path, disk):
    workload(tmp_path / "live" / "a.db", disk, "full")
    for state in states(disk, tmp_path / "image", "power"):
        assert state.sound and state.keeps_its_promise, state


def test_the_rig_goes_red_when_nothing_is_synced(tmp_path, disk):
    workload(tmp_path / "live" / "a.db", disk, "off")
    found = list(states(disk, tmp_path / "image", "power"))
    assert any(state.sound and not state.keeps_its_promise for state in found)
    assert any(not state.sound for state in found)


def test_normal_loses_the_newest_rows_but_never_corrupts(tmp_path, disk):
    workload(tmp_path / "live" / "a.db", disk, "normal")
    found = list(states(disk, tmp_path / "image", "power"))
    for state in found:
        assert state._replace(acked=0).keeps_its_promise and state.sound, state
    assert any(not state.keeps_its_promise for state in found)


@pytest.mark.parametrize("level", ["off", "normal", "full"])
def test_a_killed_process_loses_nothing_at_any_level(tmp_path, disk, level):
    workload(tmp_path / "live" / "a.db", disk, level)
    for state in states(disk, tmp_path / "image", "kill"):
        assert state.sound and state.keeps_its_promise, state


def test_the_last_kill_image_is_the_files_themselves(tmp_path, disk):
    path = tmp_path / "live" / "a.db"
    workload(path, disk, "normal")
    real = {p.name: p.read_bytes() for p in path.parent.iterdir() if not p.match("*-shm")}
    assert disk.snapshot(len(disk.ops)).files == real
    image = disk.image(len(disk.ops), tmp_path / "image")
    assert {p.name: p.read_bytes() for p in image.parent.iterdir()} == real


def test_a_real_kill_leaves_what_the_kill_image_shows(tmp_path, disk):
    """The cross-check: the same workload, ended by SIGKILL at an operation of its own."""
    workload(tmp_path / "live" / "a.db", disk, "normal")
    program = (
        "import importlib.util, sys; from pathlib import Path\n"
        "spec = importlib.util.spec_from_file_location('rig', sys.argv[1])\n"
        "rig = importlib.util.module_from_spec(spec); sys.modules['rig'] = rig\n"
        "spec.loader.exec_module(rig)\n"
        "disk = rig.FaultDisk(); disk.die_at = int(sys.argv[3])\n"
        "rig.workload(Path(sys.argv[2]), disk, 'normal')\n"
    )
    for at in (12, len(disk.ops) // 2, len(disk.ops) - 1):
        path = tmp_path / str(at) / "a.db"
        done = subprocess.run([sys.executable, "-c", program, __file__, path, str(at)], check=False)
        assert done.returncode == -9
        assert look(path) == look(disk.image(at, tmp_path / "image"))


def test_connections_in_several_threads_lose_nothing_at_full(tmp_path, disk):
    path = tmp_path / "live" / "a.db"
    path.parent.mkdir()
    connect(path, "full", disk.name).close()

    def write() -> None:
        with closing(apsw.Connection(str(path), vfs=disk.name)) as db:
            db.set_busy_timeout(60_000)
            for _ in range(15):
                db.execute("INSERT INTO t (body) VALUES ('x')")
                disk.mark("ack")

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [op.number for op in disk.ops] == list(range(1, len(disk.ops) + 1))
    for at in range(0, len(disk.ops) + 1, 7):
        acked = sum(op.kind == "mark" for op in disk.ops[:at])
        sound, rows = look(disk.image(at, tmp_path / "image", "power", "none"))
        assert sound and len(rows) >= acked


# -- folders


def rollback_mode(path: Path, disk: FaultDisk, level: str) -> int:
    path.parent.mkdir()
    with closing(apsw.Connection(str(path), vfs=disk.name)) as db:
        db.execute(f"PRAGMA synchronous={level}")
        db.execute("CREATE TABLE t (n INTEGER PRIMARY KEY)")
        db.execute("INSERT INTO t VALUES (1)")
    return next(op.number for op in reversed(disk.ops) if op.kind == "delete")


def test_a_journal_whose_deletion_was_synced_is_in_no_image(tmp_path, disk):
    deleted = rollback_mode(tmp_path / "live" / "a.db", disk, "extra")
    for at in range(deleted, len(disk.ops) + 1):
        for keep in disk.strategies(at):
            assert list(disk.snapshot(at, "power", keep).files) == ["a.db"]
    assert look(disk.image(deleted, tmp_path / "image", "power", "none")) == (True, [1])


def test_a_journal_whose_deletion_was_not_synced_may_come_back(tmp_path, disk):
    deleted = rollback_mode(tmp_path / "live" / "a.db", disk, "full")
    assert "a.db-journal" in disk.snapshot(deleted, "power", "none").files
    assert "a.db-journal" not in disk.snapshot(deleted, "power", "all").files
    assert look(disk.image(deleted, tmp_path / "image", "power", "none")) == (True, [])


def test_a_database_whose_folder_was_never_synced_may_be_gone(tmp_path, disk):
    workload(tmp_path / "live" / "a.db", disk, "full")
    assert not disk.image(1, tmp_path / "image", "power", "none").exists()
    assert disk.image(1, tmp_path / "image", "power", "all").exists()
    assert disk.image(1, tmp_path / "image", "kill").exists()
    synced = next(op.number for op in disk.ops if op.syncs_folder)
    assert disk.image(synced, tmp_path / "image", "power", "none").exists()


def test_a_name_that_stood_for_two_files_gives_back_either(tmp_path, disk):
    """A deletion that is undone brings back the old content, never the new one under it."""
    path = str(tmp_path / "a.db-wal")
    for content in (b"old", b"new"):
        file = wal_file(disk, path)
        file.xWrite(content, 0)
        if content == b"old":
            file.xSync(0)
            delete(disk, path)
        file.xClose()
    numbers = {(op.kind, op.data): op.number for op in disk.ops if op.kind != "sync"}
    created = next(op.number for op in disk.ops[2:] if op.creates)
    found = {
        keep: disk.snapshot(len(disk.ops), "power", keep).files.get("a.db-wal")
        for keep in disk.strategies(len(disk.ops))
    }
    assert found["none"] == b"old" and found["all"] == b"new"
    assert found[f"drop:{created}"] is None
    assert found[f"keep:{created}"] == b""
    assert found[f"drop:{numbers['write', b'new']}"] == b""


def test_only_the_first_sync_of_a_wal_syncs_its_folder(tmp_path, disk):
    first = wal_file(disk, str(tmp_path / "a-wal"))
    first.xSync(0)
    second = wal_file(disk, str(tmp_path / "b-wal"))
    first.xSync(0)
    assert set(disk.snapshot(len(disk.ops), "power", "none").files) == {"a-wal"}
    second.xSync(0)
    assert set(disk.snapshot(len(disk.ops), "power", "none").files) == {"a-wal", "b-wal"}
    first.xClose()
    second.xClose()


def test_a_file_that_no_crash_brings_back_offers_no_strategies(tmp_path, disk):
    path = str(tmp_path / "a-wal")
    file = wal_file(disk, path)
    file.xWrite(b"one", 0)
    file.xWrite(b"two", 3)
    assert len(disk.strategies(len(disk.ops))) > 3
    delete(disk, path, sync=True)
    file.xWrite(b"three", 6)
    file.xClose()
    assert disk.strategies(len(disk.ops)) == ["none"]
    assert disk.snapshot(len(disk.ops), "power", "none").files == {}


# -- files that were there before


def test_a_wal_that_was_there_before_is_in_the_images_before_it_is_used(tmp_path, disk):
    path = tmp_path / "live" / "a.db"
    with FaultDisk() as earlier:
        workload(path, earlier, "full")
    with closing(apsw.Connection(str(path), vfs=disk.name)):
        assert [op.file for op in disk.ops] == ["db"]
        assert look(disk.image(1, tmp_path / "image")) == (True, list(range(1, 12)))


def test_files_that_were_there_before_count_as_durable(tmp_path, disk):
    path = tmp_path / "live" / "a.db"
    with FaultDisk() as earlier:
        workload(path, earlier, "off")
    with closing(connect(path, "normal", disk.name)) as db:
        db.execute("INSERT INTO t (body) VALUES ('new')")
    assert {"a.db", "a.db-wal"} <= set(disk.snapshot(0, "power", "none").files)
    for at in range(len(disk.ops) + 1):
        sound, rows = look(disk.image(at, tmp_path / "image", "power", "none"))
        assert sound and rows == list(range(1, 12))


def test_a_file_that_was_replaced_from_outside_is_taken_as_it_is_found(tmp_path, disk):
    path = tmp_path / "live" / "a.db"
    path.parent.mkdir()
    connect(path, "full", disk.name).close()
    before = len(disk.ops)
    other = tmp_path / "other.db"
    with closing(apsw.Connection(str(other))) as db:
        db.execute("CREATE TABLE t (n INTEGER PRIMARY KEY); INSERT INTO t VALUES (1), (2)")
    for stale in path.parent.iterdir():
        if stale != path:
            stale.unlink()
    other.replace(path)
    with closing(apsw.Connection(str(path), vfs=disk.name)) as db:
        assert db.execute("SELECT count(*) FROM t").get == 2
    assert look(disk.image(before, tmp_path / "image")) == (True, [])
    files = disk.snapshot(len(disk.ops), "power", "none").files
    assert files["a.db"] == path.read_bytes()


# -- the trace


def test_operations_are_numbered_and_said_in_plain_words(tmp_path, disk):
    workload(tmp_path / "live" / "a.db", disk, "full")
    assert [op.number for op in disk.ops] == list(range(1, len(disk.ops) + 1))
    assert {op.kind for op in disk.ops} == {"open", "write", "truncate", "sync", "delete", "mark"}
    assert {op.file for op in disk.ops} == {"db", "wal", "journal", None}
    words = [op.words for op in disk.ops]
    assert words[0] == "1: create the database (a.db)"
    assert "4: sync the rollback journal (a.db-journal) and its folder" in words
    assert any(text.endswith("write 32 bytes at 0 of the WAL (a.db-wal)") for text in words)
    assert any(text.endswith("truncate the WAL (a.db-wal) to 0 bytes") for text in words)
    assert any(text.endswith("mark ack 3") for text in words)


def test_a_mark_stands_after_the_operations_it_follows(tmp_path, disk):
    workload(tmp_path / "live" / "a.db", disk, "full")
    number = disk.mark("mine", {"any": "thing"})
    assert number == len(disk.ops)
    assert (disk.ops[-1].label, disk.ops[-1].payload) == ("mine", {"any": "thing"})
    first = next(op for op in disk.ops if op.label == "ack")
    assert (disk.ops[first.number - 2].kind, disk.ops[first.number - 2].file) == ("sync", "wal")


def test_syncs_and_writes_are_counted_by_file(tmp_path, disk):
    workload(tmp_path / "live" / "a.db", disk, "full")
    for kind in ("sync", "write"):
        for file in ("db", "wal", "journal"):
            assert disk.count(kind, file) == sum(
                (op.kind, op.file) == (kind, file) for op in disk.ops
            )
    assert disk.count("sync") == sum(op.kind == "sync" for op in disk.ops)
    assert disk.count("read") > 0


def test_walking_forward_costs_each_operation_once(tmp_path, disk):
    workload(tmp_path / "live" / "a.db", disk, "normal")

    class Counting(list[Op]):
        looks = 0

        def __getitem__(self, index: Any) -> Any:
            self.looks += 1
            return super().__getitem__(index)

    ops = Counting(disk.ops)
    names = {op.path: op.name for op in ops}
    replay = Replay(ops, {}, names, seed=1)
    walked = [
        replay.snapshot(at, "power", keep).digest
        for at in range(len(ops) + 1)
        for keep in replay.strategies(at, randoms=2, limit=4)
    ]
    assert ops.looks == len(ops)
    assert len(walked) > len(ops)


def test_an_image_does_not_depend_on_the_order_of_asking(tmp_path, disk):
    workload(tmp_path / "live" / "a.db", disk, "normal")
    forward = [disk.snapshot(at, "power", "random") for at in range(len(disk.ops) + 1)]
    backward = [disk.snapshot(at, "power", "random") for at in reversed(range(len(disk.ops) + 1))]
    assert forward == backward[::-1]


def test_the_same_seed_gives_the_same_images_and_another_gives_others(tmp_path):
    fresh = itertools.count()

    def images(seed: int) -> list[str]:
        with FaultDisk(seed) as disk:
            file = wal_file(disk, str(tmp_path / f"{next(fresh)}" / "a-wal"))
            for index in range(20):
                file.xWrite(bytes([index + 1]) * 3000, index * 2500)
            file.xClose()
            everything = len(disk.ops)
            keeps = ["random", "random:1", "torn", *disk.strategies(everything)]
            digests = [disk.snapshot(everything, "power", keep).digest for keep in keeps]
        return digests

    # The names are part of a digest, the folder is not.
    assert images(7) == images(7)
    assert images(7) != images(8)


def test_closing_takes_the_name_away_and_leaves_the_images(tmp_path):
    with FaultDisk() as disk:
        workload(tmp_path / "live" / "a.db", disk, "full")
        assert disk.name in apsw.vfs_names()
    assert disk.name not in apsw.vfs_names()
    disk.close()
    assert look(disk.image(len(disk.ops), tmp_path / "image")) == (True, list(range(1, 12)))


def test_an_image_replaces_the_older_one_and_spares_other_files(tmp_path, disk):
    workload(tmp_path / "live" / "a.db", disk, "full")
    folder = tmp_path / "image"
    disk.image(len(disk.ops), folder)
    (folder / "mine").write_text("mine")
    (folder / "a.db-shm").write_bytes(b"stale")
    assert not disk.image(0, folder).exists()
    assert [left.name for left in folder.iterdir()] == ["mine"]


def test_an_image_is_never_written_over_its_own_files(tmp_path, disk):
    workload(tmp_path / "live" / "a.db", disk, "full")
    with pytest.raises(ValueError, match="overwrite"):
        disk.image(3, tmp_path / "live")


@pytest.mark.parametrize(
    ("at", "loss", "keep"),
    [(-1, "kill", "none"), (10**6, "kill", "none"), (3, "flood", "none")]
    + [(3, "power", keep) for keep in ("some", "drop:", "drop:1000", "keep:x", -1)],
)
def test_a_question_without_an_answer_is_a_value_error(tmp_path, disk, at, loss, keep):
    workload(tmp_path / "live" / "a.db", disk, "full")
    with pytest.raises(ValueError):
        disk.snapshot(at, loss, keep)


# -- single files, against a model


def wal_file(disk: FaultDisk, path: str) -> apsw.VFSFile:
    Path(path).parent.mkdir(exist_ok=True)
    Path(path.removesuffix("-wal")).touch()  # a WAL takes its mode from its database
    flags = apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
    return apsw.VFSFile(disk.name, path, [flags, 0])


def delete(disk: FaultDisk, path: str, sync: bool = False) -> None:
    disk._vfs.xDelete(path, sync)


def put(content: bytes, offset: int, data: bytes) -> bytes:
    return content[:offset].ljust(offset, b"\0") + data + content[offset + len(data) :]


changes = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 4000), st.binary(min_size=1, max_size=1500)),
    st.tuples(st.just("truncate"), st.integers(0, 4000), st.just(b"")),
    st.tuples(st.sampled_from(["sync", "fail", "lose"]), st.just(0), st.just(b"")),
)


@settings(max_examples=60, deadline=None)
@given(plan=st.lists(changes, max_size=14))
def test_whatever_is_done_to_a_file_its_images_equal_the_model(tmp_path_factory, plan):
    """The model: a list of functions that are certain, and one of those that are not."""
    folder = tmp_path_factory.mktemp("disk")
    certain: list[Callable[[bytes], bytes]] = []
    pending: list[tuple[int, str, Callable[[bytes], bytes]]] = []
    live = b""

    def run(steps: list[Callable[[bytes], bytes]]) -> bytes:
        content = b""
        for step in steps:
            content = step(content)
        return content

    def found(keep: str | int, loss: str = "power") -> bytes:
        return disk.snapshot(len(disk.ops), loss, keep).files["a-wal"]

    with FaultDisk() as disk:
        file = wal_file(disk, str(folder / "a-wal"))
        file.xSync(0)
        for kind, number, data in plan:
            if kind == "write":
                file.xWrite(data, number)
                pending.append((len(disk.ops), kind, lambda c, n=number, d=data: put(c, n, d)))
                live = pending[-1][2](live)
            elif kind == "truncate":
                file.xTruncate(number)
                pending.append((len(disk.ops), kind, lambda c, n=number: c[:n].ljust(n, b"\0")))
                live = pending[-1][2](live)
            elif kind == "sync":
                file.xSync(0)
                certain += [step for _, _, step in pending]
                pending = []
            else:
                disk.fail("sync", lose_pages=kind == "lose")
                with pytest.raises(apsw.IOError):
                    file.xSync(0)
                if kind == "lose":
                    pending = [entry for entry in pending if entry[1] != "write"]
            assert found("none", "kill") == live
            assert found("none") == run(certain)
            for count in range(len(pending) + 1):
                assert found(count) == run(certain + [step for _, _, step in pending[:count]])
            assert found("all") == found(len(pending))
            for at, _, step in pending:
                assert found(f"keep:{at}") == run([*certain, step])
                others = [step for number, _, step in pending if number != at]
                assert found(f"drop:{at}") == run(certain + others)
        file.xClose()
    assert (folder / "a-wal").read_bytes() == live


@settings(max_examples=60, deadline=None)
@given(offset=st.integers(0, 3000), size=st.integers(1, 5000), seed=st.integers(0, 99))
def test_a_torn_write_is_torn_between_sectors(tmp_path_factory, offset, size, seed):
    with FaultDisk(seed) as disk:
        file = wal_file(disk, str(tmp_path_factory.mktemp("disk") / "a-wal"))
        file.xWrite(b"o" * 9000, 0)
        file.xSync(0)
        file.xWrite(b"n" * size, offset)
        file.xClose()
        torn = disk.snapshot(len(disk.ops), "power", "torn").files["a-wal"]
    ends = [offset, *(at for at in range(0, 9001, 512) if offset < at < offset + size)]
    sectors = [torn[a:b] for a, b in zip(ends, [*ends[1:], offset + size], strict=True)]
    assert all(len(set(sector)) == 1 for sector in sectors)
    assert torn[:offset] + torn[offset + size :] == b"o" * (9000 - size)
    new = sum(sector[0] == ord("n") for sector in sectors)
    assert (new == 0) if len(sectors) == 1 else (0 < new < len(sectors))


def test_what_is_written_during_a_sync_is_not_covered_by_it(tmp_path, disk, monkeypatch):
    path = str(tmp_path / "a-wal")
    file, other = wal_file(disk, path), wal_file(disk, path)
    disk.sync_delay = 0.25
    slept: list[float] = []

    def meanwhile(seconds: float) -> None:
        slept.append(seconds)
        other.xWrite(b"late", 5)
        wal_file(disk, str(tmp_path / "b-wal")).xClose()

    file.xWrite(b"early", 0)
    monkeypatch.setattr(faults.time, "sleep", meanwhile)
    file.xSync(0)
    file.xClose()
    other.xClose()
    assert slept == [0.25]
    certain, possible = (disk.snapshot(len(disk.ops), "power", k).files for k in ("none", "all"))
    assert certain == {"a-wal": b"early"}
    assert possible == {"a-wal": b"earlylate", "b-wal": b""}


# -- errors


@pytest.mark.parametrize(
    ("kind", "error", "raised", "code", "number"),
    [
        ("write", "full", apsw.FullError, apsw.SQLITE_FULL, None),
        ("write", "short", apsw.FullError, apsw.SQLITE_FULL, None),
        ("write", "eio", apsw.IOError, apsw.SQLITE_IOERR_WRITE, 5),
        ("write", "efbig", apsw.IOError, apsw.SQLITE_IOERR_WRITE, 27),
        ("sync", "eio", apsw.IOError, apsw.SQLITE_IOERR_FSYNC, 5),
        ("sync", "full", apsw.FullError, apsw.SQLITE_FULL, None),
    ],
)
def test_a_commit_fails_with_the_code_of_the_fault(
    tmp_path, disk, kind, error, raised, code, number
):
    with closing(connect(tmp_path / "a.db", "full", disk.name)) as db:
        insert(db, disk, 1)
        fault = disk.fail(kind, error=error)
        with pytest.raises(raised) as caught:
            insert(db, disk, 1)
        assert caught.value.extendedresult == code
        assert number is None or db.system_errno == number
        assert fault.fired == 1
        assert any(op.error == error and "fails" in op.words for op in disk.ops)
        insert(db, disk, 1)
        assert db.execute("SELECT count(*) FROM t").get == 2
    sound, rows = look(disk.image(len(disk.ops), tmp_path / "image"))
    assert sound and len(rows) == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [("eio", apsw.SQLITE_IOERR_READ), ("short", apsw.SQLITE_IOERR_SHORT_READ)],
)
def test_a_read_fails_or_comes_up_short(tmp_path, disk, error, code):
    workload(tmp_path / "live" / "a.db", disk, "full")
    with closing(apsw.Connection(str(disk.database), vfs=disk.name)) as db:
        disk.fail("read", error=error, times=None, file="wal")
        with pytest.raises(apsw.IOError) as caught:
            db.execute("SELECT count(*) FROM t")
        assert caught.value.extendedresult == code
        assert any(op.kind == "read" and op.error == error for op in disk.ops)
        disk.clear_faults()
        assert db.execute("SELECT count(*) FROM t").get == 11


def test_a_short_read_finds_the_first_half(tmp_path, disk):
    file = wal_file(disk, str(tmp_path / "a-wal"))
    file.xWrite(b"12345678", 0)
    disk.fail("read", error="short")
    assert (file.xRead(8, 0), file.xRead(8, 0)) == (b"1234", b"12345678")
    file.xClose()


def test_an_open_that_fails_says_that_it_cannot_open(tmp_path, disk):
    disk.fail("open")
    with pytest.raises(apsw.CantOpenError):
        apsw.Connection(str(tmp_path / "a.db"), vfs=disk.name).execute("SELECT 1 FROM t")
    assert not (tmp_path / "a.db").exists()


def test_a_short_write_leaves_its_first_half(tmp_path, disk):
    file = wal_file(disk, str(tmp_path / "a-wal"))
    disk.fail("write", error="short")
    with pytest.raises(apsw.FullError):
        file.xWrite(b"12345678", 0)
    assert file.xRead(8, 0) == b"1234"
    file.xClose()
    assert disk.snapshot(len(disk.ops)).files["a-wal"] == b"1234"


def test_faults_wait_for_the_nth_operation_and_last_as_told(tmp_path, disk):
    file = wal_file(disk, str(tmp_path / "a-wal"))

    def outcome() -> str:
        results = ""
        for _ in range(5):
            try:
                file.xSync(0)
                results += "."
            except apsw.IOError:
                results += "X"
        return results

    disk.fail("sync", nth=3)
    assert outcome() == "..X.."
    disk.fail("sync", 2, "eio", 2)
    assert outcome() == ".XX.."
    disk.fail("sync", file="db")
    assert outcome() == "....."
    disk.fail("sync", nth=2, times=None)
    assert outcome() == ".XXXX"
    disk.clear_faults()
    assert outcome() == "....."
    file.xClose()


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "sync", "error": "short"},
        {"kind": "read", "error": "full"},
        {"kind": "write", "lose_pages": True},
        {"kind": "sync", "nth": 0},
        {"kind": "sync", "times": 0},
    ],
)
def test_a_fault_that_cannot_be_is_a_value_error(disk, wrong):
    with pytest.raises(ValueError):
        disk.fail(**wrong)


# -- the failed sync


def failed_sync(path: Path, disk: FaultDisk, *, lose_pages: bool, reopen: bool) -> int:
    """A sync fails in a commit; the application goes on, or dies and comes back."""
    path.parent.mkdir()
    db = connect(path, "full", disk.name)
    insert(db, disk, 2)
    disk.fail("sync", lose_pages=lose_pages)
    with pytest.raises(apsw.IOError):
        insert(db, disk, 1)
    if reopen:
        db.close()
        db = connect(path, "full", disk.name)
    start = len(disk.ops)
    insert(db, disk, 3)
    db.close()
    return start


def test_after_a_sync_that_lost_its_pages_a_reopened_database_loses_later_commits(tmp_path, disk):
    """New frames chain onto frames that every reader sees and that never reached the disk."""
    start = failed_sync(tmp_path / "live" / "a.db", disk, lose_pages=True, reopen=True)
    found = list(states(disk, tmp_path / "image", "power", start))
    assert any(state.sound and not state.keeps_its_promise for state in found)
    for state in states(disk, tmp_path / "image", "kill", start):
        assert state.sound and state.keeps_its_promise, state


@pytest.mark.parametrize(("lose_pages", "reopen"), [(True, False), (False, True), (False, False)])
def test_after_a_failed_sync_going_on_or_keeping_the_pages_loses_nothing(
    tmp_path, disk, lose_pages, reopen
):
    start = failed_sync(tmp_path / "live" / "a.db", disk, lose_pages=lose_pages, reopen=reopen)
    for state in states(disk, tmp_path / "image", "power", start):
        assert state.sound and state.keeps_its_promise, state


def test_only_what_is_written_again_comes_back_after_pages_were_lost(tmp_path, disk):
    file = wal_file(disk, str(tmp_path / "a-wal"))
    file.xSync(0)
    file.xWrite(b"abcdef", 0)
    disk.fail("sync", lose_pages=True)
    with pytest.raises(apsw.IOError):
        file.xSync(0)
    file.xWrite(b"CD", 2)
    file.xSync(0)
    assert file.xRead(6, 0) == b"abCDef"
    file.xClose()
    for keep in ("none", "all"):
        assert disk.snapshot(len(disk.ops), "power", keep).files["a-wal"] == b"\0\0CD"
    assert disk.snapshot(len(disk.ops)).files["a-wal"] == b"abCDef"
