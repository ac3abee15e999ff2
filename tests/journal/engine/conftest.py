"""Children that are forked, told what to do, and looked at afterwards."""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast.journal.engine.engine import SqliteEngine
from holdfast.journal.engine.schema import SEQ_BITS


class Child:
    """A forked process that sends pickled objects and waits for a word between them."""

    def __init__(self, work: Callable[[Child], object]) -> None:
        told, self._answers = os.pipe()
        self._words, heard = os.pipe()
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.close(told)
            os.close(heard)
            try:
                work(self)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        os.close(self._answers)
        os.close(self._words)
        self._told, self._heard = os.fdopen(told, "rb"), heard

    def tell(self, thing: Any) -> None:
        """In the child: send something to the parent."""
        os.write(self._answers, pickle.dumps(thing))

    def wait(self) -> None:
        """In the child: stop until the parent says go on."""
        os.read(self._words, 1)

    def hear(self) -> Any:
        """In the parent: the next thing the child sends."""
        return pickle.load(self._told)

    def go_on(self) -> None:
        """In the parent: let the child pass its next `wait`."""
        os.write(self._heard, b".")

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.join()

    def join(self) -> int:
        """Wait for the end; the exit code, or minus the signal."""
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status

    def close(self) -> None:
        self.kill()
        self._told.close()
        os.close(self._heard)


@pytest.fixture
def fork() -> Iterator[Callable[[Callable[[Child], object]], Child]]:
    """Fork a child that runs a function; whatever is left of it is killed after the test."""
    children: list[Child] = []

    def start(work: Callable[[Child], object]) -> Child:
        children.append(Child(work))
        return children[-1]

    yield start
    for child in children:
        child.close()


class Steps:
    """Steps of an engine, by the operations that a stream journal uses."""

    @staticmethod
    def begin(engine: SqliteEngine) -> int:
        step_id = engine.begin_step(
            session=None, kind="step", model_name=None, nonce=secrets.token_hex(8)
        )
        assert isinstance(step_id, int)
        return step_id

    @staticmethod
    def append(engine: SqliteEngine, step_id: int, seq: int, content: str = "x") -> None:
        with engine.lock:
            engine.append(step_id << SEQ_BITS | seq, "text_delta", None, content)

    @staticmethod
    def texts(engine: SqliteEngine, step_id: int) -> list[str | bytes]:
        return [event.content for event in engine.events(step_id)]


@pytest.fixture
def steps() -> type[Steps]:
    return Steps
