"""Salvage: what can be read of a damaged store is in the new one, and the rest is told."""

from __future__ import annotations

import shutil
from pathlib import Path

import apsw
import pytest

import holdfast
from holdfast import HoldfastError, InvalidArgument, NotAStore, StoreNotFound
from holdfast.journal import StreamJournal
from holdfast.journal.engine.checks import event_crc, row_crc
from holdfast.journal.engine.history import CHECKED
from holdfast.recovery.doctor import doctor
from holdfast.recovery.salvage import Lost, SalvageReport, salvage

TURNS = 40
# What a lost entry leaves behind, until `repair`.
PAIRING = {"missing-result", "orphan-result", "misplaced-result"}
PAGE = 1024


def build(path: Path) -> None:
    store = holdfast.open(path)
    for name in ("a", "b"):
        session = store.create_session(name, model="m", title=f"title {name}", metadata={"n": name})
        for turn in range(TURNS):
            session.add_user(f"{name} asks {turn} " + "x" * 200)
            with session.begin_step() as step:
                step.append_text(f"{name} hears {turn}")
                step.announce_call("id", "look")
                step.append_args("id", "{}")
                step.append_done(stop_reason="tool_use", usage={"n": turn})
                message = step.seal()
                step.execute(
                    message.tool_calls[0], lambda name=name, turn=turn: f"seen {name} {turn}"
                )
        session.history.add_summary(0, 6, "the beginning")
        session.history.add_summary(3, 9, "the middle")
    c = store.create_session("c")
    c.add_user("go")
    step = c.begin_step("m")
    step.append_text("I will")
    for call_id in ("done", "doubt", "fresh"):
        step.announce_call(call_id, "act")
        step.append_args(call_id, "{}")
    step.append_done()
    step.seal()
    step.start_call("done")
    step.record_result("done", "it worked")
    step.start_call("doubt")
    d = store.create_session("d")
    cut_off = d.begin_step("m")
    for word in range(300):
        cut_off.append_text(f"word {word} ")
    store.create_session("e")
    store.close()


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "store.db"
    build(path)
    return path


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "store.db"
    shutil.copy(original, copy)
    return copy


def content(path: Path) -> dict[str, list[str]]:
    """The messages of each session as JSON, recovery included."""
    with holdfast.open(path) as store:
        assert [
            step.outcome for step in store.recovery.steps if step.outcome == "quarantined"
        ] == []
        return {
            info.id: [
                entry.message.model_dump_json()
                for entry in store.session(info.id).history.entries()
            ]
            for info in store.sessions()
        }


def save(path: Path) -> tuple[SalvageReport, dict[str, list[str]]]:
    """Salvage, see that the source was left alone and that the new store is sound, and read it."""
    before = path.read_bytes()
    into = path.with_name("saved.db")
    report = salvage(path, into)
    assert path.read_bytes() == before
    assert [one.name for one in path.parent.iterdir() if "saved" in one.name] == ["saved.db"]
    saved = content(into)
    assert {found.code for found in doctor(into).problems} <= PAIRING
    with holdfast.open(into) as store:
        for info in store.sessions():
            store.session(info.id).repair()
    assert doctor(into).problems == ()
    for lost in report.lost:
        assert lost.where in report.summary() and lost.why in report.summary()
    return report, saved


def edit(path: Path, *statements: str) -> None:
    db = apsw.Connection(str(path))
    db.execute("PRAGMA foreign_keys = OFF")
    db.create_scalar_function("seal", lambda *columns: row_crc(*columns), deterministic=True)
    for statement in statements:
        db.execute(statement)
    db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    db.close()


def pages_of(path: Path, table: str, kind: str = "leaf") -> list[int]:
    """Where the pages of a table begin in the file."""
    db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    found = db.execute(
        "SELECT pageno FROM dbstat WHERE name = ? AND pagetype = ? ORDER BY path", (table, kind)
    ).fetchall()
    db.close()
    return [(number - 1) * PAGE for (number,) in found]


def ruin(path: Path, *places: int, length: int = PAGE) -> None:
    data = bytearray(path.read_bytes())
    for place in places:
        data[place : place + length] = b"\xa5" * length
    path.write_bytes(bytes(data))


def test_all_of_a_sound_store_is_saved(path: Path):
    report, saved = save(path)
    assert report.lost == ()
    assert (report.sessions, report.entries, report.steps) == (5, 2 * TURNS * 3 + 1, 2)
    assert report.summaries == 4
    assert saved == content(path)
    assert "Nothing was lost." in report.summary()


