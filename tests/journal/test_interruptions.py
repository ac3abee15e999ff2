"""Whatever is interrupted, anywhere, can be given again or left at that: no gap, no double.

The sweeps raise at every point at which Python lets a signal handler in, one after the other; the
tests with real signals see that we know those points.
"""

import itertools
import os
import subprocess
import sys

import pytest

from holdfast.journal import StreamJournal, ToolUse
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.journal.errors import CallNotReady, ResultMismatch, StepClosed, StoreFull
from holdfast.journal.stream import fold
from holdfast.recovery.faults import FaultDisk


@pytest.fixture
def journal(tmp_path):
    with StreamJournal(SqliteEngine.open(tmp_path / "a.db", durability="process")) as journal:
        yield journal


def events_of(step):
    """What is on record, as (seq, kind, content)."""
    return [(e.seq, e.kind, e.content) for e in step._engine.events(step.step_id)]


@pytest.mark.parametrize("then", ["retry", "move on"])
def test_a_failed_append_leaves_no_gap_and_no_double(tmp_path, then):
    with FaultDisk() as disk:
        journal = StreamJournal(SqliteEngine.open(tmp_path / "a.db", vfs=disk.name))
        step = journal.begin_step("m")
        expected = []
        for n in range(40):
            if n % 4 == 2:
                disk.fail("write", error="full", times=1000)
                with pytest.raises(StoreFull):
                    step.append_text(f"{n};")
                disk.clear_faults()
                if then == "move on":
                    continue
            step.append_text(f"{n};")
            expected.append(f"{n};")
        assert step.text == "".join(expected)
        assert [(seq, content) for seq, _, content in events_of(step)] == list(
            enumerate(expected, 1)
        )
        journal.close()


# Before: how the step comes to be. Act: what is interrupted.
ACTS = {
    "append_text": (lambda step: step.append_text("a"), lambda step: step.append_text("b")),
    "the same delta": (lambda step: step.append_text("a"), lambda step: step.append_text("a")),
    "a surrogate": (lambda step: step.append_text("a"), lambda step: step.append_text("\ud800")),
    "append_opaque": (lambda step: None, lambda step: step.append_opaque("p", {"k": [1]})),
    "announce_call": (
        lambda step: step.append_text("a"),
        lambda step: step.announce_call("c", "f"),
    ),
    "append_args": (
        lambda step: step.announce_call("c", "f"),
        lambda step: step.append_args("c", "{}"),
    ),
    "append_done": (
        lambda step: step.append_text("a"),
        lambda step: step.append_done(usage={"n": 1}),
    ),
    "append_error": (lambda step: step.append_text("a"), lambda step: step.append_error("x")),
}


@pytest.fixture
def sweep(journal, interrupt_at):
    """Interrupt `act` once at every point there is, each time in a new step; then `after`."""

    def run(before, act, after):
        for point in itertools.count(1):
            step = journal.begin_step("m")
            before(step)
            interrupted, _ = interrupt_at(point, lambda: act(step))  # noqa: B023
            if not interrupted:
                break
            after(step)
        assert point > 5, "hardly anything was interrupted"

    return run


@pytest.mark.parametrize("name", ACTS)
def test_an_append_interrupted_anywhere_can_be_given_again(journal, sweep, name):
    before, act = ACTS[name]
    whole = journal.begin_step("m")
    before(whole)
    act(whole)
    text = whole.text
    expected = events_of(whole)

    def give_again(step):
        act(step)
        assert events_of(step) == expected
        assert step.text == text
        assert [seq for seq, _, _ in events_of(step)] == list(range(1, len(expected) + 1))
        step.seal()

    sweep(before, act, give_again)


@pytest.mark.parametrize("name", ACTS)
def test_an_append_interrupted_anywhere_may_be_left_at_that(journal, sweep, name):
    """It is on record or it is not; the next one follows without a gap."""
    before, act = ACTS[name]
    without, whole = journal.begin_step("m"), journal.begin_step("m")
    before(without)
    before(whole)
    act(whole)
    possible = [events_of(without), events_of(whole)]
    is_end = name in ("append_done", "append_error")

    def move_on(step):
        on_record = len(events_of(step))
        ended = is_end and on_record == len(possible[1])
        if ended:
            with pytest.raises(StepClosed):
                step.append_text("next")
        else:
            step.announce_call("next", "g")
            step.append_args("next", "{}")
        found = events_of(step)
        assert found[:on_record] in possible
        assert [kind for _, kind, _ in found[on_record:]] == (
            [] if ended else ["call", "args_delta"]
        )
        assert [seq for seq, _, _ in found] == list(range(1, len(found) + 1))
        if not ended:
            step.append_done()
            assert {call.id: call.input for call in step.seal().tool_calls}["next"] == {}

    sweep(before, act, move_on)


def test_a_look_at_the_text_does_not_make_an_interrupted_append_double(journal, sweep):
    def look_and_give_again(step):
        assert step.text in ("a", "ab")
        step.append_text("b")
        assert step.text == "ab"
        assert step.seal().text == "ab"

    sweep(
        lambda step: step.append_text("a"),
        lambda step: step.append_text("b"),
        look_and_give_again,
    )


def ready(step):
    step.append_text("t")
    step.announce_call("c", "f")
    step.append_args("c", '{"a": 1}')
    step.append_done()


