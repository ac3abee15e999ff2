"""Where the processes that a drill kills are born.

The process of the caller may have threads and stores, and must not be forked.  So a nursery runs in
a process of its own, with one thread and no store open, and forks there: an agent in a few
milliseconds, or the user's program.  It does not reap the dead before it is told to, so a pid is
never somebody else's when the kill arrives.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
from types import TracebackType
from typing import Any, Self

from holdfast.recovery.acks import VARIABLE, encode

REQUEST_MAX = 1 << 16
NOT_FOUND = 127  # as a shell has it


class Nursery:
    """The drill's end."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "holdfast.recovery.nursery", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._answers = self._control.makefile("r")

    def start(self, order: dict[str, Any], fds: list[int]) -> int:
        """Start a process that has these descriptors; its pid.  They are closed here."""
        try:
            socket.send_fds(self._control, [json.dumps(order).encode()], fds)
        finally:
            for fd in fds:
                os.close(fd)
        return self._answer()

    def reap(self, pid: int) -> int:
        """Wait for the end of a process; its exit code, negative for a signal."""
        self._control.sendall(json.dumps({"reap": pid}).encode())
        return self._answer()

    def _answer(self) -> int:
        line = self._answers.readline()
        if not line:
            raise ChildProcessError("the process that starts the agents of a drill has died")
        return int(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._answers.close()
        self._control.close()
        self._process.wait()


# --- in the other process ------------------------------------------------------------------------


def main() -> None:
    """Serve one drill on the socket that is given by its number, until the drill hangs up."""
    import holdfast
    from holdfast.recovery import drill_agent  # noqa: F401

    # Loaded here, so that no agent has to: the store, and the ranks, which take longest.
    importlib.import_module("holdfast.store")
    holdfast.TokenCounter().count_str("ready")
    control = socket.socket(fileno=int(sys.argv[1]))
    while True:
        # One request is one send, and the drill waits for its answer before the next.
        message, fds, _, _ = socket.recv_fds(control, REQUEST_MAX, 2)
        if not message:
            return
        order = json.loads(message)
        if "reap" in order:
            _, status = os.waitpid(order["reap"], 0)
            control.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            _become(order, fds)
        for fd in fds:
            os.close(fd)
        control.sendall(f"{pid}\n".encode())


def _become(order: dict[str, Any], fds: list[int]) -> None:
    """Be an agent, or the user's program, until the kill comes; never return."""
    from holdfast.recovery.drill_agent import Agent, Teller

    status = 1
    try:
        if "argv" in order:
            status = NOT_FOUND
            _execute(order["argv"], *fds)
        Agent(Teller(fds[0], lies=order["lies"]), order).live()
    except BrokenPipeError:
        pass  # The drill is gone.
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(fds[0], encode("*", f"died: {type(error).__name__}: {error}"))
    finally:
        os._exit(status)


def _execute(argv: list[str], acks: int, words: int) -> None:
    os.setsid()  # So that whatever it starts can be killed with it.
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.dup2(words, 2)
    os.set_inheritable(acks, True)
    os.environ[VARIABLE] = f"{os.getpid()}:{acks}"
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main()
