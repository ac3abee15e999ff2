"""What a store reports to a drill, and to whom."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import warnings
from collections import Counter

import pytest

import holdfast
from holdfast.recovery import acks
from holdfast.recovery.oracle import check_promises
from holdfast.recovery.told import Ack


@pytest.fixture
def pipe(monkeypatch):
    """A pipe that stores of this process report to; gives a function that reads what came."""
    listen, tell = os.pipe()
    os.set_blocking(listen, False)
    monkeypatch.setattr(acks, "_pipe", None)
    monkeypatch.setenv(acks.VARIABLE, f"{os.getpid()}:{tell}")

    def heard():
        try:
            text = os.read(listen, 1 << 20)
        except BlockingIOError:
            text = b""
        return [Ack(*line[1:5]) for line in acks.decode(text) if line.sign == "!"]

    yield heard
    os.close(listen)
    os.close(tell)


def a_turn(session):
    session.add_system("be brief")
    session.add_user("what is the weather?")
    step = session.begin_step()
    step.append_thinking("hm")
    step.append_signature("signed")
    step.append_text("I look. ")
    step.append_opaque("provider", {"any": [1, None]})
    for call_id in ("a", "b"):
        step.announce_call(call_id, "weather")
        step.append_args(call_id, '{"city": ')
    for call_id in ("b", "a"):
        step.append_args(call_id, '"Oslo"}')
    step.append_done()
    step.seal()
    step.start_call("a")
    step.start_call("a")
    step.record_result("a", "rain")
    step.record_result("a", "rain")
    step.record_result("b", [holdfast.Text("snow")], is_error=True)
    step.commit()


def test_each_acknowledged_call_is_reported_once(pipe, tmp_path):
    with holdfast.open(tmp_path / "agent.db") as store:
        a_turn(store.create_session("s"))
        step = store.session("s").begin_step()
        step.append_error("reset")
        step.discard()
        kept = pipe()
        store.delete_session("s")
        assert pipe() == [Ack("delete", 0, 0, "s")]
    assert Counter(ack.kind for ack in kept) == Counter(
        "session system user begin thinking signature text opaque call call args args args args"
        " done seal start result result commit begin error discard".split()
    )
    assert [ack.data for ack in kept if ack.kind == "args"] == [
        ["a", '{"city": '],
        ["b", '{"city": '],
        ["b", '"Oslo"}'],
        ["a", '"Oslo"}'],
    ]


def test_what_is_reported_is_what_the_oracle_finds(pipe, tmp_path):
    with holdfast.open(tmp_path / "agent.db") as store:
        a_turn(store.create_session("s"))
        check_promises(pipe(), store)


def test_leaving_a_with_block_reports_what_it_puts_on_record(pipe, tmp_path):
    with holdfast.open(tmp_path / "agent.db") as store:
        session = store.create_session("s")
        with session.begin_step() as step:
            step.append_text("said")
        with pytest.raises(ZeroDivisionError), session.begin_step() as step:
            step.append_text(str(1 / 0))
        told = pipe()
        check_promises(told, store)
    kinds = [ack.kind for ack in told]
    assert kinds == "session begin text done seal commit begin error seal commit".split()


def test_streams_that_share_commits_report_each_event_once(pipe, tmp_path):
    async def stream(store, number):
        session = await store.create_session(f"s{number}")
        async with session.begin_step() as step:
            for index in range(20):
                await step.append_text(f"{number}.{index} ")

    async def agent():
        async with await holdfast.open_async(tmp_path / "agent.db") as store:
            await asyncio.gather(*(stream(store, number) for number in range(5)))

    asyncio.run(agent())
    told = pipe()
    places = Counter((ack.step_id, ack.seq) for ack in told if ack.kind == "text")
    assert len(places) == 100 and set(places.values()) == {1}
    with holdfast.open(tmp_path / "agent.db") as store:
        check_promises(told, store)


def test_a_history_that_is_taken_back_or_repaired_is_reported(pipe, tmp_path):
    with holdfast.open(tmp_path / "agent.db") as store:
        session = store.create_session("s")
        last = session.add_user("not this")
        session.history.pop_if_last(last)
        session.add(holdfast.Message("assistant", [holdfast.ToolUse("a", "tool", {})]))
        session.repair()
    kinds = [ack.kind for ack in pipe()]
    assert kinds == ["session", "user", "pop", "assistant", "rewrite"]


def test_the_users_own_watcher_is_told_as_well(pipe, tmp_path):
    seen = []
    with holdfast.open(tmp_path / "agent.db", on_event=seen.append) as store:
        store.create_session("s").add_user("hello")
    assert "add" in [event.kind for event in seen]
    assert [ack.kind for ack in pipe()] == ["session", "user"]


def test_the_variable_is_gone_once_it_was_read_and_later_stores_report_too(pipe, tmp_path):
    for name in ("one", "two"):
        with holdfast.open(tmp_path / f"{name}.db") as store:
            store.create_session(name)
        assert acks.VARIABLE not in os.environ
    assert [ack.data for ack in pipe()] == ["one", "two"]


@pytest.mark.parametrize("value", ["", "7", "x:y", "1:1", "{pid}:999", "{pid}:0x3", "{pid}:{file}"])
def test_a_bad_value_is_warned_of_and_changes_nothing(value, tmp_path, monkeypatch):
    monkeypatch.setattr(acks, "_pipe", None)
    with (tmp_path / "file").open("w") as file:
        given = value.format(pid=os.getpid(), file=file.fileno())
        monkeypatch.setenv(acks.VARIABLE, given)
        with pytest.warns(RuntimeWarning, match="HOLDFAST_ACK_FD is .* not reported"):
            store = holdfast.open(tmp_path / "agent.db")
        with store:
            store.create_session("s").add_user("hello")
            assert acks.VARIABLE not in os.environ
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("end", ["another process", "the wrong end"])
def test_a_pipe_that_is_not_meant_for_this_process_stays_empty(end, pipe, tmp_path, monkeypatch):
    pid, tell = map(int, os.environ[acks.VARIABLE].split(":"))
    listen, other = os.pipe()
    pid, fd = (pid + 1, tell) if end == "another process" else (pid, listen)
    monkeypatch.setenv(acks.VARIABLE, f"{pid}:{fd}")
    with pytest.warns(RuntimeWarning, match="not reported"):
        holdfast.open(tmp_path / "agent.db").close()
    assert pipe() == []
    os.close(listen)
    os.close(other)


def test_a_child_of_the_program_reports_nothing_and_has_no_descriptor(pipe, tmp_path):
    tell = int(os.environ[acks.VARIABLE].split(":")[1])
    os.set_inheritable(tell, True)
    with holdfast.open(tmp_path / "agent.db"):
        pass
    look = f"import os; print(os.path.exists('/proc/self/fd/{tell}'))"
    child = [sys.executable, "-c", look]
    out = subprocess.run(child, close_fds=False, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
    assert os.get_inheritable(tell) is False


def test_a_drill_that_has_gone_away_does_not_hurt_the_program(tmp_path, monkeypatch):
    listen, tell = os.pipe()
    monkeypatch.setattr(acks, "_pipe", None)
    monkeypatch.setenv(acks.VARIABLE, f"{os.getpid()}:{tell}")
    with warnings.catch_warnings(), holdfast.open(tmp_path / "agent.db") as store:
        warnings.simplefilter("error")
        os.close(listen)
        a_turn(store.create_session("s"))
        assert len(store.session("s").history) == 4
    os.close(tell)


def test_a_torn_last_line_is_ignored():
    whole = acks.encode("!", "text", 1, 1, "a", 1)
    torn = acks.encode("!", "text", 1, 2, "b" * 50, 1)
    for cut in range(len(torn)):
        assert [line.data for line in acks.decode(whole + torn[:cut])] == ["a"]
