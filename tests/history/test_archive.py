"""Archives: out and back without loss, refused with the field and its index, written whole."""

from __future__ import annotations

import copy
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import (
    ArchiveNotFound,
    ExportFailed,
    HoldfastError,
    Image,
    InvalidArchive,
    InvalidArgument,
    InvalidSessionId,
    Message,
    MessageId,
    Session,
    SessionExists,
    Store,
    StoreCorrupt,
    StoreFull,
    Text,
    Thinking,
    ToolResult,
    ToolUse,
)
from holdfast.history import archive as archives
from holdfast.history import atomic_file, export_history, import_history
from holdfast.recovery.faults import FaultDisk

# As it stands in the document that the form comes from.
SAMPLE: dict[str, Any] = {
    "entries": [
        {
            "id": 0,
            "message": {"role": "user", "content": "Hello"},
            "token_count": 10,
            "summary_id": None,
            "created_at": {"secs_since_epoch": 1704067200, "nanos_since_epoch": 0},
        },
        {
            "id": 1,
            "message": {"role": "assistant", "content": "Hi there!"},
            "token_count": 12,
            "summary_id": 0,
            "created_at": {"secs_since_epoch": 1704067201, "nanos_since_epoch": 5_000},
            "stream_step_id": 7,
        },
    ],
    "summaries": [
        {
            "id": 0,
            "covers": {"start": 0, "end": 2},
            "content": "User greeted assistant...",
            "token_count": 8,
            "original_tokens": 22,
            "created_at": {"secs_since_epoch": 1704067300, "nanos_since_epoch": 0},
            "generated_by": "claude-3-haiku-20240307",
        }
    ],
    "next_message_id": 2,
    "next_summary_id": 1,
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with holdfast.open(tmp_path / "a.db", durability="process") as store:
        yield store


def write(path: Path, archive: object) -> Path:
    path.write_text(json.dumps(archive))
    return path


def rich(store: Store) -> Session:
    """A session with every kind of thing in it."""
    session = store.create_session(
        "rich", model="gpt-4o", provider="openai", title="T", metadata={"a": [1]}
    )
    session.add_system("be brief")
    session.add(Message("user", [Text("look"), Image("https://e.org/a.png")], {"speaker": "ann"}))
    with session.begin_step() as step:
        step.append_thinking("hm")
        step.append_signature("sig")
        step.append_text("é \U0001f600 \ud800")
        step.announce_call("c1", "look")
        step.append_args("c1", '{"x": 1}')
        step.append_done(stop_reason="tool_use", usage={"in": 3})
        step.seal()
        step.record_result("c1", "seen")
    session.add_user("and now?")
    with pytest.raises(KeyboardInterrupt), session.begin_step() as step:
        step.append_text("cut")
        raise KeyboardInterrupt
    session.history.add_summary(0, 2, "earlier", generated_by="m")
    session.history.add_summary(0, 4, "earlier still", generated_by="m")
    return session


def facts(session: Session) -> list[object]:
    history = session.history
    entries = [
        (
            entry.id,
            entry.message,
            entry.token_count,
            entry.created_at,
            entry.status,
            entry.summary_id,
            entry.model_name,
            entry.stop_reason,
            entry.usage,
            entry.counter,
        )
        for entry in history.entries()
    ]
    counters = (len(history), history.total_tokens, history.summarized_count, history.summaries_len)
    return [entries, history.summaries(), counters, history.orphaned_summaries()]


# --- out and back -------------------------------------------------------------------------------


def test_a_session_comes_back_as_it_was(tmp_path: Path, store: Store):
    session = rich(store)
    export_history(session, tmp_path / "h.json")
    with holdfast.open(tmp_path / "b.db") as other:
        back = import_history(other, tmp_path / "h.json", "back")
        assert facts(back) == facts(session)
        assert back.messages() == session.messages()
        (info,) = other.sessions()
        assert (info.id, info.title, info.provider, info.model) == ("back", "T", "openai", "gpt-4o")
        assert (info.entries, info.interrupted) == (6, True)


def test_exporting_an_import_gives_the_same_bytes(tmp_path: Path, store: Store):
    export_history(rich(store), tmp_path / "1.json")
    import_history(store, tmp_path / "1.json", "two")
    export_history(store.session("two"), tmp_path / "2.json")
    import_history(store, tmp_path / "2.json", "three")
    export_history(store.session("three"), tmp_path / "3.json")
    second, third = ((tmp_path / f"{n}.json").read_text() for n in (2, 3))
    assert second.replace('"two"', '"three"') == third


def test_the_form_is_the_one_that_others_know(tmp_path: Path, store: Store):
    session = store.create_session("s")
    session.history.push(Message.user("Hello"), 10)
    session.history.push_with_step_id(Message.assistant("Hi"), 12, 7)
    session.history.add_summary(0, 2, "greeted", token_count=8, generated_by="m")
    export_history(session, tmp_path / "h.json")
    archive = json.loads((tmp_path / "h.json").read_text())
    assert {"entries", "summaries", "next_message_id", "next_summary_id"} <= archive.keys()
    assert (archive["next_message_id"], archive["next_summary_id"]) == (2, 1)
    first, second = archive["entries"]
    assert first["id"] == 0 and first["message"] == {"role": "user", "content": "Hello"}
    assert first["token_count"] == 10 and first["summary_id"] == 0
    assert set(first["created_at"]) == {"secs_since_epoch", "nanos_since_epoch"}
    assert "stream_step_id" not in first and second["stream_step_id"] == 7
    (summary,) = archive["summaries"]
    assert summary["covers"] == {"start": 0, "end": 2} and summary["original_tokens"] == 22


def test_the_documents_own_sample_is_read_as_it_stands(tmp_path: Path, store: Store):
    session = import_history(store, write(tmp_path / "h.json", SAMPLE))
    first, second = session.history.entries()
    assert (first.message, second.message.text) == (Message.user("Hello"), "Hi there!")
    assert (first.summary_id, second.summary_id) == (None, 0)
    assert first.created_at.isoformat() == "2024-01-01T00:00:00+00:00"
    assert second.created_at.microsecond == 5
    history = session.history
    assert (len(history), history.total_tokens, history.summarized_count) == (2, 22, 1)
    assert history.summary(0).generated_by == "claude-3-haiku-20240307"


def test_a_foreign_step_id_is_a_note_and_takes_no_steps_place(tmp_path: Path, store: Store):
    """Kept as a step's id, the seventh step of this store could never have been committed."""
    path = write(tmp_path / "h.json", SAMPLE)
    import_history(store, path, "once")
    session = import_history(store, path, "twice")
    entry = session.history.get_entry(1)
    assert (entry.stream_step_id, entry.metadata) == (None, {"imported_step_id": 7})
    for _ in range(8):
        with session.begin_step() as step:
            step.append_text("x")
    assert len(session.history) == 10


def test_a_count_that_nobody_knows_is_counted_on_demand(tmp_path: Path, store: Store):
    archive = copy.deepcopy(SAMPLE)
    archive["entries"][0]["token_count"] = None
    history = import_history(store, write(tmp_path / "h.json", archive)).history
    assert history.get_entry(0).token_count is None
    assert history.total_tokens == history.counter.count_message(Message.user("Hello")) + 12


def test_an_empty_session_goes_out_and_back(tmp_path: Path, store: Store):
    export_history(store.create_session(), tmp_path / "h.json")
    assert len(import_history(store, tmp_path / "h.json").history) == 0


def test_without_an_id_an_import_gets_a_new_one(tmp_path: Path, store: Store):
    path = write(tmp_path / "h.json", SAMPLE)
    first, second = import_history(store, path), import_history(store, path)
    assert first.id != second.id


def test_an_imported_session_goes_on(tmp_path: Path, store: Store):
    session = import_history(store, write(tmp_path / "h.json", SAMPLE), "s")
    assert session.add_user("next") == 2
    assert session.history.add_summary(0, 3, "all") == 1
    assert session.history.orphaned_summaries() == [0]


BLOCKS = st.one_of(
    st.builds(Text, st.text(min_size=1), st.none() | st.text(min_size=1)),
    st.builds(Thinking, st.text(min_size=1), st.none() | st.text(min_size=1)),
    st.builds(Image, st.just("https://e.org/x"), st.none() | st.text()),
    st.builds(ToolUse, st.text(min_size=1), st.text(min_size=1), st.just({"a": [1, None, "x"]})),
    st.builds(ToolResult, st.text(min_size=1), st.text()),
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(BLOCKS, min_size=1, max_size=3), max_size=4))
def test_any_message_goes_out_and_back(tmp_path: Path, store: Store, contents: list[list[Any]]):
    session = store.create_session()
    for content in contents:
        session.history.push(Message("assistant", content), 1)
    export_history(session, tmp_path / "h.json")
    back = import_history(store, tmp_path / "h.json")
    assert [e.message for e in back.history.entries()] == [
        e.message for e in session.history.entries()
    ]


