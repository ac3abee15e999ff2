"""The pass: every unfinished step of every dead owner, oldest first, is settled exactly once.

INVARIANT  The work is in proportion to what is unfinished.  A step is claimed (its owner becomes
           us) before anybody is asked about it, so two processes that open at once do not both
           ask; if we die, we are a dead owner, and the next one begins where we stopped.

Several steps share a transaction: one that claims them, one that settles them.  A crash between
two transactions leaves steps that are unfinished or settled, each of them whole.

A step that makes recovery raise is tried a few times and then quarantined: its rows stay, it is
reported, and the store opens.  A step that makes the process die is found by counting claims on
disk: with each death the steps around it are taken in smaller groups, until it stands alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

from holdfast.journal.engine.engine import SqliteEngine
from holdfast.journal.engine.rows import EventRow, StepRow
from holdfast.journal.errors import (
    StepBusy,
    StepClosed,
    StoreBusy,
    StoreFailed,
    StoreFull,
    StoreNotWritable,
)
from holdfast.journal.observers import StoreEvent
from holdfast.journal.recovered import RecoveredStream, read_leftover
from holdfast.journal.recovered import classify as classify_leftover
from holdfast.journal.stream import fold
from holdfast.recovery.policy import RecoveryPolicy, Resolver
from holdfast.recovery.settle import (
    Prepared,
    SettledStep,
    answer_calls,
    prepare,
    settle_prepared,
)

log = logging.getLogger("holdfast")
STEPS_A_CLAIM = 512
BYTES_A_COMMIT = 4 << 20
# These say nothing about a step: the next one would fail in the same way.
STORE_WIDE = (StoreBusy, StoreFailed, StoreFull, StoreNotWritable)

# Steps that a thread of this process is settling just now: claimed, and nobody's leftovers.
_in_hand: WeakKeyDictionary[SqliteEngine, set[int]] = WeakKeyDictionary()


class Recoverable(Protocol):
    """What recovery wants of a store."""

    @property
    def engine(self) -> SqliteEngine:
        """Where the steps are."""

    @property
    def policy(self) -> RecoveryPolicy:
        """How to settle them."""

    @property
    def resolver(self) -> Resolver | None:
        """Whom to ask about calls in doubt."""

    @property
    def active(self) -> Mapping[int, object]:
        """The store's own steps whose handle somebody has, by step id."""


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What a pass found and did. `skipped`: sessions in which somebody alive has a step open."""

    steps: tuple[SettledStep, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there was nothing to settle."""
        return not self.steps

    def summary(self) -> str:
        """The report in words."""
        if self.is_empty:
            lines = ["Nothing to recover."]
        else:
            lines = [f"Recovered {len(self.steps)} unfinished step(s):"]
        for step in self.steps:
            lines.append(f"  step {step.step_id} in session {step.session_id}: {step.outcome}")
            for what, calls in (
                ("canceled, safe to run again", step.canceled),
                ("in doubt, may have taken effect", step.in_doubt),
                ("resolved", step.resolved),
                ("left out, arguments unfinished", step.dropped),
            ):
                if calls:
                    lines.append(f"    {what}: {', '.join(calls)}")
            lines += [f"    still running: process {orphan.pid}" for orphan in step.orphans]
            lines += [f"    problem: {error}" for error in step.errors]
        if self.skipped:
            lines.append(f"Left alone, in use elsewhere: {', '.join(self.skipped)}")
        return "\n".join(lines)


def recover(
    store: Recoverable, *, policy: RecoveryPolicy | None = None, resolver: Resolver | None = None
) -> RecoveryReport:
    """Settle every unfinished step that nobody is left to finish. Twice changes nothing.

    Raises only where the store as a whole cannot be written; what was settled until then stays.
    """
    engine = store.engine
    engine.admit()
    rows, skipped = _find(store)
    found = settle_dead(engine, rows, policy or store.policy, resolver or store.resolver)
    steps = tuple(sorted(found, key=lambda step: step.step_id))
    _forget_the_dead(engine)
    if steps and engine.observer is not None:
        engine.observer(StoreEvent("recovery", count=len(steps)))
    return RecoveryReport(steps, skipped)


