"""Workloads for `explore`: small agents that go through everything a store does.

Each is called as `workload(path, vfs, ack)` and tells every call of ours, before and behind it;
`workload.at("power")` is the same one at another level.  What they say is of odd lengths, so that
rows and pages do not end in the same places.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from holdfast.journal.engine import core, log, schema, steps
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.journal.engine.rows import NewSession
from holdfast.recovery.faults import FaultDisk, Snapshot

if TYPE_CHECKING:
    from holdfast.session import Session
    from holdfast.step import SessionStep
    from holdfast.store import Store

__all__ = ["Tell", "WORKLOADS", "Workload", "small_log"]

T = TypeVar("T")
Left = tuple[Snapshot, list[tuple[str, int, int, Any]]]  # files, and what was told of them


class Tell(Protocol):
    """How a workload tells what it was told: called behind each call, `begin` before it."""

    def __call__(self, kind: str, step_id: int, seq: int, data: Any = None) -> None:
        """A call has returned."""

    def begin(self) -> None:
        """A call is about to be made."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload that ships, at one level."""

    name: str
    run: Callable[[Agent], None]
    durability: str = "barrier"
    prepare: Callable[[Path, Tell], None] | None = None

    def at(self, durability: str) -> Workload:
        """The same workload at another level."""
        return replace(self, durability=durability)

    def __call__(self, path: Path, vfs: str, ack: Tell) -> None:
        """Run once on the disk `vfs`."""
        if self.prepare is not None:
            self.prepare(path, ack)
        self.run(Agent(path, vfs, ack, self.durability))


class Agent:
    """Makes the calls, and tells of each."""

    def __init__(self, path: Path, vfs: str, ack: Tell, durability: str) -> None:
        self._path, self._vfs, self._ack, self._durability = path, vfs, ack, durability

    def open(self) -> Store:
        """Open the store on the disk under test."""
        import holdfast

        return holdfast.open(self._path, vfs=self._vfs, durability=self._durability)

    def make(self, call: Callable[[], T]) -> T:
        """Make a call; whoever makes it tells of it."""
        self._ack.begin()
        return call()

    def create(self, store: Store, name: str) -> Session:
        """Make a session."""
        session = self.make(lambda: store.create_session(name))
        self._ack("session", 0, 0, name)
        return session

    def session(self, store: Store, name: str) -> Session:
        """Look a session up, which changes nothing."""
        return store.session(name)

    def user(self, session: Session, text: str) -> None:
        """The user says something."""
        entry = self.make(lambda: session.add_user(text))
        self._ack("user", 0, int(entry), (session.id, text))

    def begin(self, session: Session) -> Step:
        """The assistant's turn."""
        step = self.make(session.begin_step)
        self._ack("begin", step.step_id, 0, session.id)
        return Step(self, step)

    def tell(self, kind: str, step_id: int, seq: int, data: Any) -> None:
        """A call has returned."""
        self._ack(kind, step_id, seq, data)

    def turn(self, session: Session, words: int, *, commit: bool = True) -> Step:
        """A plain turn: a few words, and done."""
        step = self.begin(session)
        for index in range(words):
            step.text(f"{session.id} {step.id}.{index} " + "x" * (7 * index % 50))
        step.done()
        if commit:
            step.commit()
        return step