# --- refused ------------------------------------------------------------------------------------

ABSENT = object()


def changed(*path: Any, to: Any) -> dict[str, Any]:
    archive = copy.deepcopy(SAMPLE)
    inside: Any = archive
    for key in path[:-1]:
        inside = inside[key]
    if to is ABSENT:
        del inside[path[-1]]
    else:
        inside[path[-1]] = to
    return archive


REFUSED = [
    # The six rules.
    (("entries", 1, "id"), 5, "entries[1].id", "is 5, expected 1"),
    (("summaries", 0, "id"), 1, "summaries[0].id", "is 1, expected 0"),
    (("next_message_id",), 3, "next_message_id", "is 3, expected 2"),
    (("next_summary_id",), 0, "next_summary_id", "is 0, expected 1"),
    (("summaries", 0, "covers"), {"start": 0, "end": 3}, "summaries[0].covers", "[0, 3)"),
    (("summaries", 0, "covers"), {"start": 2, "end": 1}, "summaries[0].covers", "[2, 1)"),
    (("summaries", 0, "covers"), {"start": 1, "end": 1}, "summaries[0].covers", "not empty"),
    (("entries", 1, "summary_id"), 1, "entries[1].summary_id", "there are 1 summaries"),
    (("summaries", 0, "covers"), {"start": 0, "end": 1}, "entries[1].summary_id", "not entry 1"),
    # Fields of the wrong kind.
    (("entries",), {}, "entries", "expected a list"),
    (("entries",), ABSENT, "entries", "missing"),
    (("summaries",), None, "summaries", "expected a list"),
    (("entries", 0), "x", "entries[0]", "expected an object"),
    (("entries", 0, "id"), True, "entries[0].id", "whole number"),
    (("entries", 0, "message"), ABSENT, "entries[0].message", "missing"),
    (("entries", 0, "message", "role"), "robot", "entries[0].message", "role"),
    (("entries", 1, "message", "content"), [], "entries[1].message", "content"),
    (("entries", 0, "token_count"), -1, "entries[0].token_count", "is -1"),
    (("entries", 0, "token_count"), "10", "entries[0].token_count", "'10'"),
    (("entries", 0, "token_count"), 1 << 70, "entries[0].token_count", "from 0 to"),
    (("entries", 0, "created_at"), 5, "entries[0].created_at", "expected an object"),
    (
        ("entries", 1, "created_at", "secs_since_epoch"),
        ABSENT,
        "entries[1].created_at.secs_since_epoch",
        "missing",
    ),
    (("entries", 0, "created_at", "secs_since_epoch"), 1 << 50, "entries[0].created_at", "no date"),
    (
        ("entries", 0, "created_at", "nanos_since_epoch"),
        10**9,
        "entries[0].created_at",
        "no date",
    ),
    (("entries", 1, "stream_step_id"), "x", "entries[1].stream_step_id", "whole number"),
    (("entries", 0, "status"), "odd", "entries[0].status", "is 'odd'"),
    (("entries", 0, "status"), [], "entries[0].status", "is []"),
    (("entries", 0, "metadata"), [1], "entries[0].metadata", "object"),
    (("summaries", 0, "content"), " ", "summaries[0].content", "is empty"),
    (("summaries", 0, "generated_by"), ABSENT, "summaries[0].generated_by", "missing"),
    (("summaries", 0, "covers"), ABSENT, "summaries[0].covers", "missing"),
    (("summaries", 0, "covers", "end"), 1.5, "summaries[0].covers.end", "whole number"),
    (("session",), 5, "session", "object"),
]


