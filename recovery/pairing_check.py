"""Doctor's look at the calls and outputs of each session, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.journal.engine.rows import EntryRow
from holdfast.journal.messages import Message
from holdfast.recovery.pairing import validate

MESSAGES_AT_ONCE = 2000

Tell = Callable[[str, str, str], None]  # code, where, what


class PairingCheck:
    """The calls and outputs of one session after the other, in pieces of bounded size."""

    def __init__(self, tell: Tell) -> None:
        self.tell = tell
        self.name = ""
        self.messages: list[Message] = []
        self.last: EntryRow | None = None
        self.doubtful = False

    def begin(self, name: str) -> None:
        """The entries of another session follow."""
        self.name, self.messages, self.last, self.doubtful = name, [], None, False

    def doubt(self) -> None:
        """An entry cannot be read: whether its neighbours pair up cannot be told."""
        self.doubtful = True
        self.messages = []

    def add(self, entry: EntryRow, message: Message) -> None:
        """The next entry of the session."""
        if len(self.messages) >= MESSAGES_AT_ONCE and not self.messages[-1].tool_calls:
            self._check(pending=())
            self.messages = []
        self.messages.append(message)
        self.last = entry

    def end(self) -> None:
        """That was the session: say what is wrong with it."""
        # A program that keeps its own loop may be running the calls of its newest message now.
        pending: Sequence[str] = ()
        if self.messages and self.last is not None and self.last.stream_step_id is None:
            pending = [call.id for call in self.messages[-1].tool_calls]
        self._check(pending)
        self.begin("")

    def _check(self, pending: Sequence[str]) -> None:
        if self.doubtful:
            return
        report = validate(self.messages, pending=pending)
        for missing in report.missing_outputs:
            what = f"call {missing.call_id!r} ({missing.tool_name}) has no result"
            self.tell("missing-result", self.name, what)
        for call_id in report.orphan_outputs:
            self.tell("orphan-result", self.name, f"a result answers no call: {call_id!r}")
        for call_id in report.misplaced:
            what = f"the result of {call_id!r} does not stand directly after its call"
            self.tell("misplaced-result", self.name, what)
