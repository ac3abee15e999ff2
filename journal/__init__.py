"""The write-ahead side: what an agent shows or does is on record here before it is shown or done.

Usable alone, by whoever brings an own history: `StreamJournal` for streams, `ToolJournal` for
calls.
"""

from holdfast.journal.active import ActiveJournal
from holdfast.journal.durability import Durability
from holdfast.journal.messages import (
    GhostSnapshot,
    Image,
    Message,
    Opaque,
    OutputStatus,
    Text,
    Thinking,
    ToolResult,
    ToolUse,
)
from holdfast.journal.observers import StoreEvent
from holdfast.journal.processes import ToolProcess
from holdfast.journal.recovered import (
    CallState,
    Complete,
    Errored,
    Incomplete,
    RecoveredCall,
    RecoveredStream,
)
from holdfast.journal.stream_journal import JournalStats, StreamJournal
from holdfast.journal.tool_journal import RecoveredToolBatch, ToolJournal

__all__ = [
    "ActiveJournal",
    "CallState",
    "Complete",
    "Durability",
    "Errored",
    "GhostSnapshot",
    "Image",
    "Incomplete",
    "JournalStats",
    "Message",
    "Opaque",
    "OutputStatus",
    "RecoveredCall",
    "RecoveredStream",
    "RecoveredToolBatch",
    "StoreEvent",
    "StreamJournal",
    "Text",
    "Thinking",
    "ToolJournal",
    "ToolProcess",
    "ToolResult",
    "ToolUse",
]