@pytest.mark.parametrize(("path", "to", "field", "problem"), REFUSED)
def test_a_bad_field_is_named_with_its_index_and_nothing_is_imported(
    tmp_path: Path, store: Store, path: tuple[Any, ...], to: object, field: str, problem: str
):
    file = write(tmp_path / "h.json", changed(*path, to=to))
    with pytest.raises(InvalidArchive) as refused:
        import_history(store, file)
    assert refused.value.field == field
    assert problem in str(refused.value) and str(file) in str(refused.value)
    assert store.sessions() == []


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[]", b"[" * 100_000, b"1"])
def test_what_is_no_archive_at_all_is_refused(tmp_path: Path, store: Store, content: bytes):
    (tmp_path / "h.json").write_bytes(content)
    with pytest.raises(InvalidArchive, match="the file"):
        import_history(store, tmp_path / "h.json")
    with pytest.raises(InvalidArchive, match="cannot be read"):
        import_history(store, tmp_path)
    assert store.sessions() == []


def test_an_archive_that_is_not_there_is_told(tmp_path: Path, store: Store):
    with pytest.raises(ArchiveNotFound, match=r"none\.json") as missing:
        import_history(store, tmp_path / "none.json")
    assert isinstance(missing.value, FileNotFoundError)
    assert isinstance(missing.value, HoldfastError)


def test_a_bad_or_taken_id_imports_nothing(tmp_path: Path, store: Store):
    path = write(tmp_path / "h.json", SAMPLE)
    kept = store.create_session("s")
    with pytest.raises(InvalidSessionId):
        import_history(store, path, "../out")
    with pytest.raises(SessionExists):
        import_history(store, path, "s")
    assert [info.id for info in store.sessions()] == ["s"] and len(kept.history) == 0


def test_an_import_that_fails_half_way_leaves_nothing(tmp_path: Path):
    archive = copy.deepcopy(SAMPLE)
    long = {**SAMPLE["entries"][0], "message": {"role": "user", "content": "x" * 5000}}
    archive["entries"] = [{**long, "id": number} for number in range(50)]
    archive["summaries"], archive["next_summary_id"] = [], 0
    archive["next_message_id"] = 50
    path = write(tmp_path / "h.json", archive)
    with FaultDisk() as disk, holdfast.open(tmp_path / "b.db", vfs=disk.name) as store:
        disk.fail("write", nth=20, error="full")
        with pytest.raises(StoreFull):
            import_history(store, path, "s")
        assert store.sessions() == [] and store.stats().entries == 0
        assert len(import_history(store, path, "s").history) == 50


# --- whole or not at all ------------------------------------------------------------------------


def test_a_new_file_is_for_its_owner_alone_and_an_old_one_keeps_its_mode(
    tmp_path: Path, store: Store
):
    path = tmp_path / "h.json"
    export_history(store.create_session(), path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    export_history(store.create_session(), path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("fails", ["fsync", "replace", "write"])
def test_a_failed_export_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, fails: str
):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "h.json").write_text("old")
    session = rich(store)

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    match fails:
        case "fsync":
            monkeypatch.setattr(os, "fsync", fail)
        case "replace":
            monkeypatch.setattr(Path, "replace", fail)
        case _:
            monkeypatch.setattr(archives, "_summary", fail)
    with pytest.raises(ExportFailed, match="as it was") as failed:
        export_history(session, folder / "h.json")
    assert isinstance(failed.value, OSError)
    assert [path.name for path in folder.iterdir()] == ["h.json"]
    assert (folder / "h.json").read_text() == "old"


def test_an_export_that_is_interrupted_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "h.json").write_text("old")

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(archives, "_summary", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_history(rich(store), folder / "h.json")
    assert [path.read_text() for path in folder.iterdir()] == ["old"]


def test_the_file_is_synced_before_it_takes_the_name_and_the_folder_after(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
):
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def note_sync(descriptor: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def note_replace(self: Path, target: Path) -> Path:
        done.append("rename")
        assert self.parent == target.parent and self.name != target.name
        assert json.loads(self.read_text())["next_message_id"] == 0
        return replace(self, target)

    session = store.create_session()
    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_replace)
    export_history(session, tmp_path / "h.json")
    assert done == ["file", "rename", "folder"]


def test_two_exports_beside_each_other_do_not_share_a_file(tmp_path: Path):
    """With a fixed suffix, `a.json` and `a.txt` would both go through `a.tmp`."""
    with (
        atomic_file.atomic_file(tmp_path / "a") as first,
        atomic_file.atomic_file(tmp_path / "a") as second,
    ):
        first.write("first")
        second.write("second")
        assert len(list(tmp_path.iterdir())) == 2
    assert [path.read_text() for path in tmp_path.iterdir()] == ["first"]


def test_a_link_is_followed_and_a_long_name_is_no_trouble(tmp_path: Path, store: Store):
    session = store.create_session()
    (tmp_path / "real").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "real" / "h.json")
    export_history(session, tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "real" / "h.json").is_file()
    export_history(session, tmp_path / ("n" * 255))
    export_history(session, tmp_path / ("ö" * 127))


