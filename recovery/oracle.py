"""The judge of a crash: what was acknowledged, held against a file that plain `sqlite3` reads.

INVARIANT  The verdict comes from the acknowledgements and from the bytes alone.  Nothing that the
           product says of itself is believed; of its code only `Session.messages` is run, because
           what it gives is itself a promise.

A workload tells each call that has returned, in order.  A crash leaves a prefix of the
transactions, so the recovered file must be the state after the first j calls for one j:

    promised <= j <= begun

*promised* are the acknowledged calls that the loss cannot take at the store's level; *begun* is one
more than the acknowledged ones: the call that was under way.  The state after j calls is worked out
by a model of its own (`holdfast.recovery.told`, which also lists what a workload can tell).
"""

from __future__ import annotations

import json
import sqlite3
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.recovery.told import SAME, Ack, Acks, State, StepTold, Told, parts_told, plain

if TYPE_CHECKING:
    from holdfast.store import Store

__all__ = [
    "Ack",
    "Acks",
    "BrokenPromise",
    "Found",
    "Judge",
    "check_promises",
    "read_store",
    "state_found",
]


class BrokenPromise(AssertionError):
    """A recovered store is not what was promised; the message says where."""


# --- what is on record ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """The rows of a store, as another program reads them."""

    damage: str  # what SQLite finds wrong with the file; empty if nothing
    sessions: Sequence[tuple[Any, ...]] = ()  # session_no, session_id, entries
    entries: Sequence[tuple[Any, ...]] = ()  # id, role, body, status, step, part, created_us
    steps: Sequence[tuple[Any, ...]] = ()  # step_id, session, state, status, problem
    events: Sequence[tuple[Any, ...]] = ()  # id, event_type, call, content
    calls: Sequence[tuple[Any, ...]] = ()  # step_id, position, call_id, state
    results: Sequence[tuple[Any, ...]] = ()  # step_id, position, body
    counter: Sequence[tuple[Any, ...]] = ()


_QUERIES = (
    "SELECT session_no, session_id, entries FROM sessions ORDER BY session_no",
    "SELECT id, role, body, status, stream_step_id, part, created_us FROM history_entries"
    " ORDER BY id",
    "SELECT step_id, session, state, status, problem FROM step_metadata ORDER BY step_id",
    "SELECT id, event_type, call, content FROM stream_journal ORDER BY id",
    "SELECT step_id, position, call_id, state FROM tool_calls ORDER BY step_id, position",
    "SELECT step_id, position, body FROM tool_results ORDER BY step_id, position",
    "SELECT next_step_id FROM step_counter",
)


def read_store(path: Path) -> Found:
    """Read a store that nobody has open."""
    uri = f"{path.resolve().as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as db:
        try:
            verdict = db.execute("PRAGMA integrity_check").fetchall()
            damage = "" if verdict == [("ok",)] else "; ".join(str(row[0]) for row in verdict)
            rows = [db.execute(query).fetchall() for query in _QUERIES]
            return Found(damage, *rows)
        except sqlite3.DatabaseError as error:
            return Found(f"{type(error).__name__}: {error}")


def faults_of(found: Found) -> list[str]:
    """What no store may be like after its recovery, whatever was acknowledged."""
    if found.damage:
        return [f"the file is corrupt: {found.damage}"]
    problems = []
    names = {row[1] for row in found.sessions}
    states = {row[0]: row[2] for row in found.steps}
    for step_id, session, state, _, problem in found.steps:
        if session is not None and session not in names:
            problems.append(f"step {step_id} belongs to session {session!r}, which is not there")
        if session is not None and state != "committed":
            problems.append(f"step {step_id} is {state} after recovery ({problem or 'no reason'})")
    journaled = {row[0] >> 32 for row in found.events}
    journaled |= {row[0] for row in found.calls} | {row[0] for row in found.results}
    settled = {row[4] for row in found.entries if row[4] is not None}
    for step_id in sorted(journaled & settled):
        problems.append(f"step {step_id} stands in the journal and in history")
    for step_id in sorted(journaled):
        if states.get(step_id) not in ("open", "sealed"):
            problems.append(f"the journal holds rows of step {step_id}, which is not unfinished")
    for step_id in sorted(settled):
        if states.get(step_id) != "committed":
            problems.append(f"history has step {step_id}, which is {states.get(step_id, 'gone')}")
    parts = [row[4:6] for row in found.entries if row[4] is not None]
    if len(parts) != len(set(parts)):
        problems.append("a step stands twice in history")
    for number, name, count in found.sessions:
        ids = [row[0] & 0xFFFFFFFF for row in found.entries if row[0] >> 32 == number]
        if ids != list(range(count)):
            problems.append(f"session {name!r} counts {count} entries and has {ids}")
        bodies = [json.loads(row[2]) for row in found.entries if row[0] >> 32 == number]
        problems += [f"session {name!r}: {problem}" for problem in _unpaired(bodies)]
    return problems