def test_facts_beside_the_messages_are_saved_too(path: Path, tmp_path: Path):
    salvage(path, tmp_path / "saved.db")
    with (
        holdfast.open(path, recover=False) as old,
        holdfast.open(tmp_path / "saved.db", recover=False) as new,
    ):
        assert new.sessions() == old.sessions()
        for name in ("a", "b", "c"):
            before, after = old.session(name), new.session(name)
            assert list(after.history.entries()) == list(before.history.entries())
            assert after.history.summaries_len == before.history.summaries_len
            for number in range(after.history.summaries_len):
                assert after.history.summary(number) == before.history.summary(number)
            assert after.history.total_tokens == before.history.total_tokens
        taken = new.session("e").begin_step("m").step_id
        assert taken == old.session("e").begin_step("m").step_id


def test_unfinished_steps_are_settled_by_recovery_in_the_new_store(path: Path, tmp_path: Path):
    salvage(path, tmp_path / "saved.db")
    with holdfast.open(tmp_path / "saved.db") as store:
        steps = {step.session_id: step for step in store.recovery.steps}
    assert (steps["c"].outcome, steps["c"].in_doubt) == ("complete", ("doubt",))
    assert steps["c"].canceled == ("fresh",)
    assert steps["d"].outcome == "interrupted"


def test_a_ruined_page_of_history_costs_only_what_was_on_it(path: Path):
    sound = content_of_copy(path)
    leaves = pages_of(path, "history_entries")
    assert len(leaves) > 20
    ruin(path, leaves[5], leaves[11])
    report, saved = save(path)
    assert report.lost
    kept = {
        name: [one for one in messages if one in saved[name]] for name, messages in sound.items()
    }
    assert saved == kept
    missing = sum(map(len, sound.values())) - sum(map(len, saved.values()))
    assert 2 <= missing <= 12


def content_of_copy(path: Path) -> dict[str, list[str]]:
    copy = path.with_name("copy.db")
    shutil.copy(path, copy)
    return content(copy)


def test_a_ruined_inner_page_costs_only_what_is_below_it(path: Path):
    with holdfast.open(path, recover=False) as store:
        session = store.create_session("long")
        for number in range(600):
            session.add_user(f"{number} " + "y" * 300)
    inner = pages_of(path, "history_entries", "internal")
    assert len(inner) >= 3
    ruin(path, inner[1])
    report, saved = save(path)
    assert report.lost
    assert len(saved["long"]) > 100 or len(saved["a"]) == 3 * TURNS


def test_a_row_that_fails_its_check_is_left_out_and_summaries_move_along(path: Path):
    edit(path, f"UPDATE history_entries SET role = 'system' WHERE id = {1 << 32}")
    report, saved = save(path)
    assert [lost.where for lost in report.lost] == ["session a, entry 0"]
    assert len(saved["a"]) == 3 * TURNS - 1
    with holdfast.open(path.with_name("saved.db")) as store:
        assert store.session("a").history.summary(1).covers == range(2, 8)


def test_a_session_whose_row_is_gone_gets_its_name_from_its_steps(path: Path):
    sound = content_of_copy(path)
    edit(path, "DELETE FROM sessions WHERE session_id = 'a'")
    report, saved = save(path)
    assert saved["a"] == sound["a"]
    assert any("session number 1" in lost.where for lost in report.lost)


def test_a_doubled_entry_is_saved_once(path: Path):
    sound = content_of_copy(path)
    edit(
        path,
        "DROP INDEX one_place_a_step",
        f"INSERT INTO history_entries (id, {CHECKED}, crc) SELECT {(1 << 32) + 3 * TURNS},"
        f" {CHECKED}, 0 FROM history_entries WHERE id = {(1 << 32) + 2}",
        f"UPDATE history_entries SET crc = seal(id, {CHECKED})",
    )
    report, saved = save(path)
    assert saved == sound
    assert [lost.where for lost in report.lost] == [f"session a, entry {3 * TURNS}"]


def test_a_step_in_two_places_is_saved_in_history_alone(path: Path):
    sound = content_of_copy(path)
    key = 1 << 32 | 1
    edit(
        path,
        "INSERT INTO stream_journal (id, event_type, content, crc) VALUES"
        f" ({key}, 'text_delta', 'x', {event_crc(key, 'text_delta', None, b'x')})",
    )
    _, saved = save(path)
    assert saved == sound


def test_calls_that_cannot_be_read_count_as_started(path: Path, tmp_path: Path):
    ruin(path, *pages_of(path, "tool_calls"))
    salvage(path, tmp_path / "saved.db")
    with holdfast.open(tmp_path / "saved.db") as store:
        [step] = [step for step in store.recovery.steps if step.session_id == "c"]
    assert step.in_doubt == ("doubt", "fresh")
    assert step.canceled == ()


