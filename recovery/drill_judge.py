"""What a drill holds a store to: what it held before, and what was acknowledged since.

The oracle knows what a list of acknowledgements means and reads the file (`holdfast.recovery.
oracle`); here are the lives of a drill.  A life adds to what the store held before it.  An agent of
our own says what it is about to do, so the store must be in one of two states, without the call
under way or with it.  A user's program does not: the store may then hold one call's worth more at
the end of each session.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.journal.jsontext import clean_text
from holdfast.recovery.acks import Line
from holdfast.recovery.oracle import Found, state_found
from holdfast.recovery.told import DELTAS, KINDS, Ack, Told

Items = tuple[Any, ...]  # a session in the oracle's words: messages and steps, in order
State = dict[str, Items]


@dataclass(slots=True)
class Life:
    """What one process was promised before it was killed."""

    number: int
    sessions: tuple[str, ...] = ()  # the sessions it was given; nobody else had them
    acks: list[Ack] = field(default_factory=list)
    under_way: Ack | None = None

    def hear(self, line: Line) -> None:
        """Take in a line of its pipe."""
        ack = Ack(line.kind, line.step_id, line.seq, line.data)
        if line.sign == "?":
            self.under_way = ack
        elif line.sign == "!":
            self.acks.append(ack)
            self.under_way = None


@dataclass(slots=True)
class Verdict:
    """What is wrong after a kill."""

    problems: list[str] = field(default_factory=list)
    lost: int = 0
    doubled: int = 0
    # Only a call under way explains these, if the program is one that makes such calls.
    suspects: list[tuple[str, str]] = field(default_factory=list)


class _Model(Told):
    """The oracle's model, which begins with what a store holds."""

    def __init__(self, before: State) -> None:
        super().__init__(KINDS)
        self._sessions = {name: list(items) for name, items in before.items()}
        self.rewritten: set[str] = set()
        self.repeated: list[str] = []

    def apply(self, ack: Ack) -> None:
        kind, data = ack.kind, ack.data
        if kind == "assistant":
            session, text = data
            self._end(session)
            self._sessions.setdefault(session, []).append((kind, text))
        elif kind == "pop":
            self._end(data)
            self._sessions[data][-1:] = []
        elif kind == "rewrite":
            self.rewritten.add(data)
        else:
            super().apply(ack)

    def items(self) -> State:
        """Every session, as the file should have it."""
        return {name: _clean(items) for name, items in self.state()}


def state_of(found: Found) -> State:
    """What a file holds."""
    return dict(state_found(found, _Model({})))


def judge_agents(before: State, found: Found, lives: Sequence[Life]) -> Verdict:
    """Hold a file to the lives of our own agents, whose sessions are their own."""
    verdict = Verdict()
    have = state_of(found)
    untouched = dict(before)
    for life in lives:
        names = set(life.sessions)
        mine = {name: untouched.pop(name) for name in life.sessions if name in before}
        there = {name: items for name, items in have.items() if name in names}
        model = _apply(mine, life.acks)
        verdict.problems += model.repeated
        want = model.items()
        if there == want:
            continue
        if life.under_way is not None:
            model.apply(life.under_way)
            if there == model.items():
                continue
        _accuse(verdict, f"life {life.number}", life.acks, want, there)
    every = {name for life in lives for name in life.sessions}
    there = {name: items for name, items in have.items() if name not in every}
    if there != untouched:
        _accuse(verdict, "sessions that nobody touched", [], untouched, there)
    return verdict


def judge_program(
    before: State, found: Found, life: Life, unfinished: Iterable[int] = ()
) -> Verdict:
    """Hold a file to one life of a program that tells only what is on record.

    `unfinished` are the steps that it found and settled itself, by a policy and a resolver of its
    own: they may be gone, or answered otherwise, but they may not be changed.
    """
    verdict = Verdict()
    have = state_of(found)
    model = _apply(before, life.acks)
    settled = frozenset(unfinished)
    begun = {ack.step_id for ack in life.acks if ack.kind == "begin"}
    written = {_session_of(ack) for ack in life.acks}
    verdict.problems += model.repeated
    for name, items in model.items().items():
        if name in model.rewritten:
            continue
        there = have.get(name)
        if there is None:
            verdict.suspects.append(("delete", f"session {name!r} is gone"))
            continue
        want = _as_settled(items, there, settled)
        if there == want or _goes_on(want, there, begun):
            continue
        if name not in written and there[: len(want)] == want:
            continue  # Another process of the program goes on with it, and tells nobody.
        if want and there == want[:-1]:
            kind = "discard" if want[-1][0] == "step" else "pop"
            verdict.suspects.append((kind, f"session {name!r} has lost its end: {want[-1]!r}"))
            continue
        _accuse(verdict, f"life {life.number}", life.acks, {name: want}, {name: there})
    if len(verdict.suspects) > 1:  # At most one of them was under way.
        verdict.problems += [what for _, what in verdict.suspects[1:]]
        verdict.lost += len(verdict.suspects) - 1
    return verdict


def _apply(before: State, acks: Iterable[Ack]) -> _Model:
    model = _Model(before)
    seen: set[tuple[int, int]] = set()
    for ack in acks:
        if ack.sort in DELTAS:
            if (ack.step_id, ack.seq) in seen:
                model.repeated.append(f"{ack.words}: acknowledged twice")
            seen.add((ack.step_id, ack.seq))
        model.apply(ack)
    return model


