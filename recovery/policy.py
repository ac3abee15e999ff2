"""What recovery may decide: which steps to keep, and the words where a result is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from holdfast.journal.blocks import ToolResult
from holdfast.journal.errors import InvalidArgument
from holdfast.journal.recovered import RecoveredCall
from holdfast.recovery.validation import IN_DOUBT_SAFE_TEXT, IN_DOUBT_TEXT, NOT_STARTED_TEXT

# Asked about a call in doubt; None: it does not know either.
Resolver = Callable[[RecoveredCall], ToolResult | None]


@dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """How unfinished steps are settled. The default keeps everything that was shown.

    canceled_text       read by the model for a call that never started.
    in_doubt_text       for one that started, and whose outcome nobody knows.
    in_doubt_safe_text  for such a one that was started with `replay="safe"`.
    max_attempts        how often one step may make recovery raise before it is quarantined. A
                        step during whose recovery the process dies gets four times as many: such
                        a death is more often the machine's fault than the step's.
    orphan_hook         is told of each recorded child process that still runs, before a resolver
                        is asked; `call.process.end()` kills it only if its start time matches.
    """

    incomplete: Literal["keep", "discard"] = "keep"
    errored: Literal["keep", "discard"] = "keep"
    canceled_text: str = NOT_STARTED_TEXT
    in_doubt_text: str = IN_DOUBT_TEXT
    max_attempts: int = 3
    in_doubt_safe_text: str = IN_DOUBT_SAFE_TEXT
    orphan_hook: Callable[[RecoveredCall], object] | None = None

    def __post_init__(self) -> None:
        for name in ("incomplete", "errored"):
            chosen = getattr(self, name)
            if chosen not in ("keep", "discard"):
                raise InvalidArgument(f"{name} is {chosen!r}, expected 'keep' or 'discard'")
        if not isinstance(self.max_attempts, int) or self.max_attempts < 1:
            raise InvalidArgument(f"max_attempts is {self.max_attempts!r}, expected 1 or more")
        for name in ("canceled_text", "in_doubt_text", "in_doubt_safe_text"):
            words = getattr(self, name)
            if not isinstance(words, str) or not words.strip():
                raise InvalidArgument(f"{name} is {words!r}, expected words for the model")

    @property
    def deaths_max(self) -> int:
        """How many recoveries may die over one step before it is quarantined."""
        return 4 * self.max_attempts

    def discards(self, status: str) -> bool:
        """Whether a step of this status is dropped instead of kept."""
        return (status == "interrupted" and self.incomplete == "discard") or (
            status == "errored" and self.errored == "discard"
        )