def _unpaired(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Calls whose outputs do not stand as providers want them: all, in order, directly behind."""
    problems = []
    owed: list[str] = []
    for message in messages:
        outputs = [b["tool_use_id"] for b in message["content"] if b["type"] == "tool_result"]
        if outputs != owed:
            problems.append(f"calls {owed} are followed by outputs {outputs}")
        owed = [b["id"] for b in message["content"] if b["type"] == "tool_use"]
    return [*problems, f"calls {owed} have no outputs"] if owed else problems


def state_found(found: Found, told: Told) -> State:
    """The state that the file is in, in the words of the model."""
    sessions: dict[int, tuple[str, list[Any]]] = {
        number: (name, []) for number, name, _ in found.sessions
    }
    steps: dict[int, list[Any]] = {}
    words = []
    for key, role, body, status, step_id, part, _ in found.entries:
        content = json.loads(body)["content"]
        if step_id is None:
            item: Any = (role, "".join(b["text"] for b in content if b["type"] == "text"))
            words.append(item)
        elif part == 0:
            item = ["step", step_id, status, tuple(map(_found_block, content)), ()]
            steps[step_id] = item
        else:
            steps[step_id][4] = tuple(map(_found_result, content))
            continue
        sessions[key >> 32][1].append(item)
    if not told.whole:
        every = [*map(tuple, steps.values()), *_journaled(found)]
        return parts_told(told.kinds, every, words)
    return tuple(
        sorted(
            (name, tuple(tuple(i) if isinstance(i, list) else i for i in items))
            for name, items in sessions.values()
        )
    )


def _journaled(found: Found) -> list[tuple[Any, ...]]:
    """Steps without a session: recovery leaves them in the journal."""
    steps: dict[int, StepTold] = {}
    names: dict[tuple[int, int], str] = {}
    for key, event, call, content in found.events:
        step_id, kind = key >> 32, SAME.get(event, event)
        data: Any = content
        if kind == "call":
            data = tuple(json.loads(content))
            names[step_id, call] = data[0]
        elif kind == "args":
            data = (names[step_id, call], content)
        steps.setdefault(step_id, StepTold(None)).events.append((kind, data))
    for step_id, _, call_id, state in found.calls:
        if state == "started" and step_id in steps:
            steps[step_id].started.add(call_id)
    for step_id, _, body in found.results:
        result = json.loads(body)
        if step_id in steps:
            answer = (result["content"], result["is_error"])
            steps[step_id].results[result["tool_use_id"]] = answer
    settled = (step.settled(step_id) for step_id, step in steps.items())
    return [step for step in settled if step is not None]


def _found_block(block: Mapping[str, Any]) -> tuple[Any, ...]:
    signature = block.get("signature")
    if block["type"] == "tool_use":
        return "tool_use", block["id"], signature, block["name"], plain(block["input"])
    if block["type"] == "opaque":
        return "opaque", plain([block["provider"], block["data"]]), signature
    return block["type"], block.get("text", ""), signature


def _found_result(block: Mapping[str, Any]) -> tuple[Any, ...]:
    synthetic = block["synthetic"]
    words = "" if synthetic in ("canceled", "in_doubt") else plain(block["content"])
    return block["tool_use_id"], words, block["is_error"], synthetic


# --- the verdict ---------------------------------------------------------------------------------


class Judge:
    """Knows every state that a workload went through, and finds a recovered file among them."""

    def __init__(self, acks: Sequence[Ack]) -> None:
        self._acks = list(acks)
        self._told = Told(ack.sort for ack in acks)
        self._states = [self._told.state()]
        for ack in self._acks:
            self._told.apply(ack)
            self._states.append(self._told.state())

    def places(self, found: Found) -> list[int]:
        """After how many calls the workload was in the state of this file; several look alike."""
        state = state_found(found, self._told)
        return [index for index, known in enumerate(self._states) if known == state]

    def verdict(self, found: Found, places: Sequence[int], promised: int, begun: int) -> str | None:
        """What is wrong with a file that is in the state of `places`; None if nothing is."""
        if any(promised <= place <= begun for place in places):
            return None
        earlier = [place for place in places if place < promised]
        if earlier:
            missing = self._acks[earlier[-1] : promised]
            return f"lost: {'; '.join(ack.words for ack in missing[:3])}" + (
                f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            )
        if places:
            extra = self._acks[begun : places[0]]
            return f"invented: {'; '.join(ack.words for ack in extra[:3])}, which had not begun"
        state = state_found(found, self._told)
        return _difference(state, self._states[promised], self._states[min(begun, len(self._acks))])

    def goes_on(self, found: Found) -> bool:
        """Whether one call that nobody told of, behind all that were told, explains the file."""
        state, known = state_found(found, self._told), self._states[-1]
        if not self._told.whole:
            state, known = state[0], known[0]
        changed = [item for item in state if item not in known]
        gone = [item for item in known if item not in state]
        if len(changed) != 1 or len(gone) > 1:
            return False
        return not gone or _prefix(gone[0], changed[0])


def _difference(found: State, promised: State, begun: State) -> str:
    have, want = set(found), set(promised)
    strange = [item for item in have if item not in want and item not in set(begun)]
    missing = [item for item in want if item not in have]
    return f"no state that there ever was: on record is {strange!r}, promised was {missing!r}"


def check_promises(acks: Sequence[Any], store: Store) -> None:
    """Hold a recovered store to every promise; raises `BrokenPromise`.

    `acks` are tuples (kind, step_id, seq, data) in the order in which the calls returned.  A plain
    list says nothing of the call that was under way, so one call's worth more may be on record.
    The store stays open.  Runs its recovery once more, which must change nothing.
    """
    from holdfast.recovery.recover import recover

    told = acks if isinstance(acks, Acks) else Acks([Ack(*ack) for ack in acks])
    problems = illegal_messages(store)
    with tempfile.TemporaryDirectory() as folder:
        found, again = Path(folder, "found.db"), Path(folder, "again.db")
        store.backup(found)
        before = read_store(found)
        recover(store)
        store.backup(again)
        if read_store(again) != before:
            problems.append("a second recovery changed the store")
    problems += faults_of(before)
    if not before.damage:
        judge = Judge(told.begun)
        places = judge.places(before)
        open_ended = not isinstance(acks, Acks)
        if not (open_ended and not places and judge.goes_on(before)):
            wrong = judge.verdict(before, places, told.promised, len(told.begun))
            problems += [wrong] if wrong else []
    if problems:
        raise BrokenPromise(f"{store.path}: " + "\n  ".join(problems))


def _prefix(told: Any, found: Any) -> bool:
    """Whether `found` is `told` with something more at its end."""
    if isinstance(told, str) and isinstance(found, str):
        return found.startswith(told)
    if isinstance(told, tuple) and isinstance(found, tuple):
        if len(found) < len(told):
            return False
        differ = [index for index, item in enumerate(told) if found[index] != item]
        return all(_prefix(told[i], found[i]) for i in differ)
    return told in ("interrupted", "", None, "canceled") or told == found


def illegal_messages(store: Store) -> list[str]:
    """Sessions whose messages a provider would refuse."""
    from holdfast.recovery.pairing import validate

    problems = []
    for info in store.sessions():
        report = validate(store.session(info.id).messages())
        if not report.is_valid:
            problems.append(f"session {info.id!r} is not legal to send: {report.summary()}")
    return problems