class Step:
    """A step under test."""

    def __init__(self, agent: Agent, step: SessionStep) -> None:
        self._agent, self._step = agent, step
        self._seq = 0
        self.id = step.step_id

    def text(self, piece: str) -> None:
        """A piece of the answer."""
        self._event("text", piece, lambda: self._step.append_text(piece))

    def thinking(self, piece: str, signature: str | None = None) -> None:
        """A piece of a thought, and its signature if it ends here."""
        self._event("thinking", piece, lambda: self._step.append_thinking(piece))
        if signature is not None:
            sign = signature
            self._event("signature", sign, lambda: self._step.append_signature(sign))

    def call(self, call_id: str, *fragments: str) -> None:
        """A call and the pieces of its arguments."""
        self._event("call", (call_id, "tool"), lambda: self._step.announce_call(call_id, "tool"))
        for piece in fragments:
            self._args(call_id, piece)

    def _args(self, call_id: str, piece: str) -> None:
        self._event("args", (call_id, piece), lambda: self._step.append_args(call_id, piece))

    def done(self) -> None:
        """The stream ends well."""
        self._event("done", None, self._step.append_done)

    def error(self, words: str) -> None:
        """The stream ends badly."""
        self._event("error", words, lambda: self._step.append_error(words))

    def seal(self) -> None:
        """Close the stream."""
        self._other("seal", None, self._step.seal)

    def start(self, call_id: str) -> None:
        """A tool is about to run."""
        self._other("start", call_id, lambda: self._step.start_call(call_id))

    def result(self, call_id: str, content: str) -> None:
        """A tool has answered."""
        answer = (call_id, content)
        self._other("result", answer, lambda: self._step.record_result(call_id, content))

    def commit(self) -> None:
        """Into history; sealing is a commit of its own that no caller is told of."""
        self.seal()
        self._other("commit", None, self._step.commit)

    def discard(self) -> None:
        """Forget it."""
        self._other("discard", None, self._step.discard)

    def _event(self, kind: str, data: Any, call: Callable[[], object]) -> None:
        self._agent.make(call)
        self._seq += 1
        self._agent.tell(kind, self.id, self._seq, data)

    def _other(self, kind: str, data: Any, call: Callable[[], object]) -> None:
        self._agent.make(call)
        self._agent.tell(kind, self.id, self._seq, data)


@contextmanager
def _changed(values: Mapping[str, Any], *modules: Any) -> Iterator[None]:
    """Other values for names of modules, as far as each has them."""
    old = [(m, name, getattr(m, name)) for m in modules for name in values if hasattr(m, name)]
    try:
        for module, name, _ in old:
            setattr(module, name, values[name])
        yield
    finally:
        for module, name, value in old:
            setattr(module, name, value)


@contextmanager
def small_log(*, tidy: int = 12, look: int = 6, cap: int = 24) -> Iterator[None]:
    """Let a log of a few pages count as a long one: it is emptied in the middle of a short test."""
    limits = {"LOG_TIDY_PAGES": tidy, "LOG_LOOK_PAGES": look, "LOG_CAP_PAGES": cap}
    with _changed(limits, log, core, steps):
        yield


# --- the workloads -------------------------------------------------------------------------------


def _one_stream(agent: Agent) -> None:
    with agent.open() as store:
        session = agent.create(store, "s")
        agent.user(session, "tell me a story")
        agent.turn(session, 6)
        agent.user(session, "and another")
        agent.turn(session, 4, commit=False)


def _tools(agent: Agent) -> None:
    with agent.open() as store:
        session = agent.create(store, "s")
        agent.user(session, "what is the weather?")
        step = agent.begin(session)
        step.thinking("let me ")
        step.thinking("think", "signed")
        step.text("I will look. ")
        step.call("a", '{"city": ', '"Oslo"}')
        step.call("b", "{}")
        step.call("c", '{"x": 1}')
        step.call("torn", '{"x": ')
        step.done()
        step.seal()
        step.start("a")
        step.start("b")
        step.result("a", "rain " * 9)  # b stays started, c never was, the fourth cannot run


def _tools_answered(agent: Agent) -> None:
    with agent.open() as store:
        session = agent.create(store, "s")
        agent.user(session, "look twice")
        step = agent.begin(session)
        step.call("a", '{"n": 1}')
        step.call("b")
        step.done()
        step.seal()
        for call_id in ("b", "a"):
            step.start(call_id)
            step.result(call_id, f"answer of {call_id}")
        step.commit()
        agent.turn(session, 2)


def _interleaved(agent: Agent) -> None:
    with agent.open() as store:
        sessions = [agent.create(store, name) for name in ("a", "b", "c")]
        running = []
        for session in sessions:
            agent.user(session, f"question of {session.id}")
            running.append(agent.begin(session))
        for index in range(4):
            for step in running:
                step.text(f"{step.id}:{index} ")
        running[0].done()
        running[0].commit()
        running[1].error("connection reset")
        running[1].commit()
        running[2].text("the last word")
        agent.turn(sessions[0], 2)


