"""How others keep a turn: one small class each, all with the same five acts.

`delta` returns when the delta may be shown; `call` when the tool may run; `result` and `end` finish
the turn.  `found` opens what a dead process left: how many deltas are there, and whether anything
says that a tool was running.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import apsw

import holdfast
from holdfast.recovery import RecoveryPolicy

DELTA = "twelve chars"
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"path": "a"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "what it saw"}


class Peer:
    """One way to keep a turn."""

    survives = ""  # what a delta that was shown has survived
    grain = ""  # what is written at a time

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text: list[str] = []
        self.turn = 0

    def begin(self) -> None:
        """A turn begins."""
        self.turn += 1
        self.text = []

    def delta(self, text: str) -> None:
        """Most keep deltas in memory until the message is whole."""
        self.text.append(text)

    def call(self) -> None:
        """The model wants a tool, which is about to run."""

    def result(self) -> None:
        """The tool has answered."""

    def end(self) -> None:
        """The turn is over."""

    def close(self) -> None:
        """The program ends."""

    def found(self) -> tuple[int, bool]:
        """Deltas that a dead process left, and whether it left a trace of its tool."""
        raise NotImplementedError


class Holdfast(Peer):
    """Holdfast at one of its levels."""

    grain = "each delta"
    level = "barrier"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.store = holdfast.open(path, durability=self.level, policy=RecoveryPolicy())
        if not self.store.sessions():
            self.store.create_session("s")
        self.session = self.store.session("s")

    def begin(self) -> None:
        self.step = self.session.begin_step("a-model")
        self.delta = self.step.append_text  # type: ignore[method-assign]

    def call(self) -> None:
        self.step.announce_call("c1", "look")
        self.step.append_args("c1", '{"path": "a"}')
        self.step.append_done()
        self.step.seal()
        self.step.start_call("c1")

    def result(self) -> None:
        self.step.record_result("c1", "what it saw")

    def end(self) -> None:
        self.step.commit()

    def close(self) -> None:
        self.store.close()

    def found(self) -> tuple[int, bool]:
        chars = sum(len(m.text) for m in self.session.messages() if m.role == "assistant")
        in_doubt = any(step.in_doubt for step in self.store.recovery.steps)
        return chars // len(DELTA), in_doubt


class HoldfastProcess(Holdfast):
    """No sync at all."""

    survives, level = "kill", "process"


class HoldfastBarrier(Holdfast):
    """Calls, results and ends are synced: the default."""

    survives, level = "kill; calls: power cut", "barrier"


class HoldfastPower(Holdfast):
    """Every delta is synced."""

    survives, level = "power cut", "power"


class JsonLines(Peer):
    """A file to which a line is appended: a delta each, or a whole item as coding agents do it."""

    flushes, syncs, each_delta = True, False, True
    grain, survives = "each delta", "kill"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.file = path.open("a", encoding="utf-8")

    def write(self, item: dict[str, Any]) -> None:
        """One line."""
        self.file.write(json.dumps({"at": time.time(), "turn": self.turn, **item}) + "\n")
        if self.flushes:
            self.file.flush()
        if self.syncs:
            os.fsync(self.file.fileno())

    def delta(self, text: str) -> None:
        if self.each_delta:
            self.write({"type": "delta", "text": text})
        else:
            self.text.append(text)

    def call(self) -> None:
        if not self.each_delta:
            self.write({"type": "message", "text": "".join(self.text)})
        self.write(CALL)

    def result(self) -> None:
        self.write(RESULT)

    def end(self) -> None:
        self.write({"type": "end"})

    def close(self) -> None:
        self.file.close()

    def found(self) -> tuple[int, bool]:
        items = []
        for line in self.path.read_text().splitlines():
            try:
                items.append(json.loads(line))
            except ValueError:
                break  # A torn line.
        chars = sum(len(item.get("text", "")) for item in items)
        return chars // len(DELTA), any(item["type"] == "function_call" for item in items)


class JsonLinesBuffered(JsonLines):
    """Left to Python's buffer."""

    flushes, survives = False, "nothing"


class JsonLinesSynced(JsonLines):
    """Synced line by line."""

    syncs, survives = True, "power cut"


class JsonItems(JsonLines):
    """A line for each finished item, flushed."""

    each_delta, grain, survives = False, "each item", "nothing"


