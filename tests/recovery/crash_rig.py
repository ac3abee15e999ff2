"""What the tests of recovery share: a script of calls, what must stand after it, and who looks.

A script is run through the public door.  `expected` says in plain Python what history must hold
if nothing after a cut had happened; it shares no code with the library.  `violations` reads a file
with Python's own sqlite3 and holds it to that, and to the promises that need no model.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import holdfast

Op = tuple[Any, ...]
Outcome = list[Any]
SESSION = "s"


# --- running a script ---------------------------------------------------------------------------


def run(
    session: Any,
    script: Sequence[Op],
    *,
    before: Callable[[int], object] = lambda n: None,
    after: Callable[[int], object] = lambda n: None,
) -> None:
    """Carry out a script; `before` and `after` are told the number of each call, from 1."""
    step: Any = None
    for number, op in enumerate(script, 1):
        before(number)
        step = do(session, step, op)
        after(number)


def do(session: Any, step: Any, op: Op) -> Any:
    """Carry out one call; gives back the open step, which `begin` makes."""
    verb, *words = op
    match verb:
        case "user":
            session.add_user(*words)
        case "begin":
            return session.begin_step("a-model")
        case "text":
            step.append_text(*words)
        case "think":
            step.append_thinking(*words)
        case "call":
            step.announce_call(*words)
        case "args":
            step.append_args(*words)
        case "done":
            step.append_done(stop_reason="stop")
        case "error":
            step.append_error(*words)
        case "seal":
            step.seal()
        case "start":
            step.start_call(words[0], replay=words[1])
        case "result":
            step.record_result(*words)
        case "commit":
            step.commit()
        case "discard":
            step.discard()
        case _:
            raise AssertionError(verb)
    return None if verb in ("commit", "discard") else step


# --- what must stand ----------------------------------------------------------------------------


@dataclass
class _Call:
    call_id: str
    raw: str = ""
    started: str | None = None
    result: str | None = None


@dataclass
class _Step:
    parts: list[tuple[str, Any]] = field(default_factory=list)
    status: str = "interrupted"
    error: str | None = None

    def add(self, kind: str, text: str) -> None:
        if self.parts and self.parts[-1][0] == kind:
            self.parts[-1] = (kind, self.parts[-1][1] + text)
        else:
            self.parts.append((kind, text))

    def call(self, call_id: str) -> _Call:
        return next(c for kind, c in self.parts if kind == "call" and c.call_id == call_id)


def expected(script: Sequence[Op]) -> Outcome:
    """What history holds when the script ends here and what was open has been settled."""
    history: Outcome = []
    step: _Step | None = None
    for verb, *words in script:
        if verb == "user":
            history.append(["user", words[0]])
        elif verb == "begin":
            step = _Step()
        elif verb == "commit":
            history += _settled(step)
            step = None
        elif verb == "discard":
            step = None
        else:
            assert step is not None
            _apply(step, verb, words)
    return history + (_settled(step) if step is not None else [])


def _apply(step: _Step, verb: str, words: list[Any]) -> None:
    match verb:
        case "text" | "think":
            step.add(verb, words[0])
        case "call":
            step.parts.append(("call", _Call(words[0])))
        case "args":
            step.call(words[0]).raw += words[1]
        case "done":
            step.status = "complete"
        case "error":
            step.status, step.error = "errored", words[0]
        case "start":
            step.call(words[0]).started = words[1]
        case "result":
            step.call(words[0]).result = words[1]


def _settled(step: _Step | None) -> Outcome:
    assert step is not None
    blocks: list[Any] = []
    outputs: list[Any] = []
    dropped: list[Any] = []
    for kind, value in step.parts:
        if kind != "call":
            if value:
                blocks.append([kind, value])
            continue
        arguments = _arguments(value.raw, step.status == "complete")
        if arguments is None:
            dropped.append([value.call_id, value.raw])
            continue
        blocks.append(["call", value.call_id, arguments])
        outputs.append([value.call_id, *_output(value)])
    if not blocks:
        return []
    entries = [["assistant", step.status, blocks, dropped, step.error]]
    return [*entries, ["outputs", step.status, outputs]] if outputs else entries


def _arguments(raw: str, done: bool) -> Any:
    if not raw:
        return {} if done else None
    try:
        found = json.loads(raw)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _output(call: _Call) -> list[Any]:
    if call.result is not None:
        return [None, call.result]
    if call.started is None:
        return ["canceled", "safe to run it again"]
    if call.started == "safe":
        return ["in_doubt", "may be run again"]
    return ["in_doubt", "Check before running it again"]


# --- looking ------------------------------------------------------------------------------------
# Only at stores that this process does not have open: closing a file drops SQLite's locks on it.


def violations(path: Path, allowed: Sequence[Outcome], *, settled: bool = True) -> list[str]:
    """Every promise that the file breaks; `settled`: nothing may be left unfinished in it."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        found = [*_places(db, settled), *_counters(db), *_pairs(db)]
        if settled:
            history = read_history(db)
            if history not in allowed:
                found.append(f"history is {history}, allowed: {allowed}")
    return found


