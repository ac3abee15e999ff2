"""Real processes, really killed: at named points, inside recovery, and beside the living."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from crash_rig import SESSION, Op, do, expected, violations

import holdfast
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.recovery.faults import FaultDisk

pass_module = importlib.import_module("holdfast.recovery.recover")

SCRIPT: list[Op] = [
    ("user", "go"),
    ("begin",),
    ("text", "I call"),
    ("call", "a", "run"),
    ("args", "a", "{}"),
    ("call", "b", "run"),
    ("args", "b", "{}"),
    ("done",),
    ("seal",),
    ("start", "a", "never"),
    ("result", "a", "A"),
    ("start", "b", "never"),
    ("result", "b", "B"),
    ("commit",),
]
SEAL, START, RESULT, COMMIT = 8, 9, 10, 13  # where they stand


def die(*_: Any, **__: Any) -> None:
    """What kill -9 does, at exactly this instruction."""
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a child of its own; the signal that ended it, or 0."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            os._exit(99)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status)
    assert os.WEXITSTATUS(status) == 0, "the child raised"
    return 0


def run_and_die(path: Path, script: Sequence[Op]) -> None:
    def work() -> None:
        store = holdfast.open(path)
        session, step = store.create_session(SESSION), None
        for op in script:
            step = do(session, step, op)
        die()

    assert in_child(work) == signal.SIGKILL


def die_after(name: str, nth: int = 1) -> Callable[[], None]:
    """Let this process be killed directly after an operation of the engine has returned."""

    def patch() -> None:
        whole = getattr(SqliteEngine, name)
        calls = iter(range(1, 1000))

        def deadly(*values: Any, **named: Any) -> Any:
            result = whole(*values, **named)
            if next(calls) == nth:
                die()
            return result

        setattr(SqliteEngine, name, deadly)

    return patch


def die_before(name: str) -> Callable[[], None]:
    return lambda: setattr(SqliteEngine, name, die)


def recover_and_die(path: Path, patch: Callable[[], None], **options: Any) -> int:
    def work() -> None:
        patch()
        holdfast.open(path, **options)

    return in_child(work)


def check(path: Path, script: Sequence[Op]) -> None:
    """Recover in a process of its own, then look."""
    assert in_child(lambda: holdfast.open(path).close()) == 0
    assert violations(path, [expected(script)]) == []


@pytest.mark.parametrize("count", range(1, len(SCRIPT) + 1))
def test_a_kill_directly_after_any_call_loses_nothing_of_it(tmp_path: Path, count: int) -> None:
    run_and_die(tmp_path / "s.db", SCRIPT[:count])
    check(tmp_path / "s.db", SCRIPT[:count])


@pytest.mark.parametrize(
    ("count", "patch", "standing"),
    [
        (SEAL, die_before("seal"), SEAL),
        (SEAL, die_after("seal"), SEAL + 1),
        (START, die_before("start_call"), START),
        (START, die_after("start_call"), START + 1),
        (RESULT, die_before("put_result"), RESULT),
        (RESULT, die_after("put_result"), RESULT + 1),
        (COMMIT, die_before("settle"), COMMIT),
        (COMMIT, die_after("settle"), COMMIT + 1),
    ],
    ids=[
        "before seal",
        "after seal",
        "before start",
        "between start and result",
        "before result",
        "after result",
        "before settle",
        "after settle",
    ],
)
def test_a_kill_at_a_named_point(
    tmp_path: Path, count: int, patch: Callable[[], None], standing: int
) -> None:
    def work() -> None:
        store = holdfast.open(tmp_path / "s.db")
        session, step = store.create_session(SESSION), None
        for op in SCRIPT[:count]:
            step = do(session, step, op)
        patch()
        do(session, step, SCRIPT[count])

    assert in_child(work) == signal.SIGKILL
    check(tmp_path / "s.db", SCRIPT[:standing])


def test_a_kill_at_any_write_inside_settle(tmp_path: Path) -> None:
    """The live counterpart of the crash images: the process dies within the transaction."""
    deaths = 0
    for ahead in range(1, 200):
        path = tmp_path / str(ahead) / "s.db"

        def work(path: Path = path, ahead: int = ahead) -> None:
            disk = FaultDisk()
            store = holdfast.open(path, vfs=disk.name)
            session, step = store.create_session(SESSION), None
            for op in SCRIPT[:COMMIT]:
                step = do(session, step, op)
            disk.die_at = len(disk.ops) + ahead
            do(session, step, SCRIPT[COMMIT])

        killed = in_child(work)
        assert in_child(lambda path=path: holdfast.open(path).close()) == 0
        # Before and after the commit history reads the same: all calls were answered.
        assert violations(path, [expected(SCRIPT)]) == []
        if not killed:
            break
        deaths += 1
    assert deaths > 5


POINTS = [
    die_before("claim_many"),
    die_after("claim_many"),
    die_after("small_streams"),
    die_before("settle"),
    die_after("settle"),
    die_before("forget_owners"),
]


@pytest.mark.parametrize("point", range(len(POINTS)))
def test_a_kill_inside_recovery(tmp_path: Path, point: int) -> None:
    script = SCRIPT[: START + 1]
    run_and_die(tmp_path / "s.db", script)
    assert recover_and_die(tmp_path / "s.db", POINTS[point]) == signal.SIGKILL
    check(tmp_path / "s.db", script)


def test_kills_of_recoveries_five_deep(tmp_path: Path) -> None:
    script = SCRIPT[: START + 1]
    run_and_die(tmp_path / "s.db", script)
    for point in POINTS[1:4] + POINTS[1:3]:
        assert recover_and_die(tmp_path / "s.db", point) == signal.SIGKILL
    check(tmp_path / "s.db", script)


def test_a_resolver_is_asked_at_least_once_across_kills(tmp_path: Path) -> None:
    script = SCRIPT[: START + 1]
    path, log = tmp_path / "s.db", tmp_path / "asked"
    run_and_die(path, script)

    def answer(call: Any) -> holdfast.ToolResult:
        with log.open("a") as file:
            file.write(f"{call.operation_id}\n")
        return holdfast.ToolResult(call.id, "looked up")

    assert recover_and_die(path, die_before("settle"), resolver=answer) == signal.SIGKILL
    assert recover_and_die(path, die_after("settle"), resolver=answer) == signal.SIGKILL
    assert recover_and_die(path, lambda: None, resolver=answer) == 0
    # Asked again after the kill before settling, not after the one behind it; by one name.
    assert len(log.read_text().split()) == 2
    assert len(set(log.read_text().split())) == 1
    assert violations(path, [], settled=False) == []
    with holdfast.open(path) as store:
        outputs = store.session(SESSION).messages()[-1].tool_results
    assert (outputs[0].content, outputs[0].synthetic) == ("looked up", "resolved")


def test_a_step_that_kills_every_recovery_is_set_aside_and_the_store_opens(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s.db"
    run_and_die(path, SCRIPT[: START + 1])
    policy = holdfast.RecoveryPolicy(max_attempts=2)
    deaths = 0
    while recover_and_die(path, lambda: None, resolver=die, policy=policy):
        deaths += 1
        assert deaths < 20
    assert deaths == policy.deaths_max
    with holdfast.open(path) as store:
        assert store.recovery.is_empty
        session = store.session(SESSION)
        session.add_user("onwards")
        assert [message.text for message in session.messages()] == ["go", "onwards"]


# --- two processes ------------------------------------------------------------------------------


class Streamer:
    """A process that streams until it is told to stop, in a session of its own."""

    def __init__(self, path: Path) -> None:
        told, self.tell = os.pipe()
        self.hear, says = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._stream(path, told, says)
            except BaseException:
                os._exit(99)
            os._exit(0)
        os.close(told)
        os.close(says)
        self.wait()

    @staticmethod
    def _stream(path: Path, told: int, says: int) -> None:
        store = holdfast.open(path)
        step = store.create_session("live").begin_step()
        step.append_text("0 ")
        os.write(says, b"x")
        for number in range(1, 100):
            if os.read(told, 1) != b"+":
                break
            step.append_text(f"{number} ")
            os.write(says, b"x")
        step.append_done()
        step.commit()
        store.close()

    def wait(self) -> None:
        assert os.read(self.hear, 1) == b"x"

    def go_on(self) -> None:
        os.write(self.tell, b"+")
        self.wait()

    def finish(self) -> None:
        os.write(self.tell, b".")
        assert os.waitpid(self.pid, 0)[1] == 0
        self.close()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.close()

    def close(self) -> None:
        os.close(self.tell)
        os.close(self.hear)


def test_one_process_streams_while_another_opens(tmp_path: Path) -> None:
    streamer = Streamer(tmp_path / "s.db")
    for _ in range(5):
        with holdfast.open(tmp_path / "s.db") as store:
            assert store.recovery.is_empty
            assert store.recovery.skipped == ("live",)
            with pytest.raises(holdfast.SessionBusy, match=f"pid {streamer.pid}"):
                store.session("live").add_user("me too")
        streamer.go_on()
    streamer.finish()
    with holdfast.open(tmp_path / "s.db") as store:
        assert store.recovery.is_empty
        (entry,) = store.session("live").history.entries()
        assert (entry.message.text, entry.status) == ("0 1 2 3 4 5 ", "complete")


def test_a_stopped_process_is_alive(tmp_path: Path) -> None:
    streamer = Streamer(tmp_path / "s.db")
    os.kill(streamer.pid, signal.SIGSTOP)
    os.waitpid(streamer.pid, os.WUNTRACED)
    with holdfast.open(tmp_path / "s.db") as store:
        assert (store.recovery.is_empty, store.recovery.skipped) == (True, ("live",))
    os.kill(streamer.pid, signal.SIGCONT)
    streamer.go_on()
    streamer.finish()
    with holdfast.open(tmp_path / "s.db") as store:
        assert store.session("live").messages()[0].text == "0 1 "


def test_a_process_that_died_after_we_opened_is_recovered_before_our_next_write(
    tmp_path: Path,
) -> None:
    streamer = Streamer(tmp_path / "s.db")
    with holdfast.open(tmp_path / "s.db") as store:
        streamer.go_on()
        streamer.kill()
        session = store.session("live")
        session.add_user("are you there?")
        assert [m.text for m in session.messages()] == ["0 1 ", "are you there?"]
        assert [step.outcome for step in store.recovery.steps] == ["interrupted"]


def test_processes_that_open_at_once_settle_each_step_once_and_ask_once(tmp_path: Path) -> None:
    path, log = tmp_path / "s.db", tmp_path / "asked"
    run_and_die(path, SCRIPT[: START + 1])
    gate, opened = os.pipe()

    def ask(call: Any) -> None:
        with log.open("a") as file:
            file.write(f"{call.call_id}\n")

    pids = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            try:
                os.close(opened)
                os.read(gate, 1)  # Until the parent closes its end.
                holdfast.open(path, resolver=ask).close()
            except BaseException:
                os._exit(99)
            os._exit(0)
        pids.append(pid)
    os.close(gate)
    os.close(opened)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    assert log.read_text().split() == ["a"]
    assert violations(path, [expected(SCRIPT[: START + 1])]) == []