def _commit_and_prune(agent: Agent) -> None:
    with agent.open() as store:
        session = agent.create(store, "s")
        for index in range(4):
            agent.user(session, f"question {index}")
            step = agent.turn(session, 3, commit=False)
            if index == 2:
                step.discard()
            else:
                step.commit()
        other = agent.create(store, "gone")
        agent.turn(other, 2)
        agent.make(lambda: store.delete_session("gone"))
        agent.tell("delete", 0, 0, "gone")


class _Notes:
    """Keeps what is told, to be told again."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, int, Any]] = []

    def __call__(self, kind: str, step_id: int, seq: int, data: Any = None) -> None:
        self.told.append((kind, step_id, seq, data))

    def begin(self) -> None:
        pass


@cache
def _every_class() -> Left:
    """A file as a kill leaves it, with a step of each class unfinished in it."""
    notes = _Notes()
    with tempfile.TemporaryDirectory() as folder, FaultDisk() as disk:
        agent = Agent(Path(folder, "store.db"), disk.name, notes, "power")
        with agent.open() as store:
            complete, errored, cut, sealed, empty = [
                agent.create(store, name) for name in ("complete", "errored", "cut", "tools", "e")
            ]
            agent.turn(complete, 2, commit=False)
            step = agent.begin(errored)
            step.text("so far")
            step.error("overloaded")
            step = agent.begin(cut)
            step.thinking("hm")
            step.text("cut o")
            step = agent.begin(sealed)
            for call_id in ("a", "b", "c"):
                step.call(call_id, '{"n": 2}')
            step.done()
            step.seal()
            step.start("a")
            step.start("b")
            step.result("b", "done")
            agent.begin(empty)
            return disk.snapshot(len(disk.ops)), notes.told


def _leave(left: Callable[[], Left], path: Path, ack: Tell) -> None:
    """Put files at a path, and tell what they hold."""
    snapshot, told = left()
    files = {name.replace("store.db", path.name): data for name, data in snapshot.files.items()}
    Snapshot(files, snapshot.digest).write(path.parent)
    for one in told:
        ack.begin()
        ack(*one)


def _recovery(agent: Agent) -> None:
    with agent.open() as store:
        agent.turn(agent.session(store, "cut"), 2)
        agent.user(agent.session(store, "tools"), "what happened?")


def _checkpoints(agent: Agent) -> None:
    with small_log(), agent.open() as store:
        session = agent.create(store, "s")
        agent.turn(session, 3)
        step = agent.begin(session)
        for index in range(14):
            step.text(f"{index} " * (9 + 5 * index))
        step.done()
        step.commit()
        agent.turn(session, 3, commit=False)


@cache
def _old_file() -> Left:
    """A file of format 1, whose owner died with steps open in it."""
    notes = _Notes()
    format_1 = _changed({"FORMAT": 1, "MIGRATIONS": schema.MIGRATIONS[:1]}, schema)
    with tempfile.TemporaryDirectory() as folder, FaultDisk() as disk, format_1:
        engine = SqliteEngine.open(Path(folder, "store.db"), vfs=disk.name, durability="power")
        try:
            for name in ("old", "older"):
                engine.create_session(NewSession(name, 0, None, None, None, "{}"))
                notes("session", 0, 0, name)
                step_id = engine.begin_step(
                    session=name, kind="step", model_name=None, nonce=f"nonce of {name}"
                )
                assert isinstance(step_id, int)
                notes("begin", step_id, 0, name)
                for seq in range(1, 4):
                    piece = f"kept from {name} {seq} "
                    engine.append(step_id << schema.SEQ_BITS | seq, "text_delta", None, piece)
                    notes("text", step_id, seq, piece)
            return disk.snapshot(len(disk.ops)), notes.told
        finally:
            engine.close()


def _migration(agent: Agent) -> None:
    with agent.open() as store:
        agent.turn(agent.session(store, "old"), 2)
        agent.user(agent.create(store, "new"), "hello")


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("one-stream", _one_stream),
        Workload("tools", _tools),
        Workload("tools-answered", _tools_answered),
        Workload("interleaved", _interleaved),
        Workload("commit-and-prune", _commit_and_prune),
        Workload("recovery", _recovery, prepare=partial(_leave, _every_class)),
        Workload("checkpoints", _checkpoints),
        Workload("migration", _migration, prepare=partial(_leave, _old_file)),
    )
}
