"""What a workload was told, and the state that a store must be in because of it.

The model is the dumbest thing that can be right: it applies one acknowledgement after the other.

    kind                          data
    session, delete               session id
    user, system                  (session id, text), or the text
    begin                         session id
    text, thinking, signature     the piece, as given
    call                          (call id, name)
    args                          (call id, fragment)
    done, error                   anything
    seal, commit, discard         -
    start                         call id
    result                        (call id, content), or (call id, content, is_error)

The names of the methods (`append_text`, `start_call` ...) and of the events (`text_delta` ...) mean
the same.  A workload that tells neither sessions nor begun steps is held to what it does tell.
Other kinds are the workload's own and are not judged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["Ack", "Acks", "KINDS", "State", "StepTold", "Told", "parts_told", "promised_of"]

SAME: Mapping[str, str] = {
    "create_session": "session",
    "delete_session": "delete",
    "add_user": "user",
    "add_system": "system",
    "begin_step": "begin",
    "append": "text",
    "delta": "text",
    "append_text": "text",
    "text_delta": "text",
    "append_thinking": "thinking",
    "thinking_delta": "thinking",
    "append_signature": "signature",
    "announce_call": "call",
    "append_args": "args",
    "args_delta": "args",
    "append_done": "done",
    "append_error": "error",
    "start_call": "start",
    "record_result": "result",
}
DELTAS = frozenset(("text", "thinking", "signature", "opaque", "call", "args", "done", "error"))
_BARRIERS = frozenset(
    "session delete user system begin seal start result record_process commit discard".split()
)
KINDS = DELTAS | _BARRIERS


class Ack(NamedTuple):
    """One call that has returned."""

    kind: str
    step_id: int
    seq: int
    data: Any = None

    @property
    def sort(self) -> str:
        """The kind by its one name."""
        return SAME.get(self.kind, self.kind)

    @property
    def words(self) -> str:
        """The acknowledgement as reports print it."""
        place = f" in step {self.step_id}" if self.step_id else ""
        return f"{self.sort} {self.data!r}{place}"


class Acks(Sequence[Ack]):
    """The calls that had returned when the crash came.

    `promised`: how many of them the loss cannot take.  `begun`: those and what was under way.
    """

    def __init__(
        self, acked: Iterable[Ack], promised: int | None = None, under_way: Iterable[Ack] = ()
    ) -> None:
        self._acked = list(acked)
        self.promised = len(self._acked) if promised is None else promised
        self.begun = [*self._acked, *under_way]

    def __len__(self) -> int:
        return len(self._acked)

    def __getitem__(self, index: Any) -> Any:
        return self._acked[index]


def promised_of(acked: Sequence[Ack], *, loss: str, durability: str) -> int:
    """How many of these calls a loss cannot take, at a level."""
    if loss == "kill" or durability == "power":
        return len(acked)
    if durability == "process":
        return 0
    barriers = [index for index, ack in enumerate(acked, 1) if ack.sort in _BARRIERS]
    return barriers[-1] if barriers else 0


# The state of a store: sessions with their items in order, and steps without a session.
State = tuple[Any, ...]


@dataclass(slots=True)
class StepTold:
    """A step as its acknowledgements tell it."""

    session: str | None
    events: list[tuple[str, Any]] = field(default_factory=list)
    started: set[str] = field(default_factory=set)
    results: dict[str, tuple[Any, bool]] = field(default_factory=dict)

    def settled(self, step_id: int) -> tuple[Any, ...] | None:
        """The step as history has it, or None if it had no content."""
        status = "interrupted"
        parts: list[list[Any]] = []
        calls: dict[str, list[Any]] = {}
        for kind, data in self.events:
            if kind in ("done", "error"):
                status = "complete" if kind == "done" else "errored"
            elif kind == "signature" and parts:
                parts[-1][2] = (parts[-1][2] or "") + data
            elif kind == "call":
                calls[data[0]] = ["tool_use", data[0], None, data[1], ""]
                parts.append(calls[data[0]])
            elif kind == "args":
                calls[data[0]][4] += data[1]
            elif kind == "opaque":
                parts.append([kind, plain(json.loads(data)), None])
            elif parts and parts[-1][0] == kind and parts[-1][2] is None:
                parts[-1][1] += data
            else:
                parts.append([kind, data, None])
        blocks = [block for part in parts if (block := _told_block(part, status)) is not None]
        results = [self._output(block[1]) for block in blocks if block[0] == "tool_use"]
        return ("step", step_id, status, tuple(blocks), tuple(results)) if blocks else None

    def _output(self, call_id: str) -> tuple[Any, ...]:
        if call_id in self.results:
            content, is_error = self.results[call_id]
            return call_id, plain(content), is_error, None
        return call_id, "", True, "in_doubt" if call_id in self.started else "canceled"


def _told_block(part: list[Any], status: str) -> tuple[Any, ...] | None:
    if part[0] != "tool_use":
        return (part[0], part[1], part[2]) if part[1] or part[2] else None
    _, call_id, signature, name, raw = part
    try:
        arguments = json.loads(raw or ("{}" if status == "complete" else ""))
    except ValueError:
        return None
    if not isinstance(arguments, dict):
        return None
    return "tool_use", call_id, signature, name, plain(arguments)


def plain(value: Any) -> str:
    """Content or arguments in one form, to be compared."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        value = [getattr(item, "model_dump", lambda i=item: i)() for item in value]
    return json.dumps(value, sort_keys=True)