def sealed(step):
    ready(step)
    step.seal()


def started(step):
    sealed(step)
    step.start_call("c")


def test_a_seal_interrupted_anywhere_can_be_given_again(journal, sweep):
    def seal_again(step):
        message = step.seal()
        assert message.text == "t" and message.tool_calls[0].input == {"a": 1}
        assert journal._engine.step(step.step_id).state == "sealed"
        step.start_call("c")
        assert step.record_result("c", "r").content == "r"

    sweep(ready, lambda step: step.seal(), seal_again)


def test_a_seal_interrupted_anywhere_takes_no_event_if_it_landed(journal, sweep):
    def append(step):
        if journal._engine.step(step.step_id).state == "sealed":
            with pytest.raises(StepClosed, match="sealed"):
                step.append_text("late")
        else:
            step.append_text("late")
        text = step.seal().text
        assert text == fold(journal._engine.events(step.step_id)).text
        assert journal._engine.step(step.step_id).last_seq == len(events_of(step))

    sweep(lambda step: step.append_text("a"), lambda step: step.seal(), append)


@pytest.mark.parametrize("before", [ready, sealed], ids=["open", "sealed"])
def test_a_discard_interrupted_anywhere_can_be_given_again(journal, sweep, before):
    def discard_again(step):
        assert step.discard() == 4
        assert journal._engine.step(step.step_id) is None
        with pytest.raises(StepClosed):
            step.discard()

    sweep(before, lambda step: step.discard(), discard_again)


def test_a_discard_interrupted_anywhere_leaves_no_event_without_a_step(journal, sweep):
    def append(step):
        if journal._engine.step(step.step_id) is None:
            with pytest.raises(StepClosed, match="discarded"):
                step.append_text("late")
            assert events_of(step) == []
        else:
            step.append_text("late")
            assert step.seal().text == "alate"

    sweep(lambda step: step.append_text("a"), lambda step: step.discard(), append)


@pytest.mark.parametrize(
    ("before", "act"),
    [
        (sealed, lambda step: step.start_call("c", replay="safe")),
        (started, lambda step: step.record_process("c", os.getpid())),
        (started, lambda step: step.record_result("c", "r")),
        (sealed, lambda step: step.record_result("c", "r")),
        (sealed, lambda step: step.operation_id("c")),
    ],
    ids=["start_call", "record_process", "record_result", "result without start", "operation_id"],
)
def test_what_is_done_to_a_call_can_be_done_again_when_it_was_interrupted(
    journal, sweep, before, act
):
    def again(step):
        assert act(step) == act(step)
        step.start_call("c")
        assert step.record_result("c", "r").content == "r"
        with pytest.raises(ResultMismatch):
            step.record_result("c", "other")
        (row,) = journal._engine.calls(step.step_id)
        assert row.state in ("started", "ready")
        assert len(journal._engine.results(step.step_id)) == 1

    sweep(before, act, again)


def test_a_tool_runs_at_most_once_however_its_execution_is_interrupted(journal, sweep):
    runs = []

    def again(step):
        ran_before = len(runs)
        try:
            result = step.execute(ToolUse("c", "f", {"a": 1}), lambda a: runs.append(a) or "out")
        except CallNotReady:
            result = step.record_result("c", "found out")
        assert len(runs) - ran_before <= 1
        assert step.execute(ToolUse("c", "f", {"a": 1}), runs.append) == result

    def act(step):
        runs.clear()
        step.execute(ToolUse("c", "f", {"a": 1}), lambda a: runs.append(a) or "out")

    def once(step):
        again(step)
        assert len(runs) <= 1

    sweep(sealed, act, once)


SIGNALS = """
import signal, sys, time
from holdfast.journal import StreamJournal
from holdfast.journal.engine.engine import SqliteEngine

class Tick(BaseException): pass
armed, ticks = False, 0

def handler(*_):
    global armed, ticks
    if armed:
        armed, ticks = False, ticks + 1
        raise Tick

def attempt(delta):
    global armed
    try:
        armed = True
        step.append_text(delta)
        armed = False
        return True
    except Tick:
        return False

path, retry = sys.argv[1], sys.argv[2] == "retry"
journal = StreamJournal(SqliteEngine.open(path, exclusive=True))
step, acked, count = journal.begin_step("m"), [], 0
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
while ticks < 3000:
    count += 1
    while not (landed := attempt(f"{count};")) and retry:
        pass
    if landed:
        acked.append(f"{count};")
signal.setitimer(signal.ITIMER_REAL, 0)
said = step.text
assert step.seal().text == said
found = [f"{number};" for number in said.split(";")[:-1]]
assert len(found) == len(set(found)), "double"
assert sorted(found, key=lambda delta: int(delta[:-1])) == found, "out of order"
assert set(acked) <= set(found), "lost"
assert not retry or found == acked, "gap"
events = list(journal._engine.events(step.step_id))
assert [event.seq for event in events] == list(range(1, len(found) + 1))
assert [event.content for event in events] == found
print(ticks)
"""


@pytest.mark.parametrize("then", ["retry", "move on"])
def test_a_handler_that_raises_thousands_of_times_leaves_no_gap_no_double_no_dead_handle(
    tmp_path, then
):
    done = subprocess.run(
        [sys.executable, "-c", SIGNALS, tmp_path / "a.db", then],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 3000