def test_results_that_cannot_be_read_leave_their_calls_in_doubt(path: Path, tmp_path: Path):
    # A result may be recorded without a start: then it is the only sign that the call ran.
    edit(
        path,
        "UPDATE tool_results SET body = '{}'",
        "UPDATE tool_calls SET state = 'ready', replay = NULL WHERE position = 0",
    )
    salvage(path, tmp_path / "saved.db")
    with holdfast.open(tmp_path / "saved.db") as store:
        [step] = [step for step in store.recovery.steps if step.session_id == "c"]
    assert step.in_doubt == ("done", "doubt")
    assert step.canceled == ("fresh",)


def test_a_stream_with_a_ruined_page_is_saved_up_to_it_and_the_rest_kept_for_people(path: Path):
    leaves = pages_of(path, "stream_journal")
    ruin(path, leaves[len(leaves) // 2])
    _, saved = save(path)
    [message] = saved["d"]
    assert '"text":"word 0 word 1 ' in message
    with holdfast.open(path.with_name("saved.db")) as store:
        [entry] = store.session("d").history.entries()
        assert entry.metadata["behind_gap"].endswith("word 298 word 299 ")


def test_events_whose_step_is_gone_are_kept_without_a_session(path: Path):
    edit(path, "DELETE FROM step_metadata WHERE session = 'd'")
    report, saved = save(path)
    assert saved["d"] == []
    assert any("its row" in lost.why for lost in report.lost)
    with StreamJournal.open(path.with_name("saved.db")) as journal:
        found = journal.recover()
        assert found is not None and found.partial_text.startswith("word 0 word 1 ")


@pytest.mark.parametrize("at", [0, 17, 21, 47, 62, 69])
def test_a_bad_header_is_made_anew(path: Path, at: int):
    sound = content_of_copy(path)
    ruin(path, at, length=1)
    report, saved = save(path)
    assert saved == sound
    assert report.lost == (Lost("the file", "its header was damaged and made anew"),)


def test_a_ruined_schema_is_made_anew(path: Path):
    sound = content_of_copy(path)
    ruin(path, 100, length=PAGE - 100)
    report, saved = save(path)
    assert saved == sound
    assert "its schema was damaged and made anew" in report.summary()


def test_the_tail_cut_off_costs_only_the_tail(path: Path):
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2 // PAGE * PAGE])
    report, saved = save(path)
    assert report.lost
    assert sum(map(len, saved.values())) > 10


def test_salvage_refuses_to_write_over_a_file(path: Path):
    into = path.with_name("saved.db")
    into.write_bytes(b"mine")
    with pytest.raises(InvalidArgument, match="choose another"):
        salvage(path, into)
    assert into.read_bytes() == b"mine"


def test_what_was_never_a_store_is_refused_and_nothing_is_made(tmp_path: Path):
    junk = tmp_path / "junk"
    junk.write_bytes(b"nothing like a database" * 500)
    with pytest.raises(HoldfastError):
        salvage(junk, tmp_path / "saved.db")
    other = tmp_path / "other.db"
    db = apsw.Connection(str(other))
    db.execute("CREATE TABLE t (a)")
    db.close()
    with pytest.raises(NotAStore):
        salvage(other, tmp_path / "saved.db")
    with pytest.raises(StoreNotFound):
        salvage(tmp_path / "none.db", tmp_path / "saved.db")
    assert {one.name for one in tmp_path.iterdir()} == {"junk", "other.db"}


def test_a_living_store_can_be_salvaged(path: Path, tmp_path: Path):
    with holdfast.open(path, recover=False) as store:
        store.session("e").add_user("still here")
        report = salvage(path, tmp_path / "saved.db")
        assert report.lost == ()
    assert len(content(tmp_path / "saved.db")["e"]) == 1


def test_what_a_damaged_log_cuts_off_is_told(tmp_path: Path):
    path = tmp_path / "copied.db"
    with holdfast.open(tmp_path / "live.db") as store:
        session = store.create_session("a")
        for number in range(10):
            session.add_user(f"message {number}")
        shutil.copy(store.path, path)
        shutil.copy(f"{store.path}-wal", f"{path}-wal")
    log = Path(f"{path}-wal")
    ruin(log, log.stat().st_size * 3 // 4, length=1)
    report = salvage(path, tmp_path / "saved.db")
    [lost] = report.lost
    assert lost.where.startswith("the log, frame ") and "cut off" in lost.why
    assert 0 < report.entries < 10