class JsonItemsSynced(JsonItems):
    """The same, synced."""

    syncs = True


SOURCE_SCHEMA = """
CREATE TABLE IF NOT EXISTS stream_journal (
    step_id INTEGER NOT NULL, seq INTEGER NOT NULL, event_type TEXT NOT NULL, content TEXT NOT NULL,
    created_at TEXT NOT NULL, sealed INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (step_id, seq));
CREATE INDEX IF NOT EXISTS unsealed ON stream_journal (step_id, seq) WHERE sealed = 0;
CREATE TABLE IF NOT EXISTS tool_calls (batch_id INTEGER, seq INTEGER, tool_call_id TEXT,
    tool_name TEXT, arguments_json TEXT, PRIMARY KEY (batch_id, seq));
CREATE TABLE IF NOT EXISTS tool_results (batch_id INTEGER, tool_call_id TEXT, content TEXT,
    is_error INTEGER, created_at TEXT, PRIMARY KEY (batch_id, tool_call_id));
CREATE TABLE IF NOT EXISTS history (id INTEGER PRIMARY KEY, body TEXT);
"""


class Buffered25(Peer):
    """Three b-trees and a buffer: written at the first delta, then every 25 or every 200 ms."""

    grain, survives, size = "25 deltas", "nothing", 25

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.db = apsw.Connection(str(path))
        self.db.pragma("journal_mode", "wal")
        self.db.execute("PRAGMA synchronous = FULL")
        self.db.execute(SOURCE_SCHEMA)

    def begin(self) -> None:
        super().begin()
        self.seq, self.buffer, self.flushed = 0, [], 0.0

    def delta(self, text: str) -> None:
        self.text.append(text)
        self.seq += 1
        self.buffer.append((self.turn, self.seq, text, time.strftime("%Y-%m-%dT%H:%M:%S")))
        late = time.monotonic() - self.flushed > 0.2
        if self.seq == 1 or len(self.buffer) >= self.size or late:
            self.flush()

    def flush(self) -> None:
        """One transaction for what has gathered."""
        with self.db:
            self.db.executemany(
                "INSERT INTO stream_journal VALUES (?, ?, 'text_delta', ?, ?, 0)", self.buffer
            )
        self.buffer, self.flushed = [], time.monotonic()

    def call(self) -> None:
        self.flush()
        with self.db:
            self.db.execute("UPDATE stream_journal SET sealed = 1 WHERE step_id = ?", (self.turn,))
            self.db.execute(
                "INSERT INTO tool_calls VALUES (?, 0, 'c1', 'look', ?)",
                (self.turn, CALL["arguments"]),
            )

    def result(self) -> None:
        self.db.execute(
            "INSERT INTO tool_results VALUES (?, 'c1', ?, 0, ?)",
            (self.turn, RESULT["output"], time.strftime("%Y-%m-%dT%H:%M:%S")),
        )

    def end(self) -> None:
        body = json.dumps([{"text": "".join(self.text)}, CALL, RESULT])
        self.db.execute("INSERT INTO history (body) VALUES (?)", (body,))
        with self.db:
            for table, key in (
                ("stream_journal", "step_id"),
                ("tool_calls", "batch_id"),
                ("tool_results", "batch_id"),
            ):
                self.db.execute(f"DELETE FROM {table} WHERE {key} = ?", (self.turn,))

    def close(self) -> None:
        self.db.close()

    def found(self) -> tuple[int, bool]:
        deltas = self.db.execute("SELECT count(*) FROM stream_journal").fetchone()[0]
        return deltas, bool(self.db.execute("SELECT count(*) FROM tool_calls").fetchone()[0])


class Unbuffered(Buffered25):
    """The same tables, each delta in a transaction of its own."""

    grain, survives, size = "each delta", "power cut", 1


PEERS: dict[str, type[Peer]] = {
    "holdfast, process": HoldfastProcess,
    "holdfast, barrier": HoldfastBarrier,
    "holdfast, power": HoldfastPower,
    "JSONL, buffered": JsonLinesBuffered,
    "JSONL, flushed": JsonLines,
    "JSONL, fsync": JsonLinesSynced,
    "JSONL, an item a line": JsonItems,
    "JSONL, an item a line, fsync": JsonItemsSynced,
    "three b-trees, buffer of 25": Buffered25,
    "three b-trees, no buffer": Unbuffered,
}
