"""Holdfast: a crash-safe journaling storage engine for LLM agents, over one SQLite file.

    import holdfast

    with holdfast.open("agent.db") as store:
        session = store.create_session()
        session.add_user("hello")
        with session.begin_step() as step:
            step.append_text("Hi")  # on record when it returns: show it now

What an agent has shown or done is on record before it is shown or done.  After any crash the
session opens, is legal to send, tells what is in doubt, and nothing is lost or doubled.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

# For type checkers and editors: the same names as in _NAMES below, which a test holds them to.
if TYPE_CHECKING:
    from holdfast import history as history
    from holdfast import journal as journal
    from holdfast import recovery as recovery
    from holdfast.async_store import AsyncActiveJournal as AsyncActiveJournal
    from holdfast.async_store import AsyncSession as AsyncSession
    from holdfast.async_store import AsyncStore as AsyncStore
    from holdfast.async_store import open_async as open_async
    from holdfast.history.entries import HistoryEntry as HistoryEntry
    from holdfast.history.entries import MessageId as MessageId
    from holdfast.history.entries import Summary as Summary
    from holdfast.history.entries import SummaryId as SummaryId
    from holdfast.history.full_history import FullHistory as FullHistory
    from holdfast.history.tokens import TokenCounter as TokenCounter
    from holdfast.history.tokens import TokenCounting as TokenCounting
    from holdfast.journal.active import ActiveJournal as ActiveJournal
    from holdfast.journal.durability import Durability as Durability
    from holdfast.journal.errors import *  # noqa: F403
    from holdfast.journal.messages import GhostSnapshot as GhostSnapshot
    from holdfast.journal.messages import Image as Image
    from holdfast.journal.messages import Message as Message
    from holdfast.journal.messages import Opaque as Opaque
    from holdfast.journal.messages import OutputStatus as OutputStatus
    from holdfast.journal.messages import Text as Text
    from holdfast.journal.messages import Thinking as Thinking
    from holdfast.journal.messages import ToolResult as ToolResult
    from holdfast.journal.messages import ToolUse as ToolUse
    from holdfast.journal.observers import StoreEvent as StoreEvent
    from holdfast.journal.processes import ToolProcess as ToolProcess
    from holdfast.journal.recovered import CallState as CallState
    from holdfast.journal.recovered import Complete as Complete
    from holdfast.journal.recovered import Errored as Errored
    from holdfast.journal.recovered import Incomplete as Incomplete
    from holdfast.journal.recovered import RecoveredCall as RecoveredCall
    from holdfast.journal.stream_journal import JournalStats as JournalStats
    from holdfast.journal.stream_journal import StreamJournal as StreamJournal
    from holdfast.journal.tool_journal import RecoveredToolBatch as RecoveredToolBatch
    from holdfast.journal.tool_journal import ToolJournal as ToolJournal
    from holdfast.recovery.policy import RecoveryPolicy as RecoveryPolicy
    from holdfast.recovery.recover import RecoveryReport as RecoveryReport
    from holdfast.recovery.settle import SettledStep as SettledStep
    from holdfast.recovery.validation import ValidationReport as ValidationReport
    from holdfast.session import Session as Session
    from holdfast.store import SessionInfo as SessionInfo
    from holdfast.store import Store as Store
    from holdfast.store import StoreStats as StoreStats
    from holdfast.store import open_store as open

# Names are looked up when they are first used: `import holdfast` loads no pydantic, no apsw.
_NAMES = {
    "async_store": "AsyncActiveJournal AsyncSession AsyncStore open_async",
    "history.entries": "HistoryEntry MessageId Summary SummaryId",
    "history.full_history": "FullHistory",
    "history.tokens": "TokenCounter TokenCounting",
    "journal.active": "ActiveJournal",
    "journal.durability": "Durability",
    "journal.errors": """
        ArchiveNotFound CallError CallNotReady DuplicateCall EntryNotFound ExportFailed ForkedStore
        HoldfastError InvalidArchive InvalidArgument InvalidMessage InvalidPath InvalidSessionId
        NetworkFilesystem NotAStore ProcessMismatch ReadOnlyStore ResultMismatch SessionBusy
        SessionError SessionExists SessionNotFound SessionUnrecovered StepBusy StepClosed StepError
        StoreBusy StoreClosed StoreCorrupt StoreError StoreFailed StoreFull StoreNotFound
        StoreNotWritable StoreTooNew UnansweredCalls UnknownCall
    """,
    "journal.messages": """
        GhostSnapshot Image Message Opaque OutputStatus Text Thinking ToolResult ToolUse
    """,
    "journal.observers": "StoreEvent",
    "journal.processes": "ToolProcess",
    "journal.recovered": "CallState Complete Errored Incomplete RecoveredCall",
    "journal.stream_journal": "JournalStats StreamJournal",
    "journal.tool_journal": "RecoveredToolBatch ToolJournal",
    "recovery.policy": "RecoveryPolicy",
    "recovery.recover": "RecoveryReport",
    "recovery.settle": "SettledStep",
    "recovery.validation": "ValidationReport",
    "session": "Session",
    "store": "SessionInfo Store StoreStats",
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}
_PARTS = ("history", "journal", "recovery")

__version__ = "0.1.0"
__all__ = [*_WHERE, "open"]

# Silent unless the program configures logging; no transcript is ever logged above DEBUG.
logging.getLogger("holdfast").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name == "open":
        value: Any = importlib.import_module("holdfast.store").open_store
    elif name in _WHERE:
        value = getattr(importlib.import_module(f"holdfast.{_WHERE[name]}"), name)
    elif name in _PARTS:
        return importlib.import_module(f"holdfast.{name}")
    else:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PARTS})
