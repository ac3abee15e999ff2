"""Doctor: a healthy store has no findings, each planted damage is named, and nothing is written."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import apsw
import pytest

import holdfast
from holdfast import Message, StoreNotFound, Text, ToolResult, ToolUse
from holdfast.journal import StreamJournal, ToolJournal
from holdfast.journal.engine.checks import event_crc, row_crc
from holdfast.journal.engine.frames import checksum
from holdfast.journal.engine.history import CHECKED
from holdfast.journal.engine.summaries import SUMMARY_COLUMNS
from holdfast.recovery.doctor import doctor
from holdfast.recovery.findings import ADVICE


def build(path: Path) -> None:
    """A store with everything in it: settled steps, summaries, and steps that a crash has left."""
    store = holdfast.open(path)
    a = store.create_session("a", model="m", title="first")
    for turn in range(3):
        a.add_user(f"question {turn}")
        with a.begin_step() as step:
            step.append_text(f"answer {turn}")
            step.announce_call(f"call-{turn}", "look")
            step.append_args(f"call-{turn}", '{"at": 1}')
            step.append_done(stop_reason="tool_use", usage={"output_tokens": 3})
            message = step.seal()
            step.execute(message.tool_calls[0], lambda at: f"seen {at}")
    a.history.add_summary(0, 3, "they talked")
    a.history.add_summary(0, 4, "they talked on")
    b = store.create_session("b")
    b.add_user("go")
    step = b.begin_step("m")
    step.append_text("I will")
    for call_id in ("done", "doubt", "fresh"):
        step.announce_call(call_id, "act")
        step.append_args(call_id, "{}")
    step.append_done(stop_reason="tool_use")
    step.seal()
    step.start_call("done")
    step.record_result("done", "it worked")
    step.start_call("doubt")
    c = store.create_session("c")
    c.add_user("write")
    cut_off = c.begin_step("m")
    for word in ("Once ", "upon ", "a ", "time"):
        cut_off.append_text(word)
    store.create_session("d")
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


def files(path: Path) -> dict[str, bytes]:
    """The bytes of the database and its log, where there is one."""
    beside = (path, path.with_name(path.name + "-wal"))
    return {one.name: one.read_bytes() for one in beside if one.exists()}


def codes(path: Path) -> set[str]:
    before = files(path)
    report = doctor(path)
    assert files(path) == before, "doctor wrote to the file"
    assert report.ok == (not report.problems)
    for problem in report.problems:
        assert problem.where and problem.what and problem.advice
        assert problem.code in report.summary()
    return {problem.code for problem in report.problems}


def test_a_healthy_store_with_unfinished_steps_has_no_problems(path: Path):
    report = doctor(path)
    assert report.problems == ()
    assert report.ok
    assert (report.sessions, report.entries) == (4, 11)
    assert "Verdict: sound" in report.summary()


def test_the_dry_run_tells_the_class_of_each_step_and_the_outcome_of_each_call(path: Path):
    before = files(path)
    plans = {plan.session_id: plan for plan in doctor(path).would_recover}
    assert plans["b"].outcome == "complete"
    assert {call.call_id: call.outcome for call in plans["b"].calls} == {
        "done": "recorded",
        "doubt": "in_doubt",
        "fresh": "canceled",
    }
    assert (plans["c"].outcome, plans["c"].text) == ("interrupted", "Once upon a time")
    assert files(path) == before

    with holdfast.open(path) as store:
        done = {step.session_id: step for step in store.recovery.steps}
    assert {name: step.outcome for name, step in done.items()} == {
        name: plan.outcome for name, plan in plans.items()
    }
    assert done["b"].in_doubt == ("doubt",)
    assert done["b"].canceled == ("fresh",)


def test_a_store_is_sound_after_recovery_and_when_it_is_new(path: Path, tmp_path: Path):
    holdfast.open(path).close()
    report = doctor(path)
    assert report.problems == () and report.would_recover == ()
    holdfast.open(tmp_path / "new.db").close()
    assert doctor(tmp_path / "new.db").problems == ()


def test_a_store_is_sound_in_mid_stream_beside_its_living_writer(tmp_path: Path):
    path = tmp_path / "store.db"
    with holdfast.open(path) as store:
        session = store.create_session("a")
        step = session.begin_step("m")
        for word in range(20):
            step.append_text(f"{word} ")
            if word % 5 == 0:
                report = doctor(path)
                assert report.problems == () and report.would_recover == ()
        assert "living-owner" in {note.code for note in report.notes}
        step.append_text("and on")
        step.append_done()
        step.commit()
        assert doctor(path).problems == ()


WRITER = """
import sys, holdfast
store = holdfast.open(sys.argv[1])
session = store.create_session("a")
session.add_user("go")
step = session.begin_step("m")
print("ready", flush=True)
for word in range(1_000_000):
    step.append_text(f"{word} ")
    if word % 200 == 199:
        step.append_done(); step.commit(); step = session.begin_step("m")