class Told:
    """The model: applies one acknowledgement after the other."""

    def __init__(self, kinds: Iterable[str]) -> None:
        self.kinds = frozenset(kinds)
        # Whoever tells sessions and steps is held to every message and its place.
        self.whole = {"session", "begin"} <= self.kinds
        self._sessions: dict[str, list[Any]] = {}
        self._open: dict[str, int] = {}
        self._steps: dict[int, StepTold] = {}

    def apply(self, ack: Ack) -> None:
        """One more call has returned."""
        kind, step_id, data = ack.sort, ack.step_id, ack.data
        if kind == "session":
            self._sessions[data] = []
        elif kind == "delete":
            self._sessions.pop(data, None)
            self._open.pop(data, None)
        elif kind in ("user", "system"):
            session, text = data if isinstance(data, tuple | list) else ("", data)
            self._end(session)
            self._sessions.setdefault(session, []).append((kind, text))
        elif kind == "begin":
            self._begin(step_id, data)
        elif kind in DELTAS:
            self._step(step_id).events.append((kind, data))
        elif kind == "start":
            self._step(step_id).started.add(data)
        elif kind == "result":
            call_id, content, *rest = data
            self._step(step_id).results[call_id] = (content, bool(rest and rest[0]))
        elif kind == "discard":
            step = self._steps.pop(step_id, None)
            if step is not None and step.session is not None:
                self._open.pop(step.session, None)

    def _begin(self, step_id: int, session: str | None) -> None:
        if session is not None:
            self._end(session)
            self._open[session] = step_id
            self._sessions.setdefault(session, [])
        self._steps[step_id] = StepTold(session)

    def _step(self, step_id: int) -> StepTold:
        return self._steps.setdefault(step_id, StepTold(None))

    def _end(self, session: str) -> None:
        """Whatever comes next in a session stands behind the step before it."""
        step_id = self._open.pop(session, None)
        if step_id is not None:
            self._sessions[session].append(step_id)

    def state(self) -> State:
        """How the store must be found after a recovery."""
        if not self.whole:
            steps = {i: step.settled(i) for i, step in self._steps.items()}
            words = [item for items in self._sessions.values() for item in items]
            return parts_told(self.kinds, [s for s in steps.values() if s], words)
        sessions = []
        for name, items in self._sessions.items():
            last = [self._open[name]] if name in self._open else []
            told = [self._item(item) for item in [*items, *last]]
            sessions.append((name, tuple(item for item in told if item is not None)))
        return tuple(sorted(sessions))

    def _item(self, item: Any) -> Any:
        if not isinstance(item, int):
            return item
        step = self._steps.get(item)
        return None if step is None else step.settled(item)


def parts_told(kinds: frozenset[str], steps: Iterable[tuple[Any, ...]], words: Any) -> State:
    """Of steps and messages only what a workload that does not tell all has told of."""
    told = []
    for _, step_id, status, blocks, results in steps:
        part: list[Any] = [step_id]
        for kind in ("text", "thinking"):
            if kind in kinds:
                part.append("".join(block[1] for block in blocks if block[0] == kind))
        if "args" in kinds:
            part.append(tuple(block for block in blocks if block[0] == "tool_use"))
        if "result" in kinds:
            part.append(tuple(result for result in results if result[3] is None))
        if kinds & {"done", "error"}:
            part.append(status)
        if any(part[1:]):
            told.append(tuple(part))
    return tuple(sorted(told)), tuple(sorted(w for w in words if w[0] in kinds))
