"""Opening: what is made, what is refused, and what is left byte for byte as it was."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import apsw
import pytest

import holdfast
from holdfast.journal import locations
from holdfast.journal.engine import schema
from holdfast.journal.engine.engine import SqliteEngine


def everything(folder: Path) -> dict[str, str]:
    """Every file in a folder, with a digest of its content."""
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.iterdir())
        if file.is_file()
    }


def foreign(path: Path, *, wal: bool = False, hot: bool = False) -> None:
    """A database of another program; hot: that program was killed and left its log."""
    program = f"""
import os, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA journal_mode = {"wal" if wal else "delete"}")
db.execute("CREATE TABLE theirs (x)")
db.execute("INSERT INTO theirs VALUES (1)")
{"os._exit(0)" if hot else "db.close()"}
"""
    subprocess.run([sys.executable, "-c", program, str(path)], check=True)


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("kind", ["rollback", "clean wal", "hot wal", "text", "zeros", "short"])
def test_a_file_of_another_program_is_refused_and_left_byte_for_byte(tmp_path, kind, read_only):
    path = tmp_path / "a.db"
    match kind:
        case "text":
            path.write_text("Dear diary\n" * 100)
        case "zeros":
            path.write_bytes(bytes(4096))
        case "short":
            path.write_bytes(b"SQLite format 3\0")
        case _:
            foreign(path, wal="wal" in kind, hot=kind == "hot wal")
    before = everything(tmp_path)
    if kind == "hot wal":
        assert "a.db-wal" in before
    with pytest.raises(holdfast.NotAStore, match=r"left as it was"):
        holdfast.open(path, read_only=read_only)
    assert everything(tmp_path) == before


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(holdfast.NotAStore, match="folder"):
        holdfast.open(tmp_path)
    assert everything(tmp_path) == {}


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(holdfast.NotAStore, match="regular"):
        holdfast.open(tmp_path / "pipe")


def test_a_store_of_a_newer_format_is_left_byte_for_byte(tmp_path):
    path = tmp_path / "a.db"
    SqliteEngine.open(path).close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {schema.FORMAT + 1}")
    db.close()
    before = everything(tmp_path)
    for read_only in (False, True):
        with pytest.raises(holdfast.StoreTooNew, match=f"format {schema.FORMAT + 1}"):
            holdfast.open(path, read_only=read_only)
    assert everything(tmp_path) == before


def test_a_newer_format_that_stands_only_in_the_log_is_refused_too(tmp_path):
    path = tmp_path / "a.db"
    engine = SqliteEngine.open(path)
    engine.write(lambda cursor: cursor.execute("PRAGMA user_version = 99"))
    with pytest.raises(holdfast.StoreTooNew, match="format 99"):
        holdfast.open(path)
    engine.close()


def test_create_false_makes_nothing(tmp_path):
    for path in (tmp_path / "a.db", tmp_path / "no" / "such" / "a.db"):
        with pytest.raises(holdfast.StoreNotFound):
            holdfast.open(path, create=False)
        with pytest.raises(holdfast.StoreNotFound):
            holdfast.open(path, read_only=True)
    (tmp_path / "empty").touch()
    with pytest.raises(holdfast.StoreNotFound):
        holdfast.open(tmp_path / "empty", create=False)
    assert sorted(everything(tmp_path)) == ["empty"]


def test_an_empty_file_becomes_a_store(tmp_path):
    (tmp_path / "a.db").touch()
    holdfast.open(tmp_path / "a.db").close()
    holdfast.open(tmp_path / "a.db", create=False).close()


@pytest.mark.parametrize("path", ["", "a\0b", ":memory:", "file:a.db", "file:a?mode=memory", b"a"])
def test_what_names_no_file_is_a_value_error(path):
    with pytest.raises(ValueError) as caught:
        holdfast.open(path)
    assert isinstance(caught.value, holdfast.HoldfastError)


def test_exclusive_and_a_vfs_are_a_value_error(tmp_path):
    with pytest.raises(ValueError):
        holdfast.open(tmp_path / "a.db", exclusive=True, vfs="unix")


def test_an_unknown_level_is_a_value_error(tmp_path):
    with pytest.raises(ValueError, match="'barrier'"):
        holdfast.open(tmp_path / "a.db", durability="full")
    assert everything(tmp_path) == {}


# --- damage -------------------------------------------------------------------------------------


def closed_store(path: Path) -> None:
    with holdfast.open(path) as store:
        session = store.create_session("s")
        for number in range(20):
            session.add_user(f"message {number} " * 20)
    assert not path.with_name(path.name + "-wal").read_bytes()


@pytest.mark.parametrize("kept", [100, 1024, 5000, 0.5])
def test_a_truncated_store_is_corrupt_and_left_as_it_was(tmp_path, kept):
    path = tmp_path / "a.db"
    closed_store(path)
    content = path.read_bytes()
    short = content[: int(len(content) * kept) if isinstance(kept, float) else kept]
    path.write_bytes(short)
    with pytest.raises(holdfast.StoreCorrupt, match="damaged"), holdfast.open(path) as store:
        store.session("s").messages()
    assert path.read_bytes() == short


@pytest.mark.parametrize("offset", [0, 5, 16, 17, 18, 19, 20, 21, 28, 44, 47, 56, 59, 60, 63, 68])
def test_a_flipped_byte_in_the_header_is_never_taken_for_a_good_store(tmp_path, offset):
    path = tmp_path / "a.db"
    closed_store(path)
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x55
    path.write_bytes(content)
    try:
        with holdfast.open(path) as store:
            assert len(store.session("s").messages()) == 20
    except holdfast.StoreError as error:
        assert isinstance(
            error, holdfast.NotAStore | holdfast.StoreCorrupt | holdfast.StoreTooNew
        ), error
        assert path.read_bytes() == content


def test_bytes_that_are_no_utf8_are_reported_as_damage(tmp_path):
    path = tmp_path / "a.db"
    closed_store(path)
    db = apsw.Connection(str(path))
    db.execute("UPDATE sessions SET title = CAST(x'ff41' AS TEXT)")
    db.close()
    store = holdfast.open(path, recover=False)
    with pytest.raises(holdfast.StoreCorrupt, match="UTF-8"):
        store.sessions()
    store.close()


# --- permissions --------------------------------------------------------------------------------


def test_files_are_0600_and_a_folder_that_is_made_is_0700(tmp_path):
    before = os.umask(0)
    try:
        folder = tmp_path / "made" / "for it"
        with holdfast.open(folder / "a.db") as store:
            store.create_session()
            store.backup(folder / "backup.db")
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(("a.db", "a.db-wal", "a.db-shm", "a.db-lock", "backup.db"), 0o600)
    for made in (folder, folder.parent):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700


@pytest.fixture
def common():
    """A folder that another user can reach: those of pytest are for the one who runs it."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # noqa: PTH101
        yield Path(folder)


