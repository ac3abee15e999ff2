"""The async twins: the same names, promises and errors, as coroutines over the same store.

No rule is written a second time: each method carries out its twin's, on the loop where that costs
microseconds, in the writer thread where it waits for a disk.  asyncio; trio is not promised.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from holdfast.asyncio_queue import IN_A_ROW_MAX, AsyncQueue
from holdfast.history.entries import MessageId
from holdfast.history.full_history import FullHistory
from holdfast.journal.active import as_content
from holdfast.journal.blocks import Image, Text, ToolResult, ToolUse
from holdfast.journal.durability import Durability
from holdfast.journal.errors import HoldfastError
from holdfast.journal.messages import Message
from holdfast.journal.stream import ARGS, TEXT, THINKING
from holdfast.recovery.recover import RecoveryReport
from holdfast.recovery.validation import ValidationReport
from holdfast.session import Session
from holdfast.step import SessionStep
from holdfast.store import SessionInfo, Store, StoreStats, open_store


async def open_async(path: str | os.PathLike[str], **options: Any) -> AsyncStore:
    """As `holdfast.open`, with the same options; a resolver may be a coroutine function.

    async with await holdfast.open_async("agent.db") as store: ...
    """
    loop = asyncio.get_running_loop()
    resolver = options.get("resolver")
    if resolver is not None and inspect.iscoroutinefunction(resolver):
        options["resolver"] = lambda call: asyncio.run_coroutine_threadsafe(
            resolver(call), loop
        ).result()
    store = await asyncio.to_thread(open_store, path, **options)
    return AsyncStore(store, loop)


class AsyncStore:
    """An open store on one event loop."""

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        self._store = store
        self._queue = AsyncQueue(store.engine, loop)

    @property
    def path(self) -> Path:
        """Where the store is."""
        return self._store.path

    @property
    def durability(self) -> Durability:
        """What a returned call has survived."""
        return self._store.durability

    @property
    def owner_id(self) -> int | None:
        """Who this opening of the store is; None when read-only."""
        return self._store.owner_id

    @property
    def recovery(self) -> RecoveryReport:
        """What the pass at open found and did."""
        return self._store.recovery

    def __reduce__(self) -> str:
        raise TypeError("a store cannot be pickled: open it in the other process by its path")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Wait for what was accepted, then close as `Store.close` does. Idempotent."""
        await self._queue.close(self._store.close)

    async def create_session(
        self,
        session_id: str | None = None,
        *,
        model: str | None = None,
        provider: str | None = None,
        title: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> AsyncSession:
        """As `Store.create_session`."""
        session = await self._queue.call(
            lambda: self._store.create_session(
                session_id, model=model, provider=provider, title=title, metadata=metadata
            )
        )
        return AsyncSession(session, self._queue)

    async def session(self, session_id: str) -> AsyncSession:
        """As `Store.session`."""
        session = await asyncio.to_thread(self._store.session, session_id)
        return AsyncSession(session, self._queue)

    async def sessions(self) -> list[SessionInfo]:
        """As `Store.sessions`."""
        return await asyncio.to_thread(self._store.sessions)

    async def delete_session(self, session_id: str, *, purge: bool = False) -> None:
        """As `Store.delete_session`."""
        await self._queue.call(lambda: self._store.delete_session(session_id, purge=purge))

    async def purge(self) -> None:
        """As `Store.purge`."""
        await self._queue.call(self._store.purge)

    async def stats(self) -> StoreStats:
        """As `Store.stats`."""
        return await asyncio.to_thread(self._store.stats)

    async def backup(self, path: str | os.PathLike[str]) -> None:
        """As `Store.backup`."""
        await asyncio.to_thread(self._store.backup, path)


class AsyncSession:
    """One conversation; `history` is the plain FullHistory, which reads on the spot."""

    def __init__(self, session: Session, queue: AsyncQueue) -> None:
        self._session = session
        self._queue = queue
        self.id = session.id
        self.history: FullHistory = session.history

    def __reduce__(self) -> str:
        raise TypeError(f"session {self.id!r} cannot be pickled")

    async def add(self, message: Message) -> MessageId:
        """As `Session.add`."""
        return await self._queue.call(lambda: self._session.add(message))

    async def add_user(self, text: str) -> MessageId:
        """As `Session.add_user`."""
        return await self._queue.call(lambda: self._session.add_user(text))

    async def add_system(self, text: str) -> MessageId:
        """As `Session.add_system`."""
        return await self._queue.call(lambda: self._session.add_system(text))

    def begin_step(self, model: str | None = None) -> StepBeginning:
        """As `Session.begin_step`: await it, or enter it with `async with`."""
        return StepBeginning(self._session, self._queue, model)

    async def messages(self) -> list[Message]:
        """As `Session.messages`."""
        return await asyncio.to_thread(self._session.messages)

    async def repair(self) -> ValidationReport:
        """As `Session.repair`."""
        return await self._queue.call(self._session.repair)


class StepBeginning:
    """A step about to begin: an awaitable that is also an async context manager."""

    def __init__(self, session: Session, queue: AsyncQueue, model: str | None) -> None:
        self._session = session
        self._queue = queue
        self._model = model
        self._step: AsyncActiveJournal | None = None

    def __await__(self) -> Generator[Any, None, AsyncActiveJournal]:
        return self._begin().__await__()

    async def __aenter__(self) -> AsyncActiveJournal:
        self._step = await self._begin()
        return self._step

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._step is not None
        await self._step.__aexit__(kind, error, trace)

    async def _begin(self) -> AsyncActiveJournal:
        begun: list[SessionStep] = []
        try:
            await self._queue.call(lambda: begun.append(self._session.begin_step(self._model)))
        except asyncio.CancelledError:
            # The caller is gone and will never have the handle: nobody could finish the step.
            await self._queue.call(lambda: [step.discard() for step in begun])
            raise
        return AsyncActiveJournal(begun[0], self._queue)


class AsyncActiveJournal:
    """The handle of one step in flight. An awaited append resolves when its event is durable."""

    def __init__(self, step: SessionStep, queue: AsyncQueue) -> None:
        self._step = step
        self._queue = queue
        self._ended = False
        queue.open_steps += 1

    def __reduce__(self) -> str:
        raise TypeError(f"step {self.step_id} cannot be pickled")

    @property
    def step_id(self) -> int:
        """Unique and rising for the life of the store, never reused."""
        return self._step.step_id

    @property
    def model_name(self) -> str | None:
        """The model that answers in this step."""
        return self._step.model_name

    @property
    def text(self) -> str:
        """The text so far, without thinking and calls."""
        return self._step.text

    @property
    def dropped_calls(self) -> tuple[str, ...]:
        """After seal: calls whose arguments are no JSON object."""
        return self._step.dropped_calls

    # --- the stream -----------------------------------------------------------------------------

    async def append_text(self, content: str) -> None:
        """As `ActiveJournal.append_text`."""
        queue = self._queue
        if queue.open_steps > 1 or not queue.straight_through(self._step, TEXT, content):
            await queue.append(self._step, TEXT, content)
        elif queue.in_a_row > IN_A_ROW_MAX:
            await queue.give_way()

    async def append_thinking(self, content: str) -> None:
        """As `ActiveJournal.append_thinking`."""
        queue = self._queue
        if queue.open_steps > 1 or not queue.straight_through(self._step, THINKING, content):
            await queue.append(self._step, THINKING, content)
        elif queue.in_a_row > IN_A_ROW_MAX:
            await queue.give_way()

    async def append_args(self, call_id: str, fragment: str) -> None:
        """As `ActiveJournal.append_args`."""
        await self._queue.append(self._step, ARGS, fragment, call_id)

    async def append_signature(self, signature: str) -> None:
        """As `ActiveJournal.append_signature`."""
        await self._queue.call(lambda: self._step.append_signature(signature))

    async def append_opaque(self, provider: str, item: dict[str, Any]) -> None:
        """As `ActiveJournal.append_opaque`."""
        await self._queue.call(lambda: self._step.append_opaque(provider, item))

    async def announce_call(self, call_id: str, name: str) -> None:
        """As `ActiveJournal.announce_call`."""
        await self._queue.call(lambda: self._step.announce_call(call_id, name))

    async def append_done(
        self, *, stop_reason: str | None = None, usage: Mapping[str, Any] | None = None
    ) -> None:
        """As `ActiveJournal.append_done`."""
        await self._queue.call(lambda: self._step.append_done(stop_reason=stop_reason, usage=usage))

    async def append_error(self, message: str) -> None:
        """As `ActiveJournal.append_error`."""
        await self._queue.call(lambda: self._step.append_error(message))

    async def seal(self) -> Message:
        """As `ActiveJournal.seal`."""
        return await self._queue.call(self._step.seal)

    # --- the calls ------------------------------------------------------------------------------

    async def start_call(self, call_id: str, *, replay: str = "never") -> None:
        """As `ActiveJournal.start_call`."""
        await self._queue.call(lambda: self._step.start_call(call_id, replay=replay))

    async def record_process(self, call_id: str, pid: int) -> None:
        """As `ActiveJournal.record_process`."""
        await self._queue.call(lambda: self._step.record_process(call_id, pid))

    async def operation_id(self, call_id: str) -> str:
        """As `ActiveJournal.operation_id`."""
        return await self._queue.call(lambda: self._step.operation_id(call_id))

    async def record_result(
        self, call_id: str, content: str | Sequence[Text | Image], *, is_error: bool = False
    ) -> ToolResult:
        """As `ActiveJournal.record_result`."""
        return await self._queue.call(
            lambda: self._step.record_result(call_id, content, is_error=is_error)
        )

    async def execute(self, call: ToolUse, fn: Callable[..., Any]) -> ToolResult:
        """As `ActiveJournal.execute`; awaits async functions and runs sync ones in a thread."""
        known = await self._queue.call(lambda: self._step._before_run(call, fn))
        if known is not None:
            return known
        try:
            if inspect.iscoroutinefunction(fn):
                value = await fn(**call.input)
            else:
                value = await asyncio.to_thread(fn, **call.input)
                if inspect.isawaitable(value):
                    value = await value
        except Exception as error:
            failure = error
            return await self._queue.call(lambda: self._step._record_failure(call.id, failure))
        # As the sync twin: kept until it is on record, since the tool must not run again.
        result = ToolResult(call.id, as_content(value))
        return await self._queue.call(lambda: self._step._record_run(result))

    # --- the end --------------------------------------------------------------------------------

    async def commit(self) -> list[MessageId]:
        """As `ActiveJournal.commit`."""
        ids = await self._queue.call(self._step.commit)
        self._end()
        return ids

    async def discard(self) -> int:
        """As `ActiveJournal.discard`."""
        removed = await self._queue.call(self._step.discard)
        self._end()
        return removed

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Settle the step as the sync twin does; a cancellation goes on afterwards."""
        try:
            await self._queue.call(lambda: self._step.__exit__(kind, error, trace))
        except HoldfastError as failed:
            if error is None:
                raise
            error.add_note(f"holdfast: step {self.step_id} is left to recovery ({failed})")
        finally:
            self._end()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._queue.open_steps -= 1