def _session_of(ack: Ack) -> str | None:
    """The session that an acknowledgement names."""
    if ack.sort in ("user", "system", "assistant"):
        return str(ack.data[0])
    return ack.data if ack.sort in ("session", "begin") else None


def _clean(value: Any) -> Any:
    """As a message can hold it: halves of a character in two deltas become one."""
    if isinstance(value, str):
        return clean_text(value)
    return tuple(map(_clean, value)) if isinstance(value, tuple | list) else value


def _goes_on(want: Items, there: Items, begun: set[int]) -> bool:
    """Whether what was under way explains what there is more of: at the end, one item at most."""
    known, rest = there[: len(want)], there[len(want) :]
    if len(known) < len(want) or len(rest) > 1:
        return False
    if known == want:
        return True
    if rest or known[:-1] != want[:-1] or want[-1][0] != "step" or want[-1][1] not in begun:
        return False
    return _step_goes_on(want[-1], known[-1])


def _step_goes_on(want: Items, there: Items) -> bool:
    if want[:2] != there[:2]:
        return False
    _, _, status, blocks, outputs = want
    if status not in ("interrupted", there[2]) or not _blocks_go_on(blocks, there[3]):
        return False
    found = {output[0]: output for output in there[4]}
    for told in outputs:
        output = found.get(told[0])
        if output is None or (told[3] is None and output != told):
            return False
        if told[3] == "in_doubt" and output[3] == "canceled":
            return False  # It was started, and that was promised.
    return True


def _blocks_go_on(want: Items, there: Items) -> bool:
    """A block grows at its end, or a new one comes; a call stands where it was announced."""
    at = 0
    for index, block in enumerate(want):
        while at < len(there) and there[at] != block and there[at][0] == "tool_use":
            at += 1  # Its last fragment was under way, so it is a call only now.
        if at == len(there):
            return False
        if there[at] != block:
            grown = there[at][0] == block[0] != "tool_use" and there[at][1].startswith(block[1])
            if index < len(want) - 1 or not grown or block[2] not in (None, there[at][2]):
                return False
        at += 1
    return True


def _as_settled(want: Items, there: Items, settled: frozenset[int]) -> Items:
    """What a program may have made of the steps that it settled itself."""
    found = {item[1]: item for item in there if item[0] == "step"}
    items = []
    for item in want:
        if item[0] == "step" and item[1] in settled:
            if item[1] not in found:
                continue
            outputs = dict.fromkeys(result[0] for result in found[item[1]][4])
            told = {result[0]: result for result in item[4] if result[3] is None}
            other = {result[0]: result for result in found[item[1]][4]}
            item = (*item[:4], tuple(told.get(call, other[call]) for call in outputs))
        items.append(item)
    return tuple(items)


def _accuse(verdict: Verdict, who: str, acks: Sequence[Ack], want: State, there: State) -> None:
    lost, doubled = _tally(acks, want, there)
    verdict.lost += lost
    verdict.doubled += doubled
    for name in sorted({*want, *there}):
        if want.get(name) != there.get(name):
            verdict.problems.append(f"{who}: {_difference(name, want.get(name), there.get(name))}")


def _difference(name: str, want: Items | None, there: Items | None) -> str:
    if want is None or there is None:
        return f"session {name!r} is {'there' if want is None else 'gone'}"
    at = next(
        (i for i, pair in enumerate(zip(want, there, strict=False)) if pair[0] != pair[1]), -1
    )
    if at < 0:
        at = min(len(want), len(there))
    promised = repr(want[at]) if at < len(want) else "nothing"
    on_record = repr(there[at]) if at < len(there) else "nothing"
    return f"session {name!r}, message {at}: promised was {promised}, on record is {on_record}"


def _tally(acks: Sequence[Ack], want: State, there: State) -> tuple[int, int]:
    """How many acknowledged pieces are missing, and how many stand there once too often."""
    lost = doubled = 0
    steps = {item[1]: item for items in there.values() for item in items if item[0] == "step"}
    kept = {item[1] for items in want.values() for item in items if item[0] == "step"}
    pieces: dict[tuple[int, str], list[str]] = {}
    for ack in acks:
        if ack.step_id in kept and ack.sort in ("text", "thinking"):
            pieces.setdefault((ack.step_id, ack.sort), []).append(ack.data)
        elif ack.step_id in kept and ack.sort == "result":
            outputs = steps[ack.step_id][4] if ack.step_id in steps else ()
            lost += ack.data[0] not in [output[0] for output in outputs if output[3] is None]
    for (step_id, kind), told in pieces.items():
        blocks = steps[step_id][3] if step_id in steps else ()
        less, more = _walk(told, "".join(block[1] for block in blocks if block[0] == kind))
        lost, doubled = lost + less, doubled + more
    for name, items in want.items():
        found = list(there.get(name, ()))
        for item in items:
            if item[0] != "step":
                lost += item not in found
                doubled += found.count(item) > items.count(item)
    return (lost, doubled) if lost or doubled else (1, 0)  # Something else is not as promised.


def _walk(told: Sequence[str], text: str) -> tuple[int, int]:
    lost = doubled = at = 0
    for piece in told:
        found = text.find(piece, at)
        lost += found < 0
        doubled += found > at
        at = at if found < 0 else found + len(piece)
    return lost, doubled + (bool(told) and told[-1] in text[at:])


def in_doubt(state: Mapping[str, Items], steps: frozenset[int]) -> int:
    """How many calls of these steps are told to be in doubt."""
    return sum(
        result[3] == "in_doubt"
        for items in state.values()
        for item in items
        if item[0] == "step" and item[1] in steps
        for result in item[4]
    )
