"""The loop's side of group commit: which append goes straight through, and which waits for others.

At NORMAL an append costs microseconds, so it is done on the loop: one open stream goes straight
through, several are gathered for one tick and share a transaction.  At FULL, and whenever a FULL
commit is queued or running here or in another process, it goes to the writer thread, in order, so
that the loop never waits for a disk.
"""

from __future__ import annotations

import asyncio
from asyncio import get_running_loop
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, TypeVar, cast

from holdfast.journal.engine.engine import SqliteEngine
from holdfast.journal.errors import HoldfastError, StoreBusy, StoreClosed
from holdfast.journal.group_commit import Append, Call, GroupWriter, Job, commit_all
from holdfast.journal.writer import StepWriter

T = TypeVar("T")
IN_A_ROW_MAX = 64  # Appends straight through; then the loop goes round once.
QUEUE_MAX = 8192  # Accepted and not yet on record: past it a producer waits, and memory stays flat.


class AsyncQueue:
    """Jobs of one store on one event loop."""

    def __init__(self, engine: SqliteEngine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        engine.patience.postpone = self._postpone
        self._loop = loop
        self._writer = GroupWriter(engine, self._finished)
        self._handed_over = 0  # Jobs that the writer thread has: nobody may overtake them.
        self._tick: list[Job] = []
        self._calls = 0  # among them
        self._accepted = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._on_loop = not engine.durability.deltas_sync
        self._closed = False
        self.in_a_row = 0  # appends that went straight through since the loop last went round
        self.open_steps = 0

    def straight_through(self, writer: StepWriter, kind: str, content: str) -> bool:
        """Append here and now; False if the loop would have to wait for somebody.

        Nothing may stand before it, and no other stream be open: others would gain by sharing.
        """
        engine = self._engine
        if self._accepted or not self._on_loop or engine.in_doubt:
            return False
        if not engine.lock.acquire(blocking=False):
            return False
        engine.patience.waits = False
        try:
            writer._append(kind, content)
        except StoreBusy:
            return False
        finally:
            engine.patience.waits = True
            engine.lock.release()
        self.in_a_row += 1
        return True

    async def give_way(self) -> None:
        """Let the loop go round: a producer that never suspends by itself would keep timers, other
        tasks, cancellation and Ctrl-C from ever having their turn.
        """
        self.in_a_row = 0
        await asyncio.sleep(0)

    def append(
        self, writer: StepWriter, kind: str, content: str, call_id: str | None = None
    ) -> Awaitable[None]:
        """Resolves when the event is on record; cancelling the wait does not take it back.

        What it gives has to be awaited at once.  It is no coroutine, for the sake of speed.
        """
        if (
            self._accepted >= QUEUE_MAX
            or self._waiting
            or self._closed
            or get_running_loop() is not self._loop
        ):
            return self._append_in_turn(writer, kind, content, call_id)
        waiter: asyncio.Future[None] = asyncio.Future(loop=self._loop)
        self._accept(Append(writer, kind, content, call_id, waiter))
        return waiter

    async def _append_in_turn(
        self, writer: StepWriter, kind: str, content: str, call_id: str | None
    ) -> None:
        await self._room()
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._accept(Append(writer, kind, content, call_id, waiter))
        await waiter

    async def call(self, fn: Callable[[], T]) -> T:
        """Carry out an operation in its turn, in the writer thread."""
        await self._room()
        waiter: asyncio.Future[T] = self._loop.create_future()
        self._calls += 1
        self._accept(Call(fn, waiter))
        return await waiter

    async def close(self, last: Callable[[], None]) -> None:
        """Wait for what was accepted, do `last`, end the thread. Idempotent."""
        if self._closed:
            return
        closing = self.call(last)
        try:
            await closing
        finally:
            self._closed = True
            await asyncio.to_thread(self._writer.stop)

    # --- inside ---------------------------------------------------------------------------------

    async def _room(self) -> None:
        if self._closed:
            raise StoreClosed(self._engine.name, "the store was closed; nothing was written")
        if get_running_loop() is not self._loop:
            raise HoldfastError(
                f"{self._engine.name}: this store belongs to another event loop; nothing was"
                " written: open it again in this one"
            )
        if self._accepted >= QUEUE_MAX or self._waiting:
            turn: asyncio.Future[None] = self._loop.create_future()
            self._waiting.append(turn)
            try:
                await turn
            except BaseException:
                self._waiting.remove(turn)
                self._let_in()
                raise
            # Only now: whoever comes meanwhile sees that somebody waits, and does not overtake.
            self._waiting.remove(turn)

    def _accept(self, job: Job) -> None:
        self._accepted += 1
        tick = self._tick
        tick.append(job)
        if len(tick) == 1:
            self._loop.call_soon(self._flush)

    def _postpone(self, work: Callable[[], object]) -> None:
        """Have long work done in the writer thread; nobody waits for it by name."""
        self._calls += 1
        self._accept(Call(work, self._loop.create_future()))

    def _flush(self) -> None:
        """The tick is over: commit here what may be committed here, hand over the rest."""
        jobs: Sequence[Job] = self._tick
        self._tick = []
        only_appends, self._calls = self._calls == 0, 0
        try:
            at_once = self._on_loop and self._handed_over == 0 and not self._engine.in_doubt
            if only_appends and at_once:
                jobs = self._commit_here(cast(list[Append], jobs))
            if jobs:
                self._handed_over += len(jobs)
                self._writer.submit(jobs)
        except BaseException as interruption:
            # A signal handler raised on the loop.  Nobody may wait for ever.
            for job in jobs:
                job.error = job.error or interruption
            self._deliver(jobs)
            raise

    def _commit_here(self, jobs: list[Append]) -> Sequence[Job]:
        """Commit on the loop and answer; what would have had to wait for somebody is given back."""
        if not self._engine.lock.acquire(blocking=False):
            return jobs
        self._engine.patience.waits = False
        try:
            commit_all(self._engine, jobs)
        finally:
            self._engine.patience.waits = True
            self._engine.lock.release()
        waiting = [job for job in jobs if job.error and isinstance(job.error, StoreBusy)]
        if waiting:
            jobs = [job for job in jobs if not isinstance(job.error, StoreBusy)]
        self._deliver(jobs)
        for job in waiting:
            job.error = None
        return waiting

    def _finished(self, jobs: list[Job]) -> None:
        """In the writer thread: wake those who wait, on their loop."""
        # If the loop is closed: what is on record is on record, and nobody waits any more.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._deliver_handed, jobs)

    def _deliver_handed(self, jobs: Sequence[Job]) -> None:
        self._handed_over -= len(jobs)
        self._deliver(jobs)

    def _deliver(self, jobs: Sequence[Job]) -> None:
        self._accepted -= len(jobs)
        for job in jobs:
            waiter: asyncio.Future[Any] = job.waiter
            if waiter.done():
                continue  # Cancelled: the event is on record all the same.
            if job.error is None:
                waiter.set_result(job.result)
            else:
                waiter.set_exception(job.error)
        if self._waiting:
            self._let_in()

    def _let_in(self) -> None:
        """Give those who wait for room their turn, in order."""
        for turn in islice(self._waiting, max(0, QUEUE_MAX - self._accepted)):
            if not turn.done():
                turn.set_result(None)