def _find(store: Recoverable) -> tuple[list[StepRow], tuple[str, ...]]:
    """What nobody is left to finish, and the sessions in which somebody is."""
    engine = store.engine
    # `begin_step` holds the lock from its commit until its step is among the active ones.
    with engine.lock:
        rows = [row for row in engine.unfinished() if row.session is not None]
        owners = {row.owner for row in rows}
        alive = {owner: engine.is_alive(owner) for owner in owners - {engine.owner_id}}
        in_hand = _in_hand.get(engine, set())
        leftovers, skipped = [], []
        for row in rows:
            # An own step without a handle: a pass that failed halfway had claimed it.
            if alive.get(row.owner, row.step_id in store.active):
                skipped.append(str(row.session))
            elif row.step_id not in in_hand:
                leftovers.append(row)
    return leftovers, tuple(skipped)


def settle_dead(
    engine: SqliteEngine,
    rows: Sequence[StepRow],
    policy: RecoveryPolicy,
    resolver: Resolver | None,
) -> Iterator[SettledStep]:
    """Claim and settle steps that nobody is left to finish, many in a transaction."""
    for group in _groups(rows):
        with engine.lock:
            claimed = engine.claim_many([(row.step_id, row.owner) for row in group])
            ours = {row.step_id for row in claimed}
            _in_hand.setdefault(engine, set()).update(ours)
        try:
            yield from _settle_claimed(engine, claimed, policy, resolver)
        finally:
            with engine.lock:
                _in_hand[engine].difference_update(ours)


def _groups(rows: Sequence[StepRow]) -> Iterator[list[StepRow]]:
    """Steps to be claimed together: the more claims have come to nothing, the fewer."""
    group: list[StepRow] = []
    most = STEPS_A_CLAIM
    for row in rows:
        allowed = max(1, STEPS_A_CLAIM >> 4 * row.attempts)
        if group and len(group) >= min(most, allowed):
            yield group
            group, most = [], STEPS_A_CLAIM
        group.append(row)
        most = min(most, allowed)
    if group:
        yield group


def _settle_claimed(
    engine: SqliteEngine,
    rows: Sequence[StepRow],
    policy: RecoveryPolicy,
    resolver: Resolver | None,
) -> Iterator[SettledStep]:
    streams = _read_ahead(engine, rows)
    waiting: list[Prepared] = []
    size = 0
    for row in rows:
        events = streams.pop(row.step_id, None)
        prepared = _prepare_claimed(engine, row, events, policy, resolver)
        if isinstance(prepared, SettledStep):
            yield prepared
            continue
        waiting.append(prepared)
        size += prepared.size
        if size > BYTES_A_COMMIT:
            yield from _settle_together(engine, waiting, policy)
            waiting, size = [], 0
    yield from _settle_together(engine, waiting, policy)


def _read_ahead(engine: SqliteEngine, rows: Sequence[StepRow]) -> dict[int, list[EventRow]]:
    """The events of the small steps in one read."""
    try:
        return engine.small_streams([row.step_id for row in rows])
    except Exception:
        return {}  # Each is read alone then, which finds the one that is to blame, if it is one.


