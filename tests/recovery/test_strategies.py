"""The strategies are held to what they say, and the machine to catching what it is for."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

import holdfast
from holdfast.journal.blocks import ToolResult, ToolUse
from holdfast.journal.messages import Message, message_from_json, message_to_json
from holdfast.journal.stream_journal import StreamJournal
from holdfast.recovery.faults import FaultDisk
from holdfast.recovery.pairing import normalize, validate
from holdfast.recovery.strategies import (
    Draft,
    JournalMachine,
    StreamOp,
    crash_points,
    event_streams,
    expected_blocks,
    faults,
    message_lists,
    messages,
    ready_calls,
    status_of,
    steps,
)

QUICK = settings(max_examples=30, suppress_health_check=list(HealthCheck))
# A fixed course for machines that must go red: found again in every run.
FOUND = settings(
    max_examples=300,
    stateful_step_count=30,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def exists(strategy, condition):
    return find(strategy, condition, settings=FOUND)


def test_only_this_module_needs_hypothesis():
    code = (
        "import sys, holdfast; holdfast.open; import holdfast.recovery, holdfast.recovery.faults;"
        "assert 'hypothesis' not in sys.modules; import holdfast.recovery.strategies;"
        "assert 'hypothesis' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- messages -----------------------------------------------------------------------------------


@given(messages())
@QUICK
def test_a_message_comes_back_equal_from_its_json(message):
    assert message_from_json(message_to_json(message)) == message


@given(messages(roles=["user"], calls=False))
@QUICK
def test_a_message_is_steered_by_role_and_calls(message):
    assert message.role == "user"
    assert not message.tool_calls and not message.tool_results


@given(message_lists(valid=True))
@QUICK
def test_a_valid_list_is_valid(made):
    assert validate(made).is_valid
    assert normalize(made) == made


def test_lists_of_every_sort_are_found():
    exists(message_lists(), lambda made: not validate(made).is_valid)
    exists(message_lists(valid=True), lambda made: sum(bool(m.tool_calls) for m in made) > 1)
    for kind in ("text", "image", "tool_use", "tool_result", "thinking", "opaque"):
        exists(messages(), lambda made, kind=kind: any(b.type == kind for b in made.content))


# --- streams ------------------------------------------------------------------------------------


@given(event_streams(), event_streams(cut=True))
@QUICK
def test_every_stream_is_legal_and_reads_as_expected(whole, part):
    with StreamJournal.open_in_memory() as journal:
        for events in (whole, part):
            step = journal.begin_step()
            for op in events:
                op.apply(step)
            message = step.seal()
            blocks = expected_blocks(events)
            assert message == (Message("assistant", blocks) if blocks else Message.assistant(""))
            assert [c.id for c in ready_calls(events)] == [c.id for c in message.tool_calls]
            assert step.discard() == len(events)


@given(st.data(), event_streams(ends=True))
@QUICK
def test_a_stream_ends_as_told(data, ended):
    assert status_of(ended) in ("complete", "errored")
    assert status_of(data.draw(event_streams(ends=False))) == "interrupted"
    assert not ready_calls(data.draw(event_streams(calls=False)))


def test_streams_of_every_sort_are_found():
    exists(event_streams(), lambda events: len(ready_calls(events)) == 3)
    exists(event_streams(cut=True), lambda events: events and status_of(events) == "interrupted")
    for method in ("append_signature", "append_opaque", "append_thinking", "append_error"):
        exists(event_streams(), lambda ops, method=method: any(op.method == method for op in ops))

    def drops(events):
        announced = [op for op in events if op.method == "announce_call"]
        return status_of(events) == "complete" and len(announced) > len(ready_calls(events))

    exists(event_streams(), drops)

    def interleaves(events):
        args = [op.args[0] for op in events if op.method == "append_args"]
        return any(args[i] == args[k] != args[i + 1] for k in range(len(args)) for i in range(k))

    exists(event_streams(), interleaves)


@given(st.lists(steps(), max_size=3))
@QUICK
def test_a_plan_can_be_carried_out_and_leaves_what_it_says(tmp_path_factory, plans):
    path = tmp_path_factory.mktemp("plan") / "a.db"
    expected = []
    for plan in plans:
        with holdfast.open(path) as store:
            session = store.session("s") if store.sessions() else store.create_session("s")
            plan.apply(session.begin_step())
        draft = Draft(list(plan.events), sealed=True)
        for op in plan.after:
            if op.method == "start_call":
                draft.started[op.args[0]] = op.options["replay"]
            elif op.method == "record_result":
                draft.results[op.args[0]] = ToolResult(*op.args, **op.options)
        if plan.ending != "discard":
            expected += draft.entries()
        with holdfast.open(path) as store:
            entries = store.session("s").history.entries()
            assert [(entry.message, entry.status) for entry in entries] == expected


# --- faults and crashes -------------------------------------------------------------------------


@given(faults())
@QUICK
def test_every_fault_is_one_that_a_disk_can_have(fault):
    with FaultDisk() as disk:
        disk.fail(**fault)


@given(faults(kinds=["sync"], nth_max=3))
@QUICK
def test_faults_are_steered_by_kind_and_number(fault):
    assert fault["kind"] == "sync" and fault["nth"] <= 3


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    with FaultDisk() as disk:
        path = tmp_path_factory.mktemp("disk") / "a.db"
        with holdfast.open(path, vfs=disk.name) as store:
            store.create_session("s").add_user("hello")
        yield disk


@given(data=st.data())
@QUICK
def test_every_crash_leaves_an_image_that_opens(disk, tmp_path_factory, data):
    of = data.draw(st.sampled_from([disk, disk.ops, len(disk.ops)]))
    point = data.draw(crash_points(of))
    with holdfast.open(point.image(disk, tmp_path_factory.mktemp("image"))) as store:
        assert [info.entries for info in store.sessions()] in ([], [0], [1])


def test_a_crash_is_steered_by_start_and_loss(disk):
    last = len(disk.ops)
    point = exists(crash_points(disk, start=last, losses=["power"]), lambda _: True)
    assert (point.at, point.loss) == (last, "power")
    exists(crash_points(disk), lambda point: str(point.keep).startswith("drop:"))


# --- the machine --------------------------------------------------------------------------------

TestJournalMachine = JournalMachine.TestCase
TestJournalMachine.settings = settings(
    max_examples=25, stateful_step_count=30, suppress_health_check=list(HealthCheck)
)


class Shop(JournalMachine):
    """An agent with a rule of its own: whole turns, by the `with` block and `execute`."""

    turns = 0

    @precondition(lambda self: self.step is None)
    @rule(quantity=st.integers(0, 9))
    def order(self, quantity):
        with self.acting():
            step, self.draft = self.session.begin_step(), Draft()
            self.step = step
        with step:
            for op in (
                StreamOp("append_text", ("one moment",)),
                StreamOp("announce_call", ("call_0", "order")),
                StreamOp("append_args", ("call_0", f'{{"quantity": {quantity}}}')),
                StreamOp("append_done"),
            ):
                self.tell(op)
            call = step.seal().tool_calls[0]
            self.draft.results["call_0"] = step.execute(call, lambda quantity: str(quantity))
        self.model = self.model + self.draft.entries()
        self.step = self.draft = None
        Shop.turns += 1


def test_a_machine_with_rules_of_an_own_agent_runs():
    run_state_machine_as_test(Shop, settings=settings(FOUND, max_examples=15))
    assert Shop.turns


def test_the_machine_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_state_machine_as_test(JournalMachine, settings=settings(FOUND, max_examples=3))
    assert list(Path(tmp_path).iterdir()) == []


class ForgetsTheSync(JournalMachine):
    """Takes a delta for safe from a power loss, and does not sync it."""

    def open_store(self, path, vfs):
        return holdfast.open(path, vfs=vfs, durability="barrier")

    @precondition(lambda self: self.draft == Draft())
    @rule()
    def lose_power(self):
        self.tell(StreamOp("append_text", ("shown",)))
        self.crash(back=0, loss="power", way=0)


class ShowsBeforeItWrites(JournalMachine):
    """Counts a delta as acknowledged that the store never got."""

    @precondition(lambda self: self.draft == Draft())
    @rule()
    def show(self):
        self.draft.events.append(StreamOp("append_text", ("shown",)))


class LosesTheUnfinished(JournalMachine):
    """Throws away on recovery what was shown."""

    def open_store(self, path, vfs):
        policy = holdfast.RecoveryPolicy(incomplete="discard")
        return holdfast.open(path, vfs=vfs, durability="power", policy=policy)


class WritesTwice(JournalMachine):
    """An agent that adds its message again because it does not look whether it landed."""

    @precondition(lambda self: self.step is None)
    @rule()
    def add_twice(self):
        with self.acting():
            self.session.add_user("hello")
            self.session.add_user("hello")
            self.model = [*self.model, (Message.user("hello"), "complete")]


class LeavesCallsOpen(JournalMachine):
    """The history it reads is not repaired: a call that dangles stays so."""

    @precondition(lambda self: self.step is None)
    @rule()
    def add_dangling(self):
        self.session.messages = lambda: [Message("assistant", [ToolUse("a", "f", {})])]


@pytest.mark.parametrize(
    "wrong",
    [ForgetsTheSync, ShowsBeforeItWrites, LosesTheUnfinished, WritesTwice, LeavesCallsOpen],
    ids=lambda wrong: wrong.__name__,
)
def test_the_machine_catches_a_wrong_agent_or_store(wrong):
    with pytest.raises(AssertionError):
        run_state_machine_as_test(wrong, settings=FOUND)
