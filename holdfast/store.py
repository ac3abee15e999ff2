"""The store: one file, any number of sessions, opened by any number of processes at once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self
from weakref import WeakValueDictionary

from holdfast.history.entries import time_of
from holdfast.history.tokens import TokenCounter, TokenCounting
from holdfast.journal.durability import Durability
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.journal.engine.rows import NewEntry, NewSession, SummaryRow
from holdfast.journal.engine.steps import now_us
from holdfast.journal.errors import (
    InvalidArgument,
    SessionBusy,
    SessionExists,
    SessionNotFound,
    StepBusy,
    StoreBusy,
)
from holdfast.journal.group_commit import ThreadQueue
from holdfast.journal.jsontext import NotJson, clean_object, clean_text
from holdfast.journal.observers import StoreEvent, guarded
from holdfast.journal.owners import this_process
from holdfast.recovery.acks import reporter, together
from holdfast.recovery.policy import RecoveryPolicy, Resolver
from holdfast.recovery.recover import RecoveryReport
from holdfast.recovery.recover import recover as run_recovery
from holdfast.recovery.settle import SettledStep
from holdfast.session import Session
from holdfast.session_ids import check_session_id, make_session_id
from holdfast.step import SessionStep


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A line of the listing, from counters: nothing is counted to make it.

    `live`: a living owner has a step open in it.  `interrupted`: its newest step was cut off and
    nothing came after it, or a step is unfinished in it and nobody is left to finish it.
    """

    id: str
    title: str | None
    provider: str | None
    model: str | None
    created_at: datetime
    updated_at: datetime
    entries: int
    tokens: int
    live: bool
    interrupted: bool


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Numbers about the whole store."""

    sessions: int
    entries: int
    open_steps: int
    sealed_steps: int
    journal_events: int
    bytes: int
    wal_bytes: int


class Store:
    """An open store. Thread-safe; a context manager; `close()` is idempotent.

    `recovery` is the report of the pass at open: what a crash had left, and what became of it.
    """

    def __init__(
        self,
        engine: SqliteEngine,
        *,
        policy: RecoveryPolicy,
        resolver: Resolver | None,
        recovers: bool,
    ) -> None:
        self.engine = engine
        self.policy = policy
        self.resolver = resolver
        self.recovers = recovers
        self.recovery = RecoveryReport()
        # Steps whose handle somebody has: one that nobody can finish must block nobody.
        self.active: WeakValueDictionary[int, SessionStep] = WeakValueDictionary()
        # At `power` every append waits for the disk, and threads had better wait together.
        self.together = ThreadQueue(engine).append if engine.durability.deltas_sync else None
        self._counters: dict[str | None, TokenCounting] = {}

    @property
    def path(self) -> Path:
        """Where the store is."""
        assert self.engine.location is not None
        return self.engine.location.path

    @property
    def durability(self) -> Durability:
        """What a returned call has survived."""
        return self.engine.durability

    @property
    def owner_id(self) -> int | None:
        """Who this opening of the store is; None when read-only."""
        return self.engine.owner_id or None

    def __repr__(self) -> str:
        return f"<Store {self.engine.name}, {self.durability}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Store cannot be pickled: open it in the other process by its path")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close; active steps are left to recovery, and their handles raise StoreClosed."""
        self.engine.close()

    # --- sessions -------------------------------------------------------------------------------

    def create_session(
        self,
        session_id: str | None = None,
        *,
        model: str | None = None,
        provider: str | None = None,
        title: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Session:
        """Make a session; it is listed at once. Without an id it gets one that sorts by time."""
        return self.put_session(
            session_id, model=model, provider=provider, title=title, metadata=metadata
        )

    def put_session(
        self,
        session_id: str | None,
        *,
        model: str | None = None,
        provider: str | None = None,
        title: str | None = None,
        metadata: dict[str, Any] | None = None,
        entries: Sequence[NewEntry] = (),
        summaries: Sequence[SummaryRow] = (),
    ) -> Session:
        """Make a session that may come with its history: all in one transaction, or nothing."""
        self.engine.admit()
        name = self.engine.name
        chosen = make_session_id() if session_id is None else check_session_id(name, session_id)
        for what, value in (("model", model), ("provider", provider), ("title", title)):
            if value is not None and not isinstance(value, str):
                raise InvalidArgument(
                    f"{what} must be text, not {type(value).__name__}; nothing was written"
                )
        try:
            extra = json.dumps(clean_object({} if metadata is None else metadata))
        except NotJson as error:
            raise InvalidArgument(f"metadata: {error}; nothing was written") from None
        new = NewSession(chosen, now_us(), _clean(title), _clean(provider), _clean(model), extra)
        row = self.engine.create_session(new, entries, summaries)
        if row is None:
            raise SessionExists(
                name, chosen, "exists already and was not changed: open it with store.session()"
            )
        self._tell("session", chosen)
        if entries:
            self._tell("rewrite", chosen, count=len(entries))
        return Session(self, row)

    def session(self, session_id: str) -> Session:
        """Open a session by its id."""
        row = self.engine.session(check_session_id(self.engine.name, session_id))
        if row is None:
            raise SessionNotFound(
                self.engine.name, session_id, "no such session; store.sessions() lists them"
            )
        return Session(self, row)

    def sessions(self) -> list[SessionInfo]:
        """All sessions, last changed first."""
        engine = self.engine
        unfinished = {row.session: row for row in engine.unfinished()}
        owners = {row.owner for row in unfinished.values()} - {engine.owner_id}
        alive = {owner for owner in owners if engine.is_alive(owner)}
        listing = []
        for row in engine.sessions():
            step = unfinished.get(row.session_id)
            live = step is not None and (step.owner in alive or step.step_id in self.active)
            cut_off = row.last_status == "interrupted" if step is None else not live
            listing.append(
                SessionInfo(
                    row.session_id,
                    row.title,
                    row.provider,
                    row.model,
                    time_of(row.created_us),
                    time_of(row.updated_us),
                    row.entries,
                    row.tokens,
                    live,
                    cut_off,
                )
            )
        return listing

    def delete_session(self, session_id: str, *, purge: bool = False) -> None:
        """Remove a session and all of its journal in one transaction.

        Refused while a living owner has a step open in it.  `purge` also removes its text from
        free pages and the log, which rewrites the file.
        """
        self.engine.admit()
        name = self.engine.name
        self.session(session_id)
        while True:
            held = next(iter(self.engine.unfinished(session=session_id)), None)
            if held is not None and held.owner == self.engine.owner_id:
                if held.step_id in self.active:
                    raise StepBusy(
                        name,
                        held.step_id,
                        f"is open in session {session_id!r}; nothing was removed: commit or"
                        " discard it first",
                    )
            elif held is not None and self.engine.is_alive(held.owner):
                raise SessionBusy(
                    name,
                    session_id,
                    f"step {held.step_id} is open in it, by {self.who_is(held.owner)}; nothing was"
                    " removed: wait for it",
                )
            expect = None if held is None else held.step_id
            if self.engine.delete_session(session_id, expect=expect):
                break
        self._tell("delete", session_id)
        if purge and not self.engine.purge():
            raise StoreBusy(
                name,
                f"session {session_id!r} is deleted, but a reader keeps its text in the log;"
                " end that reader and call purge() to finish it",
            )

    def purge(self) -> None:
        """Remove the text of everything deleted so far from free pages and the log."""
        if not self.engine.purge():
            raise StoreBusy(self.engine.name, "a reader keeps old text in the log; end it first")

    # --- the whole store ------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """Count what is in the store."""
        return StoreStats(*self.engine.counts())

    def backup(self, path: str | os.PathLike[str]) -> None:
        """A consistent copy of the living store, without its owners, as a new file at `path`."""
        self.engine.back_up(Path(path))

    # --- for sessions and recovery --------------------------------------------------------------

    def counter_for(self, model: str | None) -> TokenCounting:
        """The token counter of a model; nothing is loaded before it counts."""
        if model not in self._counters:
            self._counters[model] = TokenCounter(model)
        return self._counters[model]

    def ended(self, step_id: int) -> None:
        """A step was committed or discarded: its session is free."""
        self.active.pop(step_id, None)

    def who_is(self, owner_id: int) -> str:
        """A living owner in words: pid and host, or another Store of this very process."""
        owner, me = self.engine.owner(owner_id), this_process()
        if owner is None:
            return "another store"  # It has left between two looks.
        if (owner.pid, owner.boot, owner.pid_space) == (me.pid, me.boot, me.pid_space):
            return "this process, another Store"
        return f"pid {owner.pid} on {owner.host}"

    def note_recovered(self, steps: Iterable[SettledStep]) -> None:
        """Steps that were settled since, because their session was written to, join the report."""
        settled = tuple(steps)
        self.recovery = RecoveryReport(self.recovery.steps + settled, self.recovery.skipped)
        if settled:
            self._tell("recovery", None, count=len(settled))

    def _tell(self, kind: str, session_id: str | None, count: int = 1) -> None:
        if self.engine.observer is not None:
            self.engine.observer(StoreEvent(kind, session_id=session_id, count=count))


def _clean(text: str | None) -> str | None:
    return None if text is None else clean_text(text)


def open_store(
    path: str | os.PathLike[str],
    *,
    durability: str | Durability = Durability.BARRIER,
    recover: bool = True,
    policy: RecoveryPolicy | None = None,
    resolver: Resolver | None = None,
    read_only: bool = False,
    exclusive: bool = False,
    create: bool = True,
    vfs: str | None = None,
    on_event: Callable[[StoreEvent], object] | None = None,
) -> Store:
    """Open or make the store at `path`, and settle what a crash has left in it.

    durability  "process", "barrier" or "power": what a returned call has survived.
    recover     False leaves unfinished steps alone; writing to their sessions then raises.
    policy      a RecoveryPolicy: which unfinished steps to keep, and the words for the model.
    resolver    is asked about each call in doubt: a ToolResult if it knows the outcome, else None.
    read_only   changes neither database nor log, works beside a living writer, recovers nothing.
    exclusive   this process alone, in exchange for appends of half the time.
    create      False: a store that is not there is StoreNotFound.
    vfs         the name of an APSW VFS, such as that of a FaultDisk.
    on_event    is told of commits, syncs, checkpoints and recoveries; it cannot hurt the store.
    """
    # Checked now, and not at the first open after a crash, which is when they are used.
    if policy is not None and not isinstance(policy, RecoveryPolicy):
        raise InvalidArgument(f"policy must be a RecoveryPolicy, not {type(policy).__name__}")
    for what, function in (("resolver", resolver), ("on_event", on_event)):
        if function is not None and not callable(function):
            raise InvalidArgument(f"{what} must be a function, not {type(function).__name__}")
    chosen = policy if policy is not None else RecoveryPolicy()
    level = Durability.of(durability)
    if exclusive and vfs is not None:
        raise InvalidArgument("exclusive=True chooses its own VFS; give one or the other")
    if read_only:
        engine = SqliteEngine.open_read_only(path, vfs="unix-excl" if exclusive else vfs)
        engine.observer = guarded(on_event)  # It tells of damage.
        return Store(engine, policy=chosen, resolver=resolver, recovers=False)
    drill = reporter(path)
    engine = SqliteEngine.open(
        path,
        durability=level,
        exclusive=exclusive,
        create=create,
        vfs=vfs,
        observer=together(guarded(on_event), guarded(drill)),
    )
    try:
        store = Store(engine, policy=chosen, resolver=resolver, recovers=recover)
        if recover:
            store.recovery = run_recovery(store)
        if drill is not None:
            drill.mark("open")
        return store
    except BaseException:
        engine.close()
        raise