"""


def test_a_store_is_sound_beside_another_process_and_after_that_was_killed(tmp_path: Path):
    path = tmp_path / "store.db"
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    with child, child.stdout:
        try:
            assert child.stdout.readline() == "ready\n"
            for _ in range(4):
                report = doctor(path)
                assert report.problems == () and report.would_recover == ()
        finally:
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
    report = doctor(path)
    assert report.problems == ()
    with holdfast.open(path) as store:  # None, if the kill came between two steps.
        assert [step.step_id for step in store.recovery.steps] == [
            plan.step_id for plan in report.would_recover
        ]
    assert doctor(path).problems == ()


def test_journals_on_their_own_are_sound(tmp_path: Path):
    path = tmp_path / "journal.db"
    with StreamJournal.open(path) as journal:
        journal.begin_step("m").append_text("left")
        sealed = journal.begin_step("m")
        sealed.append_text("sealed")
        sealed.append_done()
        sealed.seal()
    with ToolJournal.open(path) as tools:
        tools.begin_batch("m", "said", [ToolUse("x", "act", {})])
        batch = tools.begin_streaming_batch("m")
        tools.record_call_start(batch, 0, "y", "act")
        tools.append_call_args(batch, "y", "{}")
        tools.record_result(batch, ToolResult("y", "fine"))
    report = doctor(path)
    assert report.problems == ()
    assert report.would_recover == ()


def test_a_backup_is_sound(path: Path, tmp_path: Path):
    with holdfast.open(path, recover=False) as store:
        store.backup(tmp_path / "backup.db")
    report = doctor(tmp_path / "backup.db")
    assert report.problems == ()
    assert len(report.would_recover) == 2
    assert {one.name for one in tmp_path.glob("backup.db*")} == {"backup.db"}


def test_a_dead_owner_that_left_nothing_is_a_note(path: Path):
    edit(path, "INSERT INTO owners VALUES (99, 1, 'h', 'b', 'p', 0)")
    report = doctor(path)
    assert report.ok
    assert [note.where for note in report.notes if note.code == "dead-owner"] == ["owner 99"]


def test_a_call_that_a_program_runs_itself_right_now_is_no_damage(tmp_path: Path):
    path = tmp_path / "store.db"
    with holdfast.open(path) as store:
        session = store.create_session("a")
        session.add_user("go")
        session.add(Message("assistant", [ToolUse("x", "act", {})]))
        assert doctor(path).problems == ()
        session.add_user("and now?")
        assert {problem.code for problem in doctor(path).problems} == {"missing-result"}
        session.repair()
        assert doctor(path).problems == ()


# --- planted damage -----------------------------------------------------------------------------


def edit(path: Path, *statements: str) -> None:
    """Change a closed store as no program of ours would."""
    db = apsw.Connection(str(path))
    db.execute("PRAGMA foreign_keys = OFF")
    db.create_scalar_function("seal", lambda *columns: row_crc(*columns), deterministic=True)
    for statement in statements:
        db.execute(statement)
    db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    db.close()


RESEAL = f"UPDATE history_entries SET crc = seal(id, {CHECKED})"
RESEAL_SUMMARIES = f"UPDATE summaries SET crc = seal(session_no, summary_id, {SUMMARY_COLUMNS})"
# In session a the entries 1, 2 are of step 1; 4, 5 of step 2; 7, 8 of step 3. Session b has the
# sealed step 4, session c the open step 5.
A, B, C = 1 << 32, 4 << 32, 5 << 32
DAMAGE: dict[str, tuple[str, ...]] = {
    "wrong-link": (
        "UPDATE history_entries SET stream_step_id = -stream_step_id"
        " WHERE stream_step_id IN (1, 2)",
        "UPDATE history_entries SET stream_step_id = 3 + stream_step_id"
        " WHERE stream_step_id IN (-1, -2)",
        RESEAL,
    ),
    "event-gap": (f"DELETE FROM stream_journal WHERE id = {C + 2}",),
    "entry-gap": (f"DELETE FROM history_entries WHERE id = {A + 3}",),
    "doubled-entry": (
        "DROP INDEX one_place_a_step",
        f"INSERT INTO history_entries (id, {CHECKED}, crc)"
        f" SELECT {A + 9}, {CHECKED}, 0 FROM history_entries WHERE id = {A + 8}",
        RESEAL,
    ),
    "event-damaged": (f"UPDATE stream_journal SET content = 'Twice ' WHERE id = {C + 1}",),
    "entry-damaged": (
        f"UPDATE history_entries SET body = replace(body, 'question', 'quest') WHERE id = {A}",
    ),
    "summary-damaged": ("UPDATE summaries SET content = 'they quarrelled'",),
    "result-damaged": ("UPDATE tool_results SET body = replace(body, 'worked', 'failed')",),
    "result-without-call": (
        "INSERT INTO tool_results SELECT 4, 7, body, seal(4, 7, body), 0 FROM tool_results",
    ),
    "call-without-step": (
        "INSERT INTO tool_calls (step_id, position, call_id, name, state)"
        " VALUES (77, 0, 'x', 'act', 'ready')",
    ),
    "batch-without-step": ("INSERT INTO tool_batches VALUES (77, 'said')",),
    "call-without-event": (
        "INSERT INTO tool_calls (step_id, position, call_id, name, state)"
        " VALUES (5, 0, 'x', 'act', 'ready')",
    ),
    "call-differs": ("UPDATE tool_calls SET name = 'rm' WHERE position = 1",),
    "missing-result": (
        "UPDATE history_entries SET body ="
        ' \'{"role":"user","content":[{"type":"text","text":"nothing"}]}\''
        f" WHERE id = {A + 2}",
        RESEAL,
    ),
    "orphan-result": (
        f"UPDATE history_entries SET body = replace(body, 'call-0', 'call-9') WHERE id = {A + 2}",
        RESEAL,
    ),
    "misplaced-result": (
        "CREATE TEMP TABLE swap AS SELECT id, body, role FROM history_entries WHERE id IN"
        f" ({A + 2}, {A + 3})",
        "UPDATE history_entries SET (body, role) = (SELECT body, role FROM temp.swap"
        f" WHERE swap.id = {2 * A + 5} - history_entries.id) WHERE id IN ({A + 2}, {A + 3})",
        RESEAL,
    ),
    "counter-off": ("UPDATE sessions SET entries = entries - 1 WHERE session_id = 'a'",),
    "last-status-off": ("UPDATE sessions SET last_status = 'errored' WHERE session_id = 'a'",),
    "session-damaged": ("UPDATE sessions SET metadata = '{' WHERE session_id = 'a'",),
    "step-in-two-places": (
        f"INSERT INTO stream_journal (id, event_type, content, crc) VALUES ({A + 1}, 'text_delta',"
        f" 'x', {event_crc(A + 1, 'text_delta', None, b'x')})",
    ),
    "step-and-entry-differ": ("UPDATE step_metadata SET stop_reason = 'other' WHERE step_id = 1",),
    "step-counter-behind": ("UPDATE step_counter SET next_step_id = 5",),
    "step-without-session": ("UPDATE step_metadata SET session = 'gone' WHERE step_id = 5",),
    "event-without-step": ("DELETE FROM step_metadata WHERE step_id = 5",),
    "step-unreadable": (
        f"UPDATE stream_journal SET content = '[', crc = {event_crc(B + 2, 'call', 0, b'[')}"
        f" WHERE id = {B + 2}",
    ),
    "sealed-step-short": (f"DELETE FROM stream_journal WHERE id = {B + 8}",),
    "two-writers": (
        "DROP INDEX one_step_a_session",
        "UPDATE step_metadata SET session = 'b' WHERE step_id = 5",
    ),
    "entry-without-session": ("DELETE FROM sessions WHERE session_id = 'a'",),
    "summary-over-nothing": (
        "UPDATE summaries SET start_id = 20, end_id = 30 WHERE summary_id = 0",
        RESEAL_SUMMARIES,
    ),
    "summary-link": (f"UPDATE history_entries SET summary_id = NULL WHERE id = {A + 1}",),
    "quarantined-step": ("UPDATE step_metadata SET state = 'quarantined' WHERE step_id = 5",),
    "schema": ("DROP INDEX sessions_by_change",),
    "broken-reference": ("UPDATE summaries SET session_no = 66",),
}
# What else must be told, because one damage is two: a deleted entry is also one that is counted.
FOLLOWS: dict[str, set[str]] = {
    "entry-gap": {"counter-off", "summary-over-nothing"},
    "doubled-entry": {"counter-off", "schema", "orphan-result"},
    "result-without-call": set(),
    "call-without-step": {"broken-reference"},
    "batch-without-step": {"broken-reference"},
    "missing-result": set(),
    "orphan-result": {"missing-result"},
    "misplaced-result": set(),
    "step-without-session": {"broken-reference"},
    "two-writers": {"schema"},
    "entry-without-session": {"broken-reference", "step-without-session", "wrong-link"},
    "summary-link": {"counter-off"},
    "broken-reference": {"counter-off", "summary-link", "summary-over-nothing"},
}


@pytest.mark.parametrize("code", DAMAGE)
def test_each_planted_damage_is_named(path: Path, code: str):
    edit(path, *DAMAGE[code])
    assert codes(path) == {code, *FOLLOWS.get(code, ())}


def test_every_code_has_its_advice():
    assert set(DAMAGE) <= set(ADVICE)


def test_a_finding_says_where(path: Path):
    edit(path, *DAMAGE["event-damaged"], *DAMAGE["entry-damaged"])
    assert {(found.code, found.where) for found in doctor(path).problems} == {
        ("event-damaged", "step 5, event 1"),
        ("entry-damaged", "session a, entry 0"),
    }


def test_a_time_that_is_none_and_a_text_that_is_none_are_found_and_break_nothing(path: Path):
    edit(
        path,
        f"UPDATE sessions SET created_us = {1 << 62} WHERE session_id = 'a'",
        "UPDATE step_metadata SET model_name = CAST(x'ff41' AS TEXT) WHERE step_id = 5",
        f"UPDATE history_entries SET counter = CAST(x'ff41' AS TEXT) WHERE id = {A}",
        f"UPDATE stream_journal SET content = CAST(x'ff41' AS TEXT) WHERE id = {C + 3}",
        f"UPDATE history_entries SET body = CAST(x'ff41' AS TEXT) WHERE id = {A + 4}",
        "UPDATE tool_calls SET name = CAST(x'ff41' AS TEXT) WHERE position = 0",
        "INSERT INTO owners VALUES (99, 1, CAST(x'ff41' AS TEXT), 'b', 'p', 0)",
    )
    found = {(one.code, one.where) for one in doctor(path).problems}
    assert found == {
        ("session-damaged", "session a"),
        ("step-damaged", "step 5"),
        ("entry-damaged", "session a, entry 0"),
        ("entry-damaged", "session a, entry 4"),
        ("event-damaged", "step 5, event 3"),
        ("call-differs", "step 4, call 0"),
        ("owner-damaged", "owner 99"),
    }
    with holdfast.open(path) as store:
        assert [step.outcome for step in store.recovery.steps] == ["complete", "interrupted"]
        assert [info.created_at.year for info in store.sessions() if info.id == "a"] == [1970]
        assert [entry.id for entry in store.session("a").history.entries()] == [
            0,
            1,
            2,
            3,
            5,
            6,
            7,
            8,
        ]
        kept = store.session("c").history.get_entry(1)
        assert kept.message.text == "Once upon "
        assert kept.metadata["behind_gap"].endswith("time")


def test_many_findings_of_one_kind_are_counted_not_listed(path: Path):
    with holdfast.open(path) as store:
        session = store.create_session("long")
        for word in range(60):
            session.add_user(f"{word}")
    edit(path, "UPDATE history_entries SET crc = 0 WHERE id >> 32 = 5")
    problems = doctor(path).problems
    assert len(problems) == 26
    assert problems[-1].what == "35 more of this kind"


def test_a_program_that_only_adds_messages_has_pairs_across_pages(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("holdfast.recovery.pairing_check.MESSAGES_AT_ONCE", 3)
    path = tmp_path / "store.db"
    with holdfast.open(path) as store:
        session = store.create_session("a")
        for turn in range(8):
            calls = [ToolUse(f"{turn}-{n}", "act", {}) for n in range(2)]
            session.add(Message("assistant", [Text("so"), *calls]))
            session.add(Message("user", [ToolResult(call.id, "ok") for call in calls]))
    assert doctor(path).problems == ()


# --- the log ------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def original_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    live = tmp_path_factory.mktemp("log") / "live.db"
    copy = live.with_name("copied.db")
    with holdfast.open(live) as store:
        session = store.create_session("a")
        for word in range(12):
            session.add_user(f"message {word}")
        shutil.copy(live, copy)
        shutil.copy(f"{live}-wal", f"{copy}-wal")
    return copy


@pytest.fixture
def logged(original_log: Path, tmp_path: Path) -> Path:
    """A copy of a store in use, whose log has many commits."""
    copy = tmp_path / "store.db"
    shutil.copy(original_log, copy)
    shutil.copy(f"{original_log}-wal", f"{copy}-wal")
    return copy


FRAME = 24 + 1024


def frames_of(path: Path) -> list[bool]:
    """For each frame of the log whether it commits."""
    log = Path(f"{path}-wal").read_bytes()
    starts = range(32, len(log) - FRAME + 1, FRAME)
    return [any(log[at + 4 : at + 8]) for at in starts]


def flip(path: Path, at: int, bit: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.write_bytes(bytes(data))


def test_the_checksum_is_the_one_of_sqlite(logged: Path):
    log = Path(f"{logged}-wal").read_bytes()
    order = "<" if log[3] == 0x82 else ">"
    told = checksum(order, log[:24], 0, 0)
    assert b"".join(part.to_bytes(4, "big") for part in told) == log[24:32]


def test_a_log_of_a_killed_process_is_no_damage(logged: Path):
    log = Path(f"{logged}-wal")
    whole = log.read_bytes()
    assert codes(logged) == set()
    for torn in (1, 24, 500, FRAME, FRAME + 7):
        log.write_bytes(whole[:-torn])
        assert codes(logged) == set(), torn


@pytest.mark.parametrize(
    "offset", [0, 5, 9, 17, 30, 600], ids="page size salt sum data more".split()
)
def test_commits_behind_a_bad_frame_are_found(logged: Path, offset: int):
    frames = frames_of(logged)
    bad = len(frames) // 2
    flip(Path(f"{logged}-wal"), 32 + bad * FRAME + offset)
    [found] = [one for one in doctor(logged).problems if one.code == "log-cut"]
    assert found.where == f"the log, frame {bad + 1}"
    assert f"leaves out {sum(frames[bad + 1 :])} commit(s)" in found.what


@pytest.mark.parametrize("at", [0, 3, 9, 17, 25])
def test_a_bad_header_of_the_log_is_found(logged: Path, at: int):
    flip(Path(f"{logged}-wal"), at)
    assert "log-header" in codes(logged)


def test_frames_of_an_earlier_round_behind_the_end_are_no_damage(tmp_path: Path):
    path = tmp_path / "store.db"
    with holdfast.open(path) as store:
        session = store.create_session("a")
        for word in range(30):
            session.add_user(f"message {word}")
        store.engine.checkpoint()
        session.add_user("the log begins again, over the frames of before")
        assert Path(f"{path}-wal").stat().st_size > 30 * FRAME
        assert codes(path) == set()


# --- files that cannot be opened ----------------------------------------------------------------


def test_a_missing_file_is_the_one_thing_that_raises(tmp_path: Path):
    with pytest.raises(StoreNotFound):
        doctor(tmp_path / "none.db")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [b"", b"junk", b"\0" * 4096, os.urandom(5000), b"SQLite format 3\0" + b"\1" * 3000],
    ids="empty short zeros noise magic".split(),
)
def test_junk_is_reported(tmp_path: Path, content: bytes):
    path = tmp_path / "store.db"
    path.write_bytes(content)
    assert codes(path) == {"not-a-store"}
    assert list(tmp_path.iterdir()) == [path]


def test_a_database_of_another_program_is_reported(tmp_path: Path):
    path = tmp_path / "store.db"
    db = apsw.Connection(str(path))
    db.execute("CREATE TABLE t (a); INSERT INTO t VALUES (1)")
    db.close()
    assert codes(path) == {"not-a-store"}


def test_a_newer_store_is_reported(path: Path):
    edit(path, "PRAGMA user_version = 99")
    assert codes(path) == {"too-new"}


@pytest.mark.parametrize("keep", [100, 1024, 5000, 20 * 1024, 31 * 1024])
def test_a_truncated_store_is_reported(path: Path, keep: int):
    path.write_bytes(path.read_bytes()[:keep])
    assert codes(path)


def test_a_store_in_use_by_one_process_alone_is_reported_as_busy(path: Path):
    with holdfast.open(path, exclusive=True):
        assert codes(path) == {"busy"}


def test_a_folder_that_cannot_be_written_gets_no_new_file(path: Path):
    before = {one.name for one in path.parent.iterdir()}
    assert doctor(path).ok
    assert {one.name for one in path.parent.iterdir()} == before


def test_a_log_in_a_folder_that_cannot_be_written_is_read_from_a_copy(logged: Path, monkeypatch):
    from holdfast.journal.engine import connection, inspect
    from holdfast.journal.errors import StoreNotWritable

    connect = connection.connect_read_only

    def refuse(location, *, vfs):
        if location.path == logged:
            raise StoreNotWritable(logged, "no -shm can be made here")
        return connect(location, vfs=vfs)

    monkeypatch.setattr(inspect.connections, "connect_read_only", refuse)
    report = doctor(logged)
    assert report.ok and report.entries == 12
    assert not Path(f"{logged}-shm").exists()


def test_a_folder_is_reported_and_not_looked_into(tmp_path: Path):
    report = doctor(tmp_path)
    assert [found.code for found in report.problems] == ["not-a-store"]
    assert "Verdict: not looked at" in report.summary()


def test_a_store_that_is_only_busy_is_not_called_damaged(path: Path):
    with holdfast.open(path, exclusive=True):
        told = doctor(path).summary()
    assert "[busy]" in told
    assert "damaged" not in told
