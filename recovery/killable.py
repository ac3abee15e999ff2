"""A child process for a test: it runs a function or a script, and is killed at a point.

    child = Killable(agent, path)     # a function of a module, or the path of a script
    child.kill_at("text", nth=3)      # as soon as three pieces of text are on record
    child.acks                        # every call that had been acknowledged by then

The child is a fresh interpreter, never a fork: what the test has open stays the test's own.  The
stores that it opens report each acknowledgement (`holdfast.recovery.acks`), and so a test can wait
for what it likes, kill, and hold the store to what was promised.
"""

from __future__ import annotations

import base64
import importlib.util
import inspect
import os
import pickle
import runpy
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from holdfast.recovery.acks import VARIABLE, Line, decode
from holdfast.recovery.told import Ack

PIPE_BYTES = 1 << 16


class Killable:
    """A child that lives until it is killed, or ends by itself."""

    def __init__(self, target: Callable[..., object] | str | os.PathLike[str], *args: Any) -> None:
        order = pickle.dumps((*_where(target), sys.path, args))
        self._listen, tell = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "holdfast.recovery.killable", str(tell)],
                stdin=subprocess.PIPE,
                pass_fds=[tell],
            )
        finally:
            os.close(tell)
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(base64.b64encode(order))
        self._text = b""
        self._lines: list[Line] = []

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def acks(self) -> list[Ack]:
        """What was acknowledged so far, as `check_promises` wants it; of a dead child: all."""
        return [Ack(*line[1:5]) for line in self._lines if line.sign == "!"]

    def wait_for(self, kind: str, *, nth: int = 1, timeout: float = 30.0) -> None:
        """Wait until an acknowledgement of this kind has come for the nth time in its life.

        The kinds are those of the oracle (text, thinking, call, args, done, seal, start, result,
        commit, user ...), and `opening` and `open` for the store itself.
        """
        deadline = time.monotonic() + timeout
        while sum(line.kind == kind for line in self._lines) < nth:
            if not self._hear(deadline - time.monotonic()):
                found = [line.kind for line in self._lines]
                raise AssertionError(
                    f"the child has not come to {kind!r} number {nth}; it acknowledged {found}"
                )

    def kill(self) -> None:
        """SIGKILL, now. What it had acknowledged is in `acks`; nothing else of it is left."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self.wait()

    def kill_at(self, kind: str, *, nth: int = 1, timeout: float = 30.0) -> None:
        """Wait for a point, and kill."""
        try:
            self.wait_for(kind, nth=nth, timeout=timeout)
        finally:
            self.kill()

    def wait(self, timeout: float = 30.0) -> int:
        """Wait for its end; its exit code, negative for a signal."""
        deadline = time.monotonic() + timeout
        while self._hear(deadline - time.monotonic()):
            pass
        return self._process.wait(max(0.1, deadline - time.monotonic()))

    def close(self) -> None:
        """Kill it if it lives, and let go of its pipe."""
        if self._listen >= 0:
            self.kill()
            os.close(self._listen)
            self._listen = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _hear(self, seconds: float) -> bool:
        """Take in what comes through the pipe; False if it is over, or nothing came in time."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listen, selectors.EVENT_READ)
            if not selector.select(max(0.0, seconds)):
                return False
        text = os.read(self._listen, PIPE_BYTES)
        whole, end, self._text = (self._text + text).rpartition(b"\n")
        self._lines += decode(whole + end)
        return bool(text)


def _where(target: Callable[..., object] | str | os.PathLike[str]) -> tuple[str, str, str]:
    """The file, the module and the name of a function; a script has neither of the last two."""
    if isinstance(target, str | os.PathLike):
        return str(Path(target)), "", ""
    name = getattr(target, "__qualname__", "<>")
    if "<" in name:
        raise TypeError(f"{target!r} is not a function of a module: another process cannot find it")
    return str(inspect.getsourcefile(target)), target.__module__, name


def main() -> None:
    """In the child: become what was asked for."""
    path, module_name, name, search, args = pickle.loads(base64.b64decode(sys.stdin.buffer.read()))
    sys.path[:] = search
    os.environ[VARIABLE] = f"{os.getpid()}:{sys.argv[1]}"
    if not name:
        sys.argv = [path, *map(str, args)]
        runpy.run_path(path, run_name="__main__")
        return
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    target: Any = module
    for part in name.split("."):
        target = getattr(target, part)
    target(*args)


if __name__ == "__main__":
    main()
