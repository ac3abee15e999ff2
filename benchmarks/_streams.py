"""Many streams at once: the loads of concurrency.py, and what is noted while they run.

In the closed loop a stream has its next delta as soon as the last one is on record.  A stream that
calls the sync API gives way after each delta, or the others would wait for its end; the async one
gives way by itself.  With Poisson arrivals another process writes deltas into a pipe at random
times, as a network would, and an append is timed from the moment its delta was written there.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import holdfast
from holdfast.async_store import AsyncActiveJournal, AsyncSession, AsyncStore

DELTA = "twelve chars"
TICK_S = 0.001
ARRIVAL = struct.Struct("=qI")  # when it came, of which stream


@dataclass(frozen=True, slots=True)
class Run:
    """One round of one load: times in microseconds, memory in megabytes."""

    rate: float  # deltas a second
    p50: float
    p99: float
    longest: float
    gap_ms: float  # the longest time for which the loop answered nobody
    cpu: float  # of this process, a delta
    memory: float  # at its peak

    def as_dict(self) -> dict[str, float]:
        """For another process."""
        return asdict(self)


class Watch:
    """Notes what a load does to its process, from `start` to `stop`."""

    def __init__(self) -> None:
        self.times: list[int] = []
        self.gap_ns = 0
        self._ticker: asyncio.Task[None] | None = None

    def start(self, *, loop: bool = True) -> None:
        """Begin; `loop`: also listen to the running loop."""
        forget_peak()
        if loop:
            self._ticker = asyncio.ensure_future(self._listen())
        self._cpu = time.process_time()
        self._began = perf_counter_ns()

    def stop(self) -> Run:
        """Sum up."""
        took = (perf_counter_ns() - self._began) / 1e9
        cpu = time.process_time() - self._cpu
        if self._ticker is not None:
            self._ticker.cancel()
        ranked = sorted(self.times)
        p99 = ranked[min(len(ranked) - 1, len(ranked) * 99 // 100)]
        return Run(
            len(ranked) / took,
            statistics.median(ranked) / 1000,
            p99 / 1000,
            ranked[-1] / 1000,
            self.gap_ns / 1e6,
            cpu * 1e6 / len(ranked),
            peak_mb(),
        )

    async def _listen(self) -> None:
        while True:
            began = perf_counter_ns()
            await asyncio.sleep(TICK_S)
            late = perf_counter_ns() - began - int(TICK_S * 1e9)
            self.gap_ns = max(self.gap_ns, late)


def forget_peak() -> None:
    """Let the kernel note the peak of memory from here on."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_mb() -> float:
    """The most memory that this process had since `forget_peak`."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# --- streams that call the sync API on the loop -------------------------------------------------


class Direct:
    """Steps of a plain store, appended to on the loop one after the other."""

    def __init__(self, path: Path, level: str, streams: int) -> None:
        self.store = holdfast.open(path, durability=level)
        self.sessions = [self.store.create_session(f"s{n}") for n in range(streams)]
        self.steps = [session.begin_step() for session in self.sessions]

    async def renew(self) -> None:
        """New answers: the streams begin again."""
        for step in self.steps:
            step.discard()
        self.store.engine.checkpoint()
        self.steps = [session.begin_step() for session in self.sessions]

    async def closed_loop(self, deltas: int) -> Run:
        """Each stream appends so many."""
        watch = Watch()
        note = watch.times.append
        gives_way = len(self.steps) > 1

        async def stream(append: Callable[[str], None]) -> None:
            for _ in range(deltas):
                start = perf_counter_ns()
                append(DELTA)
                note(perf_counter_ns() - start)
                if gives_way:
                    await asyncio.sleep(0)

        watch.start()
        await asyncio.gather(*(stream(step.append_text) for step in self.steps))
        run = watch.stop()
        self.store.engine.checkpoint()
        return run

    async def poisson(self, rate: float, count: int) -> Run:
        """Deltas come by themselves."""

        async def append(stream: int) -> None:
            self.steps[stream].append_text(DELTA)

        run = await arrivals(append, len(self.steps), rate, count)
        self.store.engine.checkpoint()
        return run

    async def close(self) -> None:
        """Done."""
        self.store.close()


# --- streams of the async API -------------------------------------------------------------------


class Async:
    """Steps of an async store, each written by a task of its own."""

    def __init__(self, store: AsyncStore, sessions: list[AsyncSession]) -> None:
        self.store = store
        self.sessions = sessions
        self.steps: list[AsyncActiveJournal] = []

    @classmethod
    async def open(cls, path: Path, level: str, streams: int, *, name: str = "s") -> Async:
        """A store with so many steps open."""
        store = await holdfast.open_async(path, durability=level)
        self = cls(store, [await store.create_session(f"{name}{n}") for n in range(streams)])
        self.steps = [await session.begin_step() for session in self.sessions]
        return self

    async def renew(self) -> None:
        """New answers: the streams begin again."""
        for step in self.steps:
            await step.discard()
        await self._checkpoint()
        self.steps = [await session.begin_step() for session in self.sessions]

    async def closed_loop(self, deltas: int) -> Run:
        """Each stream appends so many."""
        watch = Watch()
        note = watch.times.append

        async def stream(append: Callable[[str], Awaitable[None]]) -> None:
            for _ in range(deltas):
                start = perf_counter_ns()
                await append(DELTA)
                note(perf_counter_ns() - start)

        watch.start()
        await asyncio.gather(*(stream(step.append_text) for step in self.steps))
        run = watch.stop()
        await self._checkpoint()
        return run

    async def poisson(self, rate: float, count: int) -> Run:
        """Deltas come by themselves."""
        steps = self.steps

        def append(stream: int) -> Awaitable[None]:
            return steps[stream].append_text(DELTA)

        run = await arrivals(append, len(steps), rate, count)
        await self._checkpoint()
        return run

    async def turns(self, deltas: int) -> Run:
        """Whole turns: deltas, a tool that runs for a moment, its result, the end of the step."""
        watch = Watch()
        note = watch.times.append

        async def turn(session: AsyncSession) -> None:
            async with session.begin_step() as step:
                for _ in range(deltas):
                    start = perf_counter_ns()
                    await step.append_text(DELTA)
                    note(perf_counter_ns() - start)
                await step.announce_call("c1", "look")
                await step.append_args("c1", '{"path": "a"}')
                await step.append_done()
                message = await step.seal()
                await step.execute(message.tool_calls[0], tool)

        async def tool(path: str) -> str:
            await asyncio.sleep(0.002)
            return path

        watch.start()
        await asyncio.gather(*(turn(session) for session in self.sessions))
        return watch.stop()

    async def close(self) -> None:
        """Done."""
        await self.store.close()

    async def _checkpoint(self) -> None:
        await asyncio.to_thread(self.store._store.engine.checkpoint)


async def arrivals(
    append: Callable[[int], Awaitable[None]], streams: int, rate: float, count: int
) -> Run:
    """Let another process say when deltas come; an append is timed from then on."""
    loop = asyncio.get_running_loop()
    watch = Watch()
    ended: asyncio.Future[None] = loop.create_future()
    tasks: set[asyncio.Task[None]] = set()
    rest = b""
    begun = False

    async def arrived(came: int, stream: int) -> None:
        await append(stream)
        watch.times.append(perf_counter_ns() - came)

    def readable() -> None:
        nonlocal rest, begun
        if not begun:
            begun = True
            watch.start()
        new = os.read(pipe.fileno(), 1 << 16)
        if not new:
            loop.remove_reader(pipe)
            ended.set_result(None)
        rest += new
        whole = len(rest) - len(rest) % ARRIVAL.size
        for came, stream in ARRIVAL.iter_unpack(rest[:whole]):
            task = loop.create_task(arrived(came, stream))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        rest = rest[whole:]

    command = [sys.executable, __file__, str(streams), str(rate), str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as source:
        pipe = source.stdout
        assert pipe is not None
        loop.add_reader(pipe, readable)
        await ended
    while tasks:
        await asyncio.wait(tasks)
    return watch.stop()


def arrive(streams: int, rate: float, count: int) -> None:
    """Write deltas as they come: at random times, each of a random stream."""
    chance = random.Random(0)
    due = time.perf_counter() + 0.05
    for _ in range(count):
        due += chance.expovariate(rate)
        time.sleep(max(0.0, due - time.perf_counter()))
        os.write(1, ARRIVAL.pack(perf_counter_ns(), chance.randrange(streams)))


# --- threads ------------------------------------------------------------------------------------


def threads(steps: Sequence[Any], deltas: int) -> Run:
    """A thread a step, each appending so many."""
    watch = Watch()
    ready = threading.Barrier(len(steps) + 1)

    def stream(append: Callable[[str], None]) -> None:
        times = []
        ready.wait()
        for _ in range(deltas):
            start = perf_counter_ns()
            append(DELTA)
            times.append(perf_counter_ns() - start)
        watch.times.extend(times)

    workers = [threading.Thread(target=stream, args=(step.append_text,)) for step in steps]
    for worker in workers:
        worker.start()
    watch.start(loop=False)
    ready.wait()
    for worker in workers:
        worker.join()
    return watch.stop()


if __name__ == "__main__":
    arrive(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