@pytest.mark.parametrize("where", ["folder", "no-folder/h.json"])
def test_a_path_that_cannot_be_written_is_told(tmp_path: Path, store: Store, where: str):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ExportFailed, match=where):
        export_history(store.create_session(), tmp_path / where)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-lock"])
def test_the_files_of_a_store_are_neither_replaced_nor_opened(
    tmp_path: Path, store: Store, suffix: str
):
    """Opening and closing the file of an open store would drop the locks SQLite holds on it."""
    session = store.create_session("s")
    path = Path(f"{store.path}{suffix}")
    with pytest.raises(InvalidArgument, match="a file of a store"):
        export_history(session, path)
    with pytest.raises(InvalidArgument, match="a file of a store"):
        import_history(store, path)
    assert [info.id for info in store.sessions()] == ["s"]


def test_a_damaged_entry_is_not_passed_over_in_silence(tmp_path: Path, store: Store):
    session = store.create_session()
    for text in ("a", "b", "c"):
        session.history.push(Message.user(text), 1)
    (tmp_path / "h.json").write_text("old")
    for bad in (1, 2):
        db = apsw.Connection(str(store.path))
        db.execute("UPDATE history_entries SET crc = crc + 1 WHERE entry_id = ?", (bad,))
        db.close()
        with pytest.raises(StoreCorrupt, match="entry 1"):
            export_history(session, tmp_path / "h.json")
    assert (tmp_path / "h.json").read_text() == "old"


