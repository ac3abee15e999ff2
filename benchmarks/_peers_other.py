"""Peers that have to be installed: an agent framework's session, a checkpointer, a key-value store.

See _peers.py for the five acts.  Each imports what it needs when it is made.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from _peers import CALL, DELTA, RESULT, Peer


class OpenAIAgents(Peer):
    """openai-agents SQLiteSession: the items of a turn are added when it ends."""

    grain, survives = "whole turn", "nothing"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        from agents import SQLiteSession

        self.loop = asyncio.new_event_loop()
        self.session = SQLiteSession("s", path)

    def add(self, *items: dict[str, Any]) -> None:
        """What the runner calls."""
        self.loop.run_until_complete(self.session.add_items(list(items)))  # type: ignore[arg-type]

    def end(self) -> None:
        self.add({"role": "assistant", "content": "".join(self.text)}, CALL, RESULT)

    def close(self) -> None:
        self.session.close()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    def found(self) -> tuple[int, bool]:
        items: list[Any] = self.loop.run_until_complete(self.session.get_items())
        chars = sum(len(item.get("content") or "") for item in items)
        return chars // len(DELTA), any(item.get("type") == "function_call" for item in items)


class OpenAIAgentsEach(OpenAIAgents):
    """Bent to the same promise: an item a delta, and one before the tool."""

    grain, survives = "each delta", "power cut"

    def delta(self, text: str) -> None:
        self.add({"role": "assistant", "content": text})

    def call(self) -> None:
        self.add(CALL)

    def end(self) -> None:
        self.add(RESULT)


class LangGraph(Peer):
    """langgraph SqliteSaver: a checkpoint when a node ends; the model's, then the tool's."""

    grain, survives = "each node", "nothing"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        import sqlite3

        from langgraph.checkpoint.base import empty_checkpoint
        from langgraph.checkpoint.sqlite import SqliteSaver

        self.db = sqlite3.connect(path, check_same_thread=False)
        self.saver = SqliteSaver(self.db)
        self.empty = empty_checkpoint
        self.config: Any = {"configurable": {"thread_id": "s", "checkpoint_ns": ""}}

    def put(self, messages: list[Any]) -> None:
        """A checkpoint of the whole state."""
        checkpoint = self.empty()
        checkpoint["channel_values"] = {"messages": messages}
        self.config = self.saver.put(self.config, checkpoint, {"source": "loop"}, {})

    def call(self) -> None:
        self.put([{"text": "".join(self.text)}, CALL])

    def result(self) -> None:
        self.saver.put_writes(self.config, [("messages", RESULT)], f"tools{self.turn}")

    def end(self) -> None:
        self.put([{"text": "".join(self.text)}, CALL, RESULT])

    def close(self) -> None:
        self.db.close()

    def found(self) -> tuple[int, bool]:
        saved = self.saver.get_tuple(self.config)
        if saved is None:
            return 0, False
        messages = saved.checkpoint["channel_values"].get("messages", [])
        written = sum(
            len(value) for _, channel, value in saved.pending_writes or () if channel == "delta"
        )
        chars = sum(len(message.get("text", "")) for message in messages)
        return (chars or written) // len(DELTA), CALL in messages


class LangGraphEach(LangGraph):
    """Bent to the same promise: a pending write a delta."""

    grain, survives = "each delta", "power cut"

    def begin(self) -> None:
        super().begin()
        self.put([])

    def delta(self, text: str) -> None:
        super().delta(text)
        self.saver.put_writes(self.config, [("delta", text)], f"d{self.turn}.{len(self.text)}")


class RocksDB(Peer):
    """A key a delta in RocksDB, whose log is written to the kernel and not synced."""

    grain, survives, syncs = "each delta", "kill", False

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        from rocksdict import Rdict, WriteBatch, WriteOptions

        self.db = Rdict(str(path))
        self.batch = WriteBatch
        options = WriteOptions()
        options.sync = self.syncs
        self.db.set_write_options(options)
        self.options = options

    def delta(self, text: str) -> None:
        self.text.append(text)
        self.db[f"d{self.turn:08}{len(self.text):08}"] = text

    def call(self) -> None:
        self.db[f"c{self.turn:08}"] = json.dumps(CALL)

    def result(self) -> None:
        self.db[f"r{self.turn:08}"] = json.dumps(RESULT)

    def end(self) -> None:
        batch = self.batch()
        for number in range(1, len(self.text) + 1):
            batch.delete(f"d{self.turn:08}{number:08}")
        batch.put(f"h{self.turn:08}", json.dumps(["".join(self.text), CALL, RESULT]))
        self.db.write(batch, self.options)

    def close(self) -> None:
        self.db.close()

    def found(self) -> tuple[int, bool]:
        keys = [str(key) for key in self.db.keys()]  # noqa: SIM118
        return sum(key[0] == "d" for key in keys), any(key[0] == "c" for key in keys)


class RocksDBSynced(RocksDB):
    """The same, its log synced at every write."""

    survives, syncs = "power cut", True


OTHERS: dict[str, type[Peer]] = {
    "openai-agents, a turn": OpenAIAgents,
    "openai-agents, a delta": OpenAIAgentsEach,
    "langgraph, a node": LangGraph,
    "langgraph, a delta": LangGraphEach,
    "RocksDB": RocksDB,
    "RocksDB, sync": RocksDBSynced,
}
NEEDS = {"openai": "agents", "langgraph": "langgraph.checkpoint.sqlite", "RocksDB": "rocksdict"}
