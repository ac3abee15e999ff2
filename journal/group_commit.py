"""Group commit: appends of many streams share a transaction, and one thread waits for the disk.

INVARIANT  A job is answered only when its event is on record.  Jobs of one step are carried out in
           the order they were given.  A job that fails fails alone: its neighbours are committed
           without it, and no step gets a gap.

Events get their seq here, at the moment of the commit and under the store's lock, so whatever is
refused, cancelled or fails before that never leaves a hole.  The rules are the step's own; nothing
of them is written down twice.

The writer thread takes all that has gathered, commits it in one transaction, and takes what has
gathered meanwhile before those who waited are woken.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from holdfast.journal.engine.engine import SqliteEngine
from holdfast.journal.engine.steps import EventRecord, event_record
from holdfast.journal.errors import HoldfastError, StoreBusy
from holdfast.journal.observers import StoreEvent
from holdfast.journal.writer import Doubt, StepWriter

BATCH_MAX = 4096  # Events a transaction: bounds how long anybody waits for his neighbours.
YIELDS_MAX = 20  # How often the writer lets others run before it goes on without them.


class Append:
    """One event of one step on its way to the record, and somebody who waits for it."""

    __slots__ = ("call", "content", "error", "kind", "seq", "waiter", "writer")
    result = None

    def __init__(
        self, writer: StepWriter, kind: str, content: str, call: int | str | None, waiter: Any
    ) -> None:
        self.writer = writer
        self.kind = kind
        self.content = content
        self.call = call  # a call by its position, or by a label that is looked up in its turn
        self.waiter = waiter
        self.error: BaseException | None = None
        self.seq: int | None = None  # its place on record, once it has one


class Call:
    """Any other operation, in a transaction of its own."""

    __slots__ = ("error", "fn", "result", "waiter")

    def __init__(self, fn: Callable[[], Any], waiter: Any) -> None:
        self.fn = fn
        self.waiter = waiter
        self.error: BaseException | None = None
        self.result: Any = None

    def run(self) -> None:
        """Carry it out; what it raises is for whoever waits."""
        try:
            self.result = self.fn()
        except BaseException as error:
            self.error = error


Job = Append | Call
# An event with the place that it is about to get.
Accepted = tuple[Append, StepWriter, Doubt]


def commit_appends(engine: SqliteEngine, jobs: Sequence[Append]) -> None:
    """Put events of any number of steps on record in one transaction; errors stay with jobs."""
    with engine.lock:
        heads: dict[StepWriter, int] = {}
        accepted: list[Accepted] = []
        records: list[EventRecord] = []
        # Every delta of every stream comes through here: the common case calls nothing of a step.
        for job in jobs:
            writer, kind, content = job.writer, job.kind, job.content
            call: int | None = None
            if (
                job.call is not None
                or writer._doubt is not None
                or writer._shut is not None
                or type(content) is not str
            ):
                try:
                    call = writer._admit_event(kind, content, job.call)
                    if writer._doubt is not None and writer not in heads:
                        # Something of this step may have landed unseen: the slow way looks first.
                        writer._append(kind, content, call)
                        job.seq = writer._seq
                        continue
                except HoldfastError as error:
                    job.error = error
                    continue
            seq = heads[writer] = heads.get(writer, writer._seq) + 1
            accepted.append((job, writer, (seq, kind, content, call)))
            records.append(event_record(writer._base | seq, kind, call, content))
        if not accepted:
            return
        for _, writer, doubt in accepted:
            writer._doubt = doubt
        try:
            engine.append_many(records)
        except StoreBusy:
            # Nobody was let in.  Trying them one by one could let a later event overtake.
            for _, writer, _ in accepted:
                writer._doubt = None
            raise
        except HoldfastError:
            _one_by_one(accepted)
            return
        for job, writer, (seq, kind, content, _) in accepted:
            writer._landed_with_others(seq, kind, content)
            job.seq = seq
        if engine.observer is not None:
            for _, writer, (seq, kind, content, call) in accepted:
                data = (kind, content)
                engine.observer(StoreEvent("append", writer.step_id, seq, data=data, call=call))


def _one_by_one(accepted: Sequence[Accepted]) -> None:
    """The transaction failed, and nothing of it landed: find the offender."""
    for _, writer, _ in accepted:
        writer._doubt = None
    for job, writer, (_, kind, content, call) in accepted:
        try:
            writer._append(kind, content, call)
            job.seq = writer._seq
        except HoldfastError as error:
            job.error = error


class ThreadAppend(Append):
    """One that its thread may take back, as long as the writer has not begun with it."""

    __slots__ = ("_claims",)

    def __init__(
        self, writer: StepWriter, kind: str, content: str, call: int | str | None, waiter: Any
    ) -> None:
        super().__init__(writer, kind, content, call, waiter)
        self._claims: list[str] = []

    def claimed_by(self, who: str) -> bool:
        """Whether this one was the first to claim it. Asking again gives the same answer."""
        self._claims.append(who)
        return self._claims[0] == who


# How many appends of one thread in a row it takes to believe that it is alone again.
ALONE_AFTER = 64


class ThreadQueue:
    """Appends of several threads at `power`: they wait for one sync, not each for its own."""

    def __init__(self, engine: SqliteEngine) -> None:
        self._engine = engine
        self._writer = GroupWriter(engine, _release, regulars=True)
        self._last_thread: int | None = None
        self._sharing = 0
        # By thread: an append that was handed over and whose caller has not been told. It is there
        # at the next append only if a signal handler raised while its caller waited.
        self._untold: dict[int, ThreadAppend] = {}

    def append(self, writer: StepWriter, kind: str, content: str, call: int | None = None) -> None:
        """Put an event on record: here if this thread is alone, else by the writer thread."""
        thread = threading.get_ident()
        if thread in self._untold and self._was_told_late(thread, (writer, kind, content, call)):
            return
        if thread == self._last_thread:
            self._sharing = max(0, self._sharing - 1)
        else:
            self._sharing = 0 if self._last_thread is None else ALONE_AFTER
            self._last_thread = thread
        if self._sharing == 0:
            writer._append(kind, content, call)
            return
        waiter = threading.Lock()
        waiter.acquire()
        job = ThreadAppend(writer, kind, content, call, waiter)
        self._untold[thread] = job
        self._writer.submit([job])
        waiter.acquire()
        # No call from here on: a signal handler gets in only where something is called.
        del self._untold[thread]
        if job.error is not None:
            raise job.error

    def stop(self) -> None:
        """Finish what was accepted."""
        self._writer.stop()

    def _was_told_late(self, thread: int, given: tuple[Any, ...]) -> bool:
        """Take an interrupted append back, or see it land: the same one given again is done."""
        job = self._untold[thread]
        if not job.claimed_by("owner"):
            while job.seq is None and job.error is None:
                job.waiter.acquire(timeout=0.05)
        landed = job.seq is not None and job.error is None
        is_retry = landed and given == (job.writer, job.kind, job.content, job.call)
        del self._untold[thread]
        return is_retry


def _release(jobs: list[Job]) -> None:
    for job in jobs:
        job.waiter.release()


class GroupWriter:
    """The one thread that waits for the disk, so that nobody else has to."""

    def __init__(
        self, engine: SqliteEngine, done: Callable[[list[Job]], None], *, regulars: bool = False
    ) -> None:
        self._engine = engine
        # Threads come one by one, and those of the last commit are likely to come again: without
        # a moment's wait for them each commit takes half of the threads, and there are twice as
        # many syncs.  A loop hands over all that it has at once.
        self._regulars = regulars
        self._last_count = 0
        self._done = done  # called in the writer thread with jobs that are finished
        # Made in C: a signal handler that raises cannot leave it half locked.
        self._queue: SimpleQueue[Sequence[Job] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, jobs: Sequence[Job]) -> None:
        """Hand jobs over."""
        if self._thread is None:
            self._start()
        self._queue.put(jobs)

    def stop(self) -> None:
        """Finish what was accepted, then end the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _start(self) -> None:
        with self._engine.lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="holdfast-writer", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        going_on = True
        while going_on:
            jobs, going_on = self._gathered()
            run_jobs(self._engine, jobs)
            self._done(jobs)

    def _gathered(self) -> tuple[list[Job], bool]:
        """All that has come in meanwhile; waits for the first. False: it is the last."""
        gathered: list[Job] = []
        more = self._queue.get()
        while more is not None:
            # Most jobs cannot be taken back; for those of a thread, who claims first has it.
            gathered += [
                job for job in more if type(job) is not ThreadAppend or job.claimed_by("writer")
            ]
            if self._regulars and len(gathered) < self._last_count:
                self._wait_a_moment()
            if len(gathered) >= BATCH_MAX or self._queue.empty():
                self._last_count = len(gathered)
                return gathered, True
            more = self._queue.get()
        return gathered, False

    def _wait_a_moment(self) -> None:
        """Let other threads run, until one of them brings something or it is not worth it."""
        for _ in range(YIELDS_MAX):
            if not self._queue.empty():
                return
            time.sleep(0)


def run_jobs(engine: SqliteEngine, jobs: Sequence[Job]) -> None:
    """Carry out jobs in order: neighbouring appends share a transaction, the rest has its own."""
    appends: list[Append] = []
    for job in jobs:
        if not isinstance(job, Call):
            appends.append(job)
            continue
        commit_all(engine, appends)
        appends = []
        job.run()
    commit_all(engine, appends)


def commit_all(engine: SqliteEngine, appends: Sequence[Append]) -> None:
    """`commit_appends`, with whatever else it raises left with its jobs too."""
    if not appends:
        return
    try:
        commit_appends(engine, appends)
    except BaseException as error:
        for job in appends:
            if job.error is None:
                job.error = error