def as_nobody(child) -> None:
    """A file mode says nothing to root."""
    if os.getuid() == 0:
        os.setuid(65534)


def attempt(path, **options):
    try:
        with holdfast.open(path, **options) as store:
            return [info.id for info in store.sessions()]
    except holdfast.HoldfastError as error:
        return error


def test_a_folder_that_cannot_be_written_holds_no_new_store(common, fork):
    os.chmod(common, 0o555)  # noqa: PTH101

    def work(child):
        as_nobody(child)
        child.tell(attempt(common / "a.db"))
        child.tell(attempt(common / "made" / "a.db"))

    child = fork(work)
    assert isinstance(child.hear(), holdfast.StoreNotWritable)
    assert isinstance(child.hear(), holdfast.StoreNotWritable)
    child.join()
    os.chmod(common, 0o755)  # noqa: PTH101
    assert everything(common) == {}


@pytest.mark.parametrize("closed", [True, False])
def test_a_store_in_a_folder_that_cannot_be_written(common, fork, closed):
    """It is refused for writing, and read if its log is empty."""
    path = common / "a.db"
    store = holdfast.open(path)
    store.create_session("s")
    if closed:
        store.close()
    for file in common.iterdir():
        file.chmod(0o444)
    if closed:
        (common / "a.db-shm").unlink()
    os.chmod(common, 0o555)  # noqa: PTH101

    def work(child):
        as_nobody(child)
        child.tell(attempt(path))
        child.tell(attempt(path, read_only=True))

    child = fork(work)
    assert isinstance(child.hear(), holdfast.StoreNotWritable)
    assert child.hear() == ["s"]
    child.join()
    os.chmod(common, 0o755)  # noqa: PTH101
    store.close()


def test_a_file_that_cannot_be_read_is_a_typed_error(common, fork):
    path = common / "a.db"
    holdfast.open(path).close()

    def work(child):
        as_nobody(child)
        child.tell(attempt(path))
        child.tell(attempt(path, read_only=True))

    child = fork(work)
    if os.getuid() == 0:
        assert isinstance(child.hear(), holdfast.StoreNotWritable)
        assert isinstance(child.hear(), holdfast.StoreNotWritable)