def test_what_happens_meanwhile_leaves_a_valid_archive(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
):
    session = store.create_session()
    for number in range(600):
        session.history.push(Message.user(f"{number}"), 1)
    session.history.add_summary(0, 300, "before")
    write_entry = archives._entry

    def meanwhile(entry: Any, *rest: Any) -> dict[str, Any]:
        if entry.id == 0:
            session.history.pop_if_last(MessageId(599))
            session.history.add_summary(0, 500, "meanwhile")
        return write_entry(entry, *rest)

    monkeypatch.setattr(archives, "_entry", meanwhile)
    export_history(session, tmp_path / "h.json")
    back = import_history(store, tmp_path / "h.json").history
    assert (len(back), back.summaries_len, back.summarized_count) == (599, 1, 300)


def test_a_read_only_store_exports_and_does_not_import(tmp_path: Path):
    with holdfast.open(tmp_path / "a.db") as store:
        export_history(rich(store), tmp_path / "1.json")
    with holdfast.open(tmp_path / "a.db", read_only=True) as store:
        export_history(store.session("rich"), tmp_path / "2.json")
        with pytest.raises(holdfast.ReadOnlyStore):
            import_history(store, tmp_path / "1.json")
    assert (tmp_path / "1.json").read_bytes() == (tmp_path / "2.json").read_bytes()