def _prepare_claimed(
    engine: SqliteEngine,
    row: StepRow,
    events: Sequence[EventRow] | None,
    policy: RecoveryPolicy,
    resolver: Resolver | None,
) -> Prepared | SettledStep:
    """Read a claimed step and answer its calls; quarantine it if that fails again and again."""
    if row.attempts > policy.deaths_max:
        return _quarantine(engine, row, f"{row.attempts - 1} recoveries of it came to no end")
    problem = ""
    for _ in range(policy.max_attempts):
        try:
            stream = None if events is None else fold(events)
            leftover = read_leftover(engine, row, stream=stream)
            # A step that is going to be discarded has no use for a result.
            asked = None if policy.discards(leftover.stream.status) else resolver
            answers = answer_calls(leftover, policy, asked)
            provider = _provider(engine, row) if leftover.stream.is_signed else None
            return prepare(leftover, answers, policy=policy, provider=provider)
        except Exception as error:
            _raise_if_store_wide(engine, error)
            problem = f"{type(error).__name__}: {error}"
    return _quarantine(engine, row, problem)


def _settle_together(
    engine: SqliteEngine, steps: Sequence[Prepared], policy: RecoveryPolicy
) -> Iterator[SettledStep]:
    """Settle steps in one transaction; if that fails, each alone, to find the one that fails."""
    tries = policy.max_attempts if len(steps) == 1 else 1
    problem = ""
    for _ in range(tries if steps else 0):
        try:
            settled = settle_prepared(engine, steps)
        except Exception as error:
            _raise_if_store_wide(engine, error)
            problem = f"{type(error).__name__}: {error}"
        else:
            yield from settled
            return
    if len(steps) == 1:
        yield _quarantine(engine, steps[0].row, problem)
        return
    for step in steps:
        yield from _settle_together(engine, [step], policy)


def _raise_if_store_wide(engine: SqliteEngine, error: Exception) -> None:
    """Go on with an error for which no step is to blame."""
    if engine.refusal is not None or isinstance(error, STORE_WIDE):
        raise error


def _quarantine(engine: SqliteEngine, row: StepRow, problem: str) -> SettledStep:
    engine.quarantine(row.step_id, problem)
    # Only the kind of error: its words may quote the transcript.
    log.error("step %d is quarantined: %s", row.step_id, problem.partition(":")[0])
    if engine.observer is not None:
        engine.observer(StoreEvent("damage", row.step_id, None, row.session))
    return SettledStep(row.step_id, row.session or "", "quarantined", errors=(problem,))


def _provider(engine: SqliteEngine, row: StepRow) -> str | None:
    session = engine.session(row.session) if row.session is not None else None
    return None if session is None else session.provider


def _forget_the_dead(engine: SqliteEngine) -> None:
    """Rows of dead owners that left nothing behind."""
    dead = [row.owner_id for row in engine.owners() if not engine.is_alive(row.owner_id)]
    if dead:
        busy = {row.owner for row in engine.unfinished()}
        engine.forget_owners([owner for owner in dead if owner not in busy])


def classify(store: Recoverable, step_id: int) -> RecoveredStream:
    """Which class an unfinished step is of. Writes nothing."""
    return classify_leftover(read_leftover(store.engine, _unfinished(store.engine, step_id)))


def settle(
    store: Recoverable, step_id: int, *, policy: RecoveryPolicy | None = None
) -> SettledStep:
    """Settle one step that nobody is left to finish; raises StepBusy if somebody is."""
    engine = store.engine
    engine.admit()
    _unfinished(engine, step_id)
    mine = [row for row in _find(store)[0] if row.step_id == step_id]
    if not mine:
        raise StepBusy(
            engine.name, step_id, "its owner is alive; nothing was changed: commit it there"
        )
    for settled in settle_dead(engine, mine, policy or store.policy, store.resolver):
        return settled
    raise StepBusy(engine.name, step_id, "another process has just claimed it")


def _unfinished(engine: SqliteEngine, step_id: int) -> StepRow:
    row = engine.step(step_id)
    if row is None or row.session is None or row.state not in ("open", "sealed"):
        state = "unknown here" if row is None or row.session is None else row.state
        raise StepClosed(engine.name, step_id, f"is {state}; only an unfinished step is settled")
    return row


__all__ = ["RecoveryReport", "classify", "recover", "settle", "settle_dead"]