# --- paths --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "it's.db",
        'say "a".db',
        "two words.db",
        "100%41.db",
        "a?mode=ro&vfs=none.db",
        "a#b.db",
        "'; DROP TABLE sessions; --.db",
        "häß 漢字 🗃.db",
        "~nobody-of-that-name.db",
        "-wal",
        "new\nline.db",
        "x" * 200 + ".db",
    ],
)
@pytest.mark.parametrize("exclusive", [False, True])
def test_a_path_is_a_path_whatever_is_in_it(tmp_path, monkeypatch, name, exclusive):
    monkeypatch.chdir(tmp_path)
    with holdfast.open(name, exclusive=exclusive) as store:
        store.create_session("s")
        assert store.path == tmp_path / name
        store.backup(tmp_path / f"{name}2")
    for path in (name, f"{name}2"):
        with holdfast.open(tmp_path / path, create=False, exclusive=exclusive) as store:
            assert [info.id for info in store.sessions()] == ["s"]
    with holdfast.open(name, read_only=True) as store:
        assert store.sessions()


def test_a_long_path_opens_and_one_too_long_for_sqlite_is_named(tmp_path):
    fitting = tmp_path / ("d" * 120) / ("e" * 120)
    fitting = fitting / ("f" * (locations.PATH_BYTES_MAX - len(str(fitting)) - 1))
    assert len(str(fitting)) == locations.PATH_BYTES_MAX
    with holdfast.open(fitting) as store:
        store.create_session("s")
        store.backup(fitting.with_name("b"))
    with pytest.raises(holdfast.NotAStore, match="bytes"):
        holdfast.open(tmp_path / "/".join(["d" * 120] * 5) / "a.db")
    with pytest.raises(holdfast.StoreNotWritable):
        holdfast.open(tmp_path / ("n" * 300))


def test_a_path_may_begin_with_two_slashes(tmp_path):
    with holdfast.open(f"/{tmp_path}/a.db") as store:
        assert store.path == tmp_path / "a.db"


# --- network file systems -----------------------------------------------------------------------

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw
23 22 0:5 / {point} rw,relatime shared:2 master:1 - {kind} somewhere:/x rw
24 22 0:6 / /elsewhere rw - nfs4 other:/y rw
"""


def mounted(tmp_path, monkeypatch, kind):
    table = tmp_path / "mountinfo"
    point = str(tmp_path / "the mount").replace(" ", "\\040")
    table.write_text(MOUNTS.format(point=point, kind=kind))
    monkeypatch.setattr(locations, "MOUNTS", table)
    return tmp_path / "the mount" / "a.db"


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "9p", "fuse.sshfs"])
def test_a_network_file_system_is_refused_unless_one_process_has_it_alone(
    tmp_path, monkeypatch, kind
):
    path = mounted(tmp_path, monkeypatch, kind)
    path.parent.mkdir()
    with pytest.raises(holdfast.NetworkFilesystem, match=kind):
        holdfast.open(path)
    assert everything(path.parent) == {}
    holdfast.open(path, exclusive=True).close()
    holdfast.open(tmp_path / "the mount beside it.db").close()


@pytest.mark.parametrize("kind", ["ext4", "xfs", "overlay", "tmpfs", "btrfs"])
def test_a_local_file_system_passes(tmp_path, monkeypatch, kind):
    holdfast.open(mounted(tmp_path, monkeypatch, kind)).close()


def test_of_two_mounts_at_one_place_the_later_one_counts(tmp_path):
    table = tmp_path / "mountinfo"
    table.write_text("1 0 0:1 / /m rw - nfs a rw\n2 0 0:2 / /m rw - ext4 b rw\nnonsense\n")
    assert locations.filesystem_type(Path("/m/x"), table) == "ext4"
    assert locations.filesystem_type(Path("/mm"), table) is None
    assert locations.filesystem_type(Path("/m"), tmp_path / "none") is None


@pytest.mark.parametrize("content", [b"j", b"\0", b"ju"])
def test_a_file_of_a_byte_or_two_is_not_taken_for_an_empty_one(tmp_path, content):
    path = tmp_path / "a.db"
    path.write_bytes(content)
    for options in ({}, {"read_only": True}, {"exclusive": True}):
        with pytest.raises(holdfast.NotAStore):
            holdfast.open(path, **options)
    assert path.read_bytes() == content


@pytest.mark.parametrize("name", ["\ud800.db", "\udcff.db"])
def test_a_path_that_is_no_utf_8_is_refused_before_it_is_looked_at(tmp_path, name):
    with pytest.raises(holdfast.InvalidPath, match="no UTF-8"):
        holdfast.open(tmp_path / name)
    assert everything(tmp_path) == {}