def _places(db: sqlite3.Connection, settled: bool) -> list[str]:
    found = []
    states = dict(db.execute("SELECT step_id, state FROM step_metadata"))
    journal = {step for (step,) in db.execute("SELECT DISTINCT step_id FROM stream_journal")}
    for table in ("tool_calls", "tool_results", "tool_batches"):
        journal |= {step for (step,) in db.execute(f"SELECT step_id FROM {table}")}
    entries: dict[int, list[int]] = {}
    for step, part in db.execute(
        "SELECT stream_step_id, part FROM history_entries WHERE stream_step_id IS NOT NULL"
        " ORDER BY id"
    ):
        entries.setdefault(step, []).append(part)
    for step in sorted(states.keys() | journal | entries.keys()):
        state = states.get(step)
        if state is None:
            found.append(f"step {step} has rows and is not in step_metadata")
        elif state == "committed" and step in journal:
            found.append(f"step {step} is committed and in the journal")
        elif state != "committed" and step in entries:
            found.append(f"step {step} is {state} and in history")
        elif entries.get(step, [0])[:3] not in ([0], [0, 1]):
            found.append(f"step {step} has the parts {entries[step]} in history")
        if settled and state != "committed":
            found.append(f"step {step} is {state}")
    return found


def _counters(db: sqlite3.Connection) -> list[str]:
    found = []
    for number, name, count in db.execute("SELECT session_no, session_id, entries FROM sessions"):
        ids = [
            key
            for (key,) in db.execute(
                "SELECT entry_id FROM history_entries WHERE session_no = ? ORDER BY id", (number,)
            )
        ]
        if ids != list(range(count)):
            found.append(f"session {name} counts {count} entries and has {ids}")
    return found


def _pairs(db: sqlite3.Connection) -> list[str]:
    """Every call has exactly one output, in call order, in the message directly after it."""
    found = []
    for (number,) in db.execute("SELECT session_no FROM sessions").fetchall():
        waiting: list[str] = []
        for (body,) in db.execute(
            "SELECT body FROM history_entries WHERE session_no = ? ORDER BY id", (number,)
        ):
            blocks = json.loads(body)["content"]
            outputs = [b["tool_use_id"] for b in blocks if b["type"] == "tool_result"]
            if outputs != waiting:
                found.append(f"calls {waiting} are followed by outputs {outputs}")
            waiting = [b["id"] for b in blocks if b["type"] == "tool_use"]
        if waiting:
            found.append(f"calls {waiting} have no outputs")
    return found


def read_history(db: sqlite3.Connection, session: str = SESSION) -> Outcome:
    """A session as `expected` tells it."""
    history: Outcome = []
    for role, body, status, metadata in db.execute(
        "SELECT role, body, status, e.metadata FROM history_entries e JOIN sessions s"
        " ON s.session_no = e.session_no WHERE s.session_id = ? ORDER BY e.id",
        (session,),
    ):
        blocks = json.loads(body)["content"]
        notes = json.loads(metadata)
        if blocks[0]["type"] == "tool_result":
            history.append(["outputs", status, [_read_output(block) for block in blocks]])
        elif role == "user":
            history.append(["user", blocks[0]["text"]])
        else:
            dropped = [[c["call_id"], c["raw_arguments"]] for c in notes.get("dropped_calls", ())]
            blocks = [_read_block(block) for block in blocks]
            history.append(["assistant", status, blocks, dropped, notes.get("error")])
    return history


def _read_block(block: dict[str, Any]) -> list[Any]:
    if block["type"] == "tool_use":
        return ["call", block["id"], block["input"]]
    return [{"text": "text", "thinking": "think"}[block["type"]], block["text"]]


def _read_output(block: dict[str, Any]) -> list[Any]:
    words = block["content"]
    if block["synthetic"] in ("canceled", "in_doubt"):
        for known in ("safe to run it again", "may be run again", "Check before running it again"):
            words = known if known in block["content"] else words
    return [block["tool_use_id"], block["synthetic"], words]


# --- stores -------------------------------------------------------------------------------------


def leave(path: Path, script: Sequence[Op], **options: Any) -> int:
    """Run a script on a new store and leave it as a crash would; the id of its newest step."""
    with holdfast.open(path, **options) as store:
        run(store.create_session(SESSION), script)
    with contextlib.closing(sqlite3.connect(path)) as db:
        (newest,) = db.execute("SELECT next_step_id - 1 FROM step_counter").fetchone()
    return int(newest)


def scalar(path: Path, sql: str, *values: object) -> Any:
    """One value, read with Python's own sqlite3."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        row = db.execute(sql, values).fetchone()
    return None if row is None else row[0]


def damage(path: Path, sql: str, *values: object) -> None:
    """Change a closed store behind the library's back."""
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute(sql, values)
