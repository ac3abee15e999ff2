"""Acknowledgements on a pipe: how a drill hears of each call that a program was promised.

A drill sets HOLDFAST_ACK_FD to `pid:fd` in the program that it is going to kill.  Every store that
this very process opens then writes one line for each call that is on record, so an unchanged
program can be held to the promises.  A line is a JSON list:

    ["!", kind, step_id, seq, data, opening]    a call has been acknowledged; the kinds and their
                                                data are those of `holdfast.recovery.oracle`
    ["?", kind, step_id, seq, data]             a call is about to be made (agents that tell)
    ["*", word, opening, path]                  opening, open: a store is being, has been opened

A line is written behind its commit and before the caller goes on.  A kill may tear the last line:
whoever reads ignores a line without its end.

The variable is taken out of the environment when it is read, and is for one process: a child that
inherits it, a number that is no pipe, or any other value is warned of and ignored.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from holdfast.journal.blocks import ToolResult
from holdfast.journal.messages import Message
from holdfast.journal.observers import Observer, StoreEvent

VARIABLE = "HOLDFAST_ACK_FD"

_lock = threading.Lock()
_pipe: tuple[int, int] | None = None  # pid, descriptor: read once, used by every later opening
_openings = 0


class Line(NamedTuple):
    """A line of the pipe."""

    sign: str  # "!", "?" or "*"
    kind: str
    step_id: int = 0
    seq: int = 0
    data: Any = None
    opening: int = 0


def encode(sign: str, *fields: Any) -> bytes:
    """A line as it stands in the pipe."""
    return json.dumps([sign, *fields], separators=(",", ":")).encode() + b"\n"


def decode(text: bytes) -> list[Line]:
    """The whole lines of what was read; what a kill has torn off is ignored."""
    lines = []
    for row in text.split(b"\n")[:-1]:
        sign, kind, *rest = json.loads(row)
        if sign == "*":
            opening, path = (*rest, 0, None)[:2] if rest else (0, None)
            lines.append(Line(sign, kind, data=path, opening=opening))
        else:
            lines.append(Line(sign, kind, *rest))
    return lines


class Reporter:
    """Tells a drill what one opening of a store has acknowledged."""

    def __init__(self, pipe: tuple[int, int], opening: int, path: str) -> None:
        self._pid, self._fd = pipe
        self._opening = opening
        self._path = path
        self._names: dict[tuple[int | None, int | None], str] = {}  # of calls, by step and position
        self.mark("opening")

    def mark(self, word: str) -> None:
        """The store is being opened, or is open."""
        self._write(encode("*", word, self._opening, self._path))

    def __call__(self, event: StoreEvent) -> None:
        """Something is on record; work of the disk and of recovery is nobody's call."""
        make = _KINDS.get(event.kind)
        if make is None:
            return
        kind, data = make(event)
        # Within its step a call is a number; the drill knows it by the label that it was given.
        if kind == "call":
            self._names[event.step_id, event.call] = data[0]
        elif kind == "args":
            data[0] = self._names.get((event.step_id, event.call), "")
        elif kind in ("commit", "discard"):
            gone = [key for key in self._names if key[0] == event.step_id]
            for key in gone:
                del self._names[key]
        self._write(encode("!", kind, event.step_id or 0, event.seq or 0, data, self._opening))

    def _write(self, line: bytes) -> None:
        # A forked child has the descriptor too, but its calls are not those that are counted.
        if os.getpid() != self._pid:
            return
        try:
            with _lock:
                while line:
                    line = line[os.write(self._fd, line) :]
        except OSError:
            pass  # The drill is gone: nobody listens, and the program is not to suffer.


def reporter(path: str | os.PathLike[str]) -> Reporter | None:
    """What an opening reports to, if a drill has asked for it; bad values are warned of."""
    global _pipe, _openings
    value = os.environ.get(VARIABLE)
    if value is None and _pipe is None:
        return None
    with _lock:
        value = os.environ.pop(VARIABLE, None)
        if value is not None:
            _pipe = _pipe_of(value)
        if _pipe is None or _pipe[0] != os.getpid():
            return None
        _openings += 1
        opening = _openings
    try:
        place = os.path.realpath(os.fsdecode(path))
    except (TypeError, ValueError):
        place = ""  # No path at all: whoever opens it says so.
    return Reporter(_pipe, opening, place)


def together(first: Observer | None, second: Observer | None) -> Observer | None:
    """Tell two watchers."""
    if first is None or second is None:
        return first or second
    one, other = first, second

    def tell(event: StoreEvent) -> None:
        one(event)
        other(event)

    return tell


def _pipe_of(value: str) -> tuple[int, int] | None:
    problem = None
    if not re.fullmatch(r"[0-9]{1,10}:[0-9]{1,10}", value):
        problem = "expected pid:fd"
    else:
        pid, fd = map(int, value.split(":"))
        if pid != os.getpid():
            problem = f"it is for process {pid}, and this is {os.getpid()}"
        else:
            problem = _no_pipe(fd)
    if problem is not None:
        warnings.warn(
            f"{VARIABLE} is {value[:40]!r}: {problem}; acknowledgements are not reported",
            RuntimeWarning,
            stacklevel=5,
        )
        return None
    os.set_inheritable(fd, False)  # The tools of the program have no business with it.
    return pid, fd


def _no_pipe(fd: int) -> str | None:
    try:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return f"descriptor {fd} is no pipe"
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            return f"descriptor {fd} cannot be written to"
    except (OSError, OverflowError):
        return f"descriptor {fd} is not open"
    return None


# --- events in the words of the oracle -----------------------------------------------------------


def _append(event: StoreEvent) -> tuple[str, Any]:
    given: Any = event.data
    kind, content = given
    if kind == "call":
        return kind, json.loads(content)
    if kind == "args_delta":
        return "args", ["", content]
    return kind.removesuffix("_delta"), content


def _result(event: StoreEvent) -> tuple[str, Any]:
    result = event.data
    assert isinstance(result, ToolResult)
    content: Any = result.content
    if not isinstance(content, str):
        content = [block.model_dump(mode="json") for block in content]
    return "result", [result.tool_use_id, content, result.is_error]


def _add(event: StoreEvent) -> tuple[str, Any]:
    message = event.data
    assert isinstance(message, Message)
    return message.role, [event.session_id, message.text]


def _of_session(event: StoreEvent) -> tuple[str, Any]:
    return event.kind, event.session_id


def _plain(event: StoreEvent) -> tuple[str, Any]:
    return event.kind, event.data


_KINDS: dict[str, Callable[[StoreEvent], tuple[str, Any]]] = {
    "append": _append,
    "result": _result,
    "add": _add,
    "start": _plain,
    "process": _plain,
    **dict.fromkeys(("session", "delete", "begin", "seal", "commit", "discard"), _of_session),
    **dict.fromkeys(("pop", "rewrite"), _of_session),
}
