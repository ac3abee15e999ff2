"""Hypothesis for agents: strategies for values, and a machine that drives a real store with them.

    @given(strategies.event_streams(cut=True))
    def test_my_screen_shows_what_is_on_record(events): ...

    class MyAgent(strategies.JournalMachine):
        @rule()
        def greet(self): ...                           # what an own agent does besides

    TestMyAgent = MyAgent.TestCase

Hypothesis is needed here (`holdfast[test]`) and nowhere else in the product.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast.journal.blocks import OutputStatus, ToolResult
from holdfast.journal.errors import StepBusy, StepClosed, StoreClosed, UnansweredCalls
from holdfast.journal.messages import Message
from holdfast.recovery.faults import FaultDisk
from holdfast.recovery.generators import (
    CALL_IDS,
    CrashPoint,
    StepPlan,
    StreamOp,
    arguments,
    crash_points,
    deltas,
    event_streams,
    expected_blocks,
    faults,
    json_objects,
    message_lists,
    messages,
    ready_calls,
    status_of,
    steps,
    terminals,
)
from holdfast.recovery.images import Loss
from holdfast.recovery.pairing import validate
from holdfast.recovery.validation import IN_DOUBT_SAFE_TEXT, IN_DOUBT_TEXT, NOT_STARTED_TEXT

if TYPE_CHECKING:
    from holdfast.session import Session
    from holdfast.step import SessionStep
    from holdfast.store import Store

__all__ = [
    "CrashPoint",
    "JournalMachine",
    "StepPlan",
    "StreamOp",
    "crash_points",
    "event_streams",
    "expected_blocks",
    "faults",
    "json_objects",
    "message_lists",
    "messages",
    "ready_calls",
    "status_of",
    "steps",
]

Entries = list[tuple[Message, str]]  # a message and the status of its entry


@dataclass
class Draft:
    """What was acknowledged of the step that is open."""

    events: list[StreamOp] = field(default_factory=list)
    sealed: bool = False
    started: dict[str, str] = field(default_factory=dict)  # call id: how it replays
    results: dict[str, ToolResult] = field(default_factory=dict)

    def copy(self) -> Draft:
        """The same, to be kept as it is now."""
        return replace(
            self,
            events=list(self.events),
            started=dict(self.started),
            results=dict(self.results),
        )

    def entries(self) -> Entries:
        """What it is in history once it is settled, by commit or by recovery."""
        blocks, status = expected_blocks(self.events), status_of(self.events)
        if not blocks:
            return []
        outputs = [self._output(call.id) for call in ready_calls(self.events)]
        both = [Message("assistant", blocks)] + ([Message("user", outputs)] if outputs else [])
        return [(message, status) for message in both]

    def _output(self, call_id: str) -> ToolResult:
        if call_id in self.results:
            return self.results[call_id]
        if call_id not in self.started:
            status = OutputStatus.CANCELED
            return ToolResult(call_id, NOT_STARTED_TEXT, True, status, "canceled")
        text = IN_DOUBT_SAFE_TEXT if self.started[call_id] == "safe" else IN_DOUBT_TEXT
        return ToolResult(call_id, text, True, OutputStatus.FAILED, "in_doubt")


def _streaming(machine: JournalMachine) -> bool:
    draft = machine.draft
    return draft is not None and not draft.sealed and status_of(draft.events) == "interrupted"


def _has_calls(machine: JournalMachine) -> bool:
    draft = machine.draft
    return draft is not None and draft.sealed and bool(ready_calls(draft.events))


def _is_announced(machine: JournalMachine) -> bool:
    return _streaming(machine) and bool(machine.announced())


class JournalMachine(RuleBasedStateMachine):
    """Whatever an agent does and wherever it dies, its history equals a Python list.

    A real store on a `FaultDisk`, whose crashes are part of the play.  For own rules there are
    `store`, `session`, `step` (None: no step is open), `model` (the entries there should be) and
    `draft` (the step as far as it was acknowledged).  A rule makes each call that writes in a
    `with self.acting():` of its own and changes `model` or `draft` in the same block, as `tell`
    does: then a crash may fall into its middle, and the state before it or after it is accepted.
    Override `open_store` for other options; these are at durability "power", where no crash may
    take what was acknowledged.
    """

    store: Store
    session: Session

    def __init__(self) -> None:
        super().__init__()
        self.step: SessionStep | None = None
        self.draft: Draft | None = None
        self.model: Entries = []
        self._root = Path(tempfile.mkdtemp(prefix="holdfast-machine-"))
        self._lives = 0
        self._begin_life(self._next_folder() / "agent.db")
        self.session = self.store.create_session("agent")
        self._last_act = self._now()

    def open_store(self, path: Path, vfs: str) -> Store:
        """Open the store for one life of the agent."""
        import holdfast

        return holdfast.open(path, vfs=vfs, durability="power")

    @contextmanager
    def acting(self) -> Iterator[None]:
        """What is written in this block counts as one act, which a crash may cut short."""
        before = self._now()
        yield
        self._last_act = (*before[:3], len(self.disk.ops))

    def tell(self, event: StreamOp) -> None:
        """Put one event into the open step, and into the draft."""
        step, draft = self._open_step()
        with self.acting():
            event.apply(step)
            draft.events.append(event)

    def announced(self) -> list[str]:
        """The ids of the calls of the open step, in order."""
        events = self.draft.events if self.draft else []
        return [op.args[0] for op in events if op.method == "announce_call"]

    # --- rules ----------------------------------------------------------------------------------

    @precondition(lambda self: self.step is None)
    @rule()
    def begin(self) -> None:
        """Begin a step."""
        with self.acting():
            self.step, self.draft = self.session.begin_step(), Draft()

    @precondition(_streaming)
    @rule(event=deltas())
    def append(self, event: StreamOp) -> None:
        """A piece of text, of thinking, a signature, an opaque item."""
        self.tell(event)

    @precondition(_streaming)
    @rule(call_id=st.sampled_from(CALL_IDS))
    def announce(self, call_id: str) -> None:
        """A call, whose id may have been used in an earlier step."""
        if call_id not in self.announced():
            self.tell(StreamOp("announce_call", (call_id, "search")))

    @precondition(_is_announced)
    @rule(data=st.data(), fragments=arguments())
    def args(self, data: st.DataObject, fragments: list[str]) -> None:
        """Arguments of a call in fragments; twice for one call, and they are no JSON."""
        call_id = data.draw(st.sampled_from(self.announced()))
        for fragment in fragments:
            self.tell(StreamOp("append_args", (call_id, fragment)))

    @precondition(_streaming)
    @rule(event=terminals())
    def done(self, event: StreamOp) -> None:
        """The stream ends, well or in an error."""
        self.tell(event)

    @precondition(lambda self: self.step is not None)
    @rule()
    def seal(self) -> None:
        """Seal, once or again: the message is the one that the events tell."""
        step, draft = self._open_step()
        with self.acting():
            message = step.seal()
            draft.sealed = True
        blocks = expected_blocks(draft.events)
        assert message == (Message("assistant", blocks) if blocks else Message.assistant(""))
        ready = {call.id for call in ready_calls(draft.events)}
        assert step.dropped_calls == tuple(c for c in self.announced() if c not in ready)

    @precondition(_has_calls)
    @rule(data=st.data(), replay=st.sampled_from(["never", "safe"]))
    def start(self, data: st.DataObject, replay: str) -> None:
        """A tool is about to run. The first start stands, and none comes after a result."""
        step, draft = self._open_step()
        call = data.draw(st.sampled_from(ready_calls(draft.events)))
        with self.acting():
            step.start_call(call.id, replay=replay)
            if call.id not in draft.results:
                draft.started.setdefault(call.id, replay)

    @precondition(_has_calls)
    @rule(data=st.data(), output=st.text(max_size=8), is_error=st.booleans())
    def result(self, data: st.DataObject, output: str, is_error: bool) -> None:
        """A tool has given something back; the same again is no news."""
        step, draft = self._open_step()
        call = data.draw(st.sampled_from(ready_calls(draft.events)))
        known = draft.results.get(call.id)
        if known is not None:
            output, is_error = str(known.content), known.is_error
        with self.acting():
            draft.results[call.id] = step.record_result(call.id, output, is_error=is_error)
        assert draft.results[call.id] == ToolResult(call.id, output, is_error=is_error)

    @precondition(lambda self: self.step is not None)
    @rule()
    def commit(self) -> None:
        """Into history with it; refused while a call has no result."""
        step, draft = self._open_step()
        unanswered = [c for c in ready_calls(draft.events) if c.id not in draft.results]
        with self.acting():
            if unanswered:
                _refused(UnansweredCalls, step.commit)
                draft.sealed = True
                return
            ids = step.commit()
            self.model = self.model + draft.entries()
            self.step = self.draft = None
        assert ids == list(range(len(self.model) - len(draft.entries()), len(self.model)))

    @precondition(lambda self: self.step is not None)
    @rule()
    def discard(self) -> None:
        """Nothing of the step is left."""
        step, draft = self._open_step()
        with self.acting():
            removed = step.discard()
            self.step = self.draft = None
        assert removed == len(draft.events)

    @rule(message=messages(calls=False))
    def add(self, message: Message) -> None:
        """A message from elsewhere; refused while a step is open."""
        if self.step is not None:
            _refused(StepBusy, self.session.add, message)
            return
        with self.acting():
            self.session.add(message)
            self.model = [*self.model, (message, "complete")]

    @precondition(lambda self: self.step is not None and not _streaming(self))
    @rule(event=deltas())
    def append_too_late(self, event: StreamOp) -> None:
        """After its end a stream takes nothing."""
        _refused(StepClosed, event.apply, self.step)

    @rule()
    def reopen(self) -> None:
        """Close and open again; what was unfinished is settled."""
        before = self._now()
        self.store.close()
        if self.step is not None:
            _refused(StoreClosed, self.step.append_text, "x")
        self.store = self.open_store(self._path, self.disk.name)
        self._resume([before])

    # What is drawn must not depend on how many operations there were: that may differ a little from
    # run to run, and Hypothesis repeats what it draws.
    @rule(
        back=st.just(0) | st.integers(0, 12),
        loss=st.sampled_from(["kill", "power"]),
        way=st.just(0) | st.integers(0, 30),
    )
    def crash(self, back: int, loss: Loss, way: int) -> None:
        """The process is killed or the power goes, after the last act or in the midst of it."""
        now, act = self._now(), self._last_act
        written = now[0]
        at = max(written - back, act[0]) if act[3] == written else written
        ways = self.disk.strategies(at) if loss == "power" else ["none"]
        image = self.disk.image(at, self._next_folder(), loss=loss, keep=ways[way % len(ways)])
        self._end_life()
        self._begin_life(image)
        self._resume([now] if at == written else [act, now])

    # --- what always holds ----------------------------------------------------------------------

    @invariant()
    def history_equals_the_model(self) -> None:
        """Every entry is there once, in order, with its status; no other is."""
        assert self._history() == self.model
        assert len(self.session.history) == len(self.model)

    @invariant()
    def the_session_is_legal_to_send(self) -> None:
        """Every call in it has its one output, where providers want it."""
        assert validate(self.session.messages()).is_valid

    @invariant()
    def the_step_shows_what_was_acknowledged(self) -> None:
        """Its text so far is all that was given to it."""
        if self.step is not None and self.draft is not None:
            told = [op.args[0] for op in self.draft.events if op.method == "append_text"]
            assert self.step.text == "".join(told)

    def teardown(self) -> None:
        """Close the store and remove its files."""
        try:
            self._end_life()
        finally:
            shutil.rmtree(self._root, ignore_errors=True)

    # --- inside ---------------------------------------------------------------------------------

    def _open_step(self) -> tuple[SessionStep, Draft]:
        assert self.step is not None and self.draft is not None
        return self.step, self.draft

    def _history(self) -> Entries:
        return [(entry.message, entry.status) for entry in self.session.history.entries()]

    def _now(self) -> tuple[int, Entries, Draft | None, int]:
        """Where the disk stands, and what should be found if the world ended here."""
        at = len(self.disk.ops)
        return at, list(self.model), self.draft.copy() if self.draft else None, at

    def _resume(self, possible: list[tuple[int, Entries, Draft | None, int]]) -> None:
        """Go on after a crash: what is found must be one of the possible states, settled."""
        self.step = self.draft = None
        self.session = self.store.session("agent")
        settled = [model + (draft.entries() if draft else []) for _, model, draft, _ in possible]
        found = self._history()
        assert found in settled
        self.model = found
        assert self.store.stats().journal_events == 0
        self._last_act = self._now()

    def _next_folder(self) -> Path:
        self._lives += 1
        folder = self._root / str(self._lives)
        folder.mkdir()
        return folder

    def _begin_life(self, path: Path) -> None:
        self._path, self.disk = path, FaultDisk(seed=self._lives)
        self.store = self.open_store(path, self.disk.name)

    def _end_life(self) -> None:
        self.store.close()
        self.disk.close()


def _refused(error: type[Exception], act: Callable[..., Any], *args: Any) -> None:
    try:
        act(*args)
    except error:
        return
    raise AssertionError(f"{getattr(act, '__name__', act)} was not refused: no {error.__name__}")
