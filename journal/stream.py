"""A step's stream: the kinds of events there are, and how a list of them reads as a message.

`fold` is pure: it looks and answers.  Sealing, recovery and doctor all read a stream through it, so
a message is the same whether its step was finished or cut off by a crash.

An event is trusted if and only if every one before it is there and sound.  What stands behind a
gap is kept for people (`behind_gap`) and is no part of the message.  Kinds of a newer version are
passed over and named (`unknown_kinds`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.journal.blocks import Block, Opaque, Text, Thinking, ToolUse
from holdfast.journal.engine.rows import EventRow
from holdfast.journal.jsontext import clean_text, parse_arguments
from holdfast.journal.messages import Message

# Plain strings and no enum: they are bound to SQL on the hot path.
TEXT: Final = "text_delta"
THINKING: Final = "thinking_delta"
SIGNATURE: Final = "signature"
OPAQUE: Final = "opaque"
CALL: Final = "call"
ARGS: Final = "args_delta"
DONE: Final = "done"
ERROR: Final = "error"

PIECES_MAX: Final = 8192

Status = str  # complete | errored | interrupted


@dataclass(slots=True)
class StreamedCall:
    """A call as its stream tells it."""

    position: int
    call_id: str
    name: str
    fragments: list[str] = field(default_factory=list)

    @property
    def raw_arguments(self) -> str:
        """The arguments as far as they came."""
        return clean_text("".join(self.fragments))

    def parse(self, *, done: bool) -> dict[str, Any] | None:
        """The arguments, or None while they are no JSON object; none at all means {} once done."""
        raw = self.raw_arguments
        if not raw:
            return {} if done else None
        return parse_arguments(raw)


@dataclass(slots=True)
class _Part:
    """Consecutive deltas that become one block."""

    kind: str
    pieces: list[str] = field(default_factory=list)
    signatures: list[str] = field(default_factory=list)
    call: StreamedCall | None = None
    provider: str = ""
    item: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return clean_text("".join(self.pieces))

    @property
    def signature(self) -> str | None:
        return clean_text("".join(self.signatures)) if self.signatures else None


@dataclass(slots=True)
class Stream:
    """What a list of events says."""

    last_seq: int = 0
    status: Status = "interrupted"
    error: str | None = None
    stop_reason: str | None = None
    usage: dict[str, Any] | None = None
    gap_at: int | None = None
    behind_gap: str = ""
    unknown_kinds: tuple[str, ...] = ()
    calls: list[StreamedCall] = field(default_factory=list)
    _parts: list[_Part] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The words so far, without thinking and calls."""
        return clean_text("".join(self.pieces))

    @property
    def pieces(self) -> list[str]:
        """The words as they were given: what one piece cut in two, joining makes whole."""
        return [piece for part in self._parts if part.kind == TEXT for piece in part.pieces]

    def _begin(self, part: _Part) -> _Part:
        self._parts.append(part)
        return part

    def _end(self, kind: str, text: str) -> None:
        if self.status != "interrupted":
            return  # The first terminal event stands.
        if kind == ERROR:
            self.status, self.error = "errored", clean_text(text)
            return
        self.status, ended = "complete", json.loads(text)
        self.stop_reason, self.usage = ended.get("stop_reason"), ended.get("usage")

    @property
    def dropped(self) -> list[StreamedCall]:
        """Calls whose arguments are no JSON object: no part of the message, never to be run."""
        done = self.status == "complete"
        return [call for call in self.calls if call.parse(done=done) is None]

    def blocks(self) -> list[Block]:
        """The blocks in stream order, empty ones and dropped calls left out."""
        done = self.status == "complete"
        return [block for part in self._parts if (block := _block(part, done)) is not None]

    @property
    def is_plain_text(self) -> bool:
        """Whether its message is one text and nothing else."""
        return len(self._parts) == 1 and self._parts[0].kind == TEXT and not self.is_signed

    @property
    def is_signed(self) -> bool:
        """Whether something in it means something only to the provider and model that made it."""
        return any(part.kind == OPAQUE or part.signatures for part in self._parts)

    def message(self, *, model: str | None, provider: str | None = None) -> Message | None:
        """The assistant's message; None if the stream has no content."""
        blocks = self.blocks()
        if not blocks:
            return None
        # A signature means something only to the provider and model that made it.
        signed = any(isinstance(block, Opaque) or _signature(block) for block in blocks)
        named = {"provider": provider, "model": model} if signed else {}
        return Message("assistant", blocks, {k: v for k, v in named.items() if v is not None})


def fold(events: Iterable[EventRow]) -> Stream:
    """Read a step's events, in order of seq."""
    stream = Stream()
    calls: dict[int | None, StreamedCall] = {}
    unknown: dict[str, None] = {}
    part: _Part | None = None
    events = iter(events)
    for event in events:
        seq, kind, call, content, valid = event
        if seq != stream.last_seq + 1 or not valid:
            stream.gap_at = stream.last_seq + 1
            stream.behind_gap = _words([event, *events])
            break
        stream.last_seq = seq
        text = content if isinstance(content, str) else content.decode("utf-8", "surrogatepass")
        if kind in (TEXT, THINKING):
            if part is None or part.kind != kind or part.signatures:
                part = stream._begin(_Part(kind))
            _add(part.pieces, text)
        elif kind == ARGS and call in calls:
            _add(calls[call].fragments, text)
        elif kind == CALL and call is not None:
            calls[call] = StreamedCall(call, *json.loads(text))
            stream.calls.append(calls[call])
            part = stream._begin(_Part(CALL, call=calls[call]))
        elif kind == SIGNATURE:
            # A signature that follows nothing it could sign is a thought that was not shown.
            if part is None or part.kind == OPAQUE:
                part = stream._begin(_Part(THINKING))
            part.signatures.append(text)
        elif kind == OPAQUE:
            provider, item = json.loads(text)
            part = stream._begin(_Part(OPAQUE, provider=provider, item=item))
        elif kind in (DONE, ERROR):
            stream._end(kind, text)
        else:
            unknown[kind] = None
    stream.unknown_kinds = tuple(unknown)
    return stream


def _add(pieces: list[str], text: str) -> None:
    """One more piece. Joined now and then: a million small texts take ten times their length."""
    pieces.append(text)
    if len(pieces) >= PIECES_MAX:
        pieces[:] = ["".join(pieces)]


def _block(part: _Part, done: bool) -> Block | None:
    """A part as a block; None if it has no content or must be left out."""
    if part.call is not None:
        call, arguments = part.call, part.call.parse(done=done)
        if arguments is None:
            return None
        return ToolUse(
            call.call_id, call.name, arguments, call.raw_arguments or None, part.signature
        )
    if part.kind == OPAQUE:
        return Opaque(part.provider, part.item)
    text, signature = part.text, part.signature
    if not text and signature is None:
        return None
    return Text(text, signature) if part.kind == TEXT else Thinking(text, signature)


def _signature(block: Block) -> str | None:
    return getattr(block, "signature", None)


def _words(events: Iterable[EventRow]) -> str:
    words = []
    for event in events:
        if event.kind in (TEXT, THINKING, ARGS):
            content: object = event.content  # Damaged: it may be anything that SQLite can hold.
            if isinstance(content, bytes):
                content = content.decode(errors="replace")
            words.append(str(content))
    return clean_text("".join(words))


__all__ = ["Stream", "StreamedCall", "fold"]
