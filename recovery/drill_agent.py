"""The agent that a drill kills: it opens the store, streams, thinks, calls tools, settles.

It says before each call what it is about to do, and behind it that the call has returned.  Both
lines go to the drill; a kill between them leaves exactly one call that may or may not be on record.
Everything it says is different from everything else, so whatever is lost or doubled shows.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.journal.errors import SessionBusy
from holdfast.recovery.acks import encode

if TYPE_CHECKING:
    from holdfast.session import Session
    from holdfast.step import SessionStep
    from holdfast.store import Store

T = TypeVar("T")


class Teller:
    """The agent's end of the pipe."""

    def __init__(self, fd: int, *, lies: bool = False) -> None:
        self._fd = fd
        self._lies = lies

    def mark(self, word: str) -> None:
        """Where the agent is."""
        self._write(encode("*", word))

    def make(self, kind: str, step_id: int, seq: int, data: Any, call: Callable[[], T]) -> T:
        """Make a call, and tell of it when it has returned.  A liar tells of it before."""
        self._write(encode("?", kind, step_id, seq, data))
        if self._lies:
            self._write(encode("!", kind, step_id, seq, data))
        made = call()
        if kind == "begin":
            step_id = made.step_id  # type: ignore[attr-defined]
        if not self._lies or kind == "begin":
            self._write(encode("!", kind, step_id, seq, data))
        return made

    def _write(self, line: bytes) -> None:
        while line:
            line = line[os.write(self._fd, line) :]


class Agent:
    """One life of an agent. `order` says what it does; see `Drill`."""

    def __init__(self, tell: Teller, order: dict[str, Any]) -> None:
        self._tell = tell
        self._order = order
        self._chance = random.Random(order["seed"])
        self._said = 0

    def live(self) -> None:
        """Open the store, go through it with several sessions at once, and never end."""
        import holdfast

        order = self._order
        self._tell.mark("opening")
        store = holdfast.open(order["path"], durability=order["durability"])
        self._tell.mark("open")
        for name in order["retire"]:
            self._make("delete", 0, 0, name, partial(store.delete_session, name))
        tracks = [self._track(store, name) for name in order["sessions"]]
        while True:
            next(self._chance.choice(tracks))

    def _track(self, store: Store, name: str) -> Iterator[None]:
        """One session, a call at a time."""
        if name in self._order["known"]:
            session = store.session(name)
        else:
            session = self._make("session", 0, 0, name, lambda: store.create_session(name))
        yield
        while True:
            words = self._piece("asks")
            self._make("user", 0, 0, [name, words], partial(session.add_user, words))
            yield
            yield from self._turn(session)

    def _turn(self, session: Session) -> Iterator[None]:
        chance = self._chance
        begun = self._make("begin", 0, 0, session.id, session.begin_step)
        step = _Step(self, begun)
        yield
        if chance.random() < 0.4:
            for _ in range(chance.randint(1, 4)):
                yield from step.event("thinking", self._piece("thinks"), begun.append_thinking)
            yield from step.event("signature", self._piece("signs"), begun.append_signature)
        for _ in range(chance.randint(0, 12)):
            yield from step.event("text", self._piece("says"), begun.append_text)
        calls = [f"call_{index}" for index in range(chance.choice((0, 0, 1, 3)))]
        for call_id in calls:
            yield from step.call(call_id, self._piece("argues"))
        end = chance.random()
        if end < 0.75:
            yield from step.event("done", None, lambda _: begun.append_done(stop_reason="stop"))
        elif end < 0.9:
            yield from step.event("error", self._piece("fails"), begun.append_error)
        if chance.random() < 0.1:
            yield from step.other("discard", None, begun.discard)
            return
        yield from step.other("seal", None, begun.seal)
        for call_id in chance.sample(calls, len(calls)):
            yield from step.answer(call_id, self._piece("answers"))
        yield from step.other("commit", None, begun.commit)

    def _piece(self, verb: str) -> str:
        """Something that nobody has said before, of any length, with quotes and other scripts."""
        self._said += 1
        pad = self._chance.choice(("", "", "x" * self._chance.randint(0, 300), '"é\n', "🙂日本"))
        return f"<{self._order['life']}.{self._said} {verb} {pad}>"

    def _make(self, kind: str, step_id: int, seq: int, data: Any, call: Callable[[], T]) -> T:
        return self._tell.make(kind, step_id, seq, data, partial(_when_free, call))


def _when_free(call: Callable[[], T]) -> T:
    """Another agent may be settling what a dead one has left in this session: wait for it."""
    while True:
        try:
            return call()
        except SessionBusy:
            time.sleep(0.001)


class _Step:
    def __init__(self, agent: Agent, step: SessionStep) -> None:
        self._agent, self._step = agent, step
        self._seq = 0

    def event(self, kind: str, data: Any, call: Callable[[Any], object]) -> Iterator[None]:
        self._seq += 1
        self._agent._make(kind, self._step.step_id, self._seq, data, lambda: call(data))
        yield

    def other(self, kind: str, data: Any, call: Callable[[], object]) -> Iterator[None]:
        self._agent._make(kind, self._step.step_id, self._seq, data, call)
        yield

    def call(self, call_id: str, words: str) -> Iterator[None]:
        step = self._step
        name = [call_id, "tool"]
        yield from self.event("call", name, lambda _: step.announce_call(call_id, "tool"))
        raw = json.dumps({"words": words})
        cut = len(raw) // 3
        for piece in (raw[:cut], raw[cut:]):
            yield from self.event("args", [call_id, piece], lambda data: step.append_args(*data))

    def answer(self, call_id: str, words: str) -> Iterator[None]:
        step = self._step
        yield from self.other("start", call_id, lambda: step.start_call(call_id))
        yield from self.other(
            "result", [call_id, words], lambda: step.record_result(call_id, words)
        )
