"""The settled side: what was said and done, for ever."""

from holdfast.history.archive import export_history, import_history
from holdfast.history.entries import HistoryEntry, MessageId, Summary, SummaryId
from holdfast.history.full_history import FullHistory
from holdfast.history.markdown import export_markdown
from holdfast.history.tokens import TokenCounter, TokenCounting

__all__ = [
    "FullHistory",
    "HistoryEntry",
    "MessageId",
    "Summary",
    "SummaryId",
    "TokenCounter",
    "TokenCounting",
    "export_history",
    "export_markdown",
    "import_history",
]
