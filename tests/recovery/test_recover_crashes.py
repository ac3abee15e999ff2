"""Every operation of the disk inside settle and recovery is a crash point; so is each in the next.

The workload runs once on a disk that records.  What the file would be after a crash follows from
the trace.  Each such file is opened, which recovers it, on a second recording disk, and so on: a
crash of the recovery of a crash of the recovery.  After each the same two questions: is nothing
lost that was acknowledged, and is nothing there that was never begun?
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from crash_rig import SESSION, Op, Outcome, expected, run, violations

import holdfast
from holdfast.journal.engine import steps as step_operations
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.recovery.faults import FaultDisk

# By name: `holdfast.recovery` has functions of the names of these modules.
pass_module = importlib.import_module("holdfast.recovery.recover")
settle_module = importlib.import_module("holdfast.recovery.settle")

# A turn that settles cleanly, and one in which every state of a call occurs.
SCRIPT: list[Op] = [
    ("user", "first"),
    ("begin",),
    ("text", "Hel"),
    ("text", "lo"),
    ("done",),
    ("commit",),
    ("user", "second"),
    ("begin",),
    ("think", "hm"),
    ("text", "I call"),
    ("call", "a", "run"),
    ("args", "a", '{"x"'),
    ("args", "a", ":1}"),
    ("call", "b", "run"),
    ("args", "b", "{}"),
    ("call", "c", "run"),
    ("args", "c", '{"cut'),
    ("call", "d", "run"),
    ("args", "d", "{}"),
    ("done",),
    ("seal",),
    ("start", "a", "never"),
    ("result", "a", "the result"),
    ("start", "b", "safe"),
]


class Trace:
    """A workload on a recording disk, and what it was told at which operation."""

    def __init__(self, folder: Path, script: Sequence[Op], durability: str) -> None:
        self.script = script
        self.disk = FaultDisk()
        self.begun: list[tuple[int, int]] = []
        self.acked: list[tuple[int, int]] = []
        with self.disk:
            store = holdfast.open(folder / "s.db", durability=durability, vfs=self.disk.name)
            session = store.create_session(SESSION)
            self.start = len(self.disk.ops)
            run(
                session,
                script,
                before=lambda n: self.begun.append((self.disk.mark("begin", n), n)),
                after=lambda n: self.acked.append((self.disk.mark("ack", n), n)),
            )
            self.end = len(self.disk.ops)
            store.close()

    def allowed(self, at: int) -> list[Outcome]:
        """What may stand after a crash directly behind operation `at`."""
        acked = max((n for mark, n in self.acked if mark <= at), default=0)
        begun = max((n for mark, n in self.begun if mark <= at), default=0)
        return [expected(self.script[:n]) for n in range(acked, begun + 1)]


def recover_on_a_recording_disk(path: Path, **options: Any) -> FaultDisk:
    with FaultDisk() as disk:
        holdfast.open(path, vfs=disk.name, **options).close()
    return disk


def crash_and_recover(
    trace: Trace,
    folder: Path,
    *,
    losses: Sequence[tuple[str, Any]] = (("kill", "none"),),
    levels: int = 1,
    fan: int = 1000,
    every: int = 1,
) -> list[str]:
    """Crash, recover, look; then crash that recovery at `fan` points or all, `levels` deep."""
    chance = random.Random(1)
    seen: set[Any] = set()
    found: list[str] = []

    def go_on(disk: FaultDisk, points_of_time: Iterator[int], allowed: Any, level: int) -> None:
        for at in points_of_time:
            for loss, keep in losses:
                snapshot = disk.snapshot(at, loss, keep)  # type: ignore[arg-type]
                may = allowed(at)
                key = (snapshot.digest, repr(may), level)
                if key in seen:
                    continue
                seen.add(key)
                path = disk.image(at, folder / str(level), loss, keep)  # type: ignore[arg-type]
                if not path.exists():
                    continue
                place = f"level {level}, operation {at}, {loss} {keep}"
                try:
                    again = recover_on_a_recording_disk(path)
                except holdfast.HoldfastError as error:
                    found.append(f"{place}: the store does not open: {error!r}")
                    continue
                found.extend(f"{place}: {problem}" for problem in violations(path, may))
                if level < levels:
                    points = range(1, len(again.ops) + 1)
                    inner = chance.sample(points, min(fan, len(points)))
                    go_on(again, iter(inner), lambda _, may=may: may, level + 1)

    go_on(trace.disk, iter(range(trace.start, trace.end + 1, every)), trace.allowed, 1)
    return found


def test_a_kill_at_any_operation_loses_nothing_and_invents_nothing(tmp_path: Path) -> None:
    ending: list[Op] = [("result", "b", "B"), ("result", "d", "D"), ("commit",), ("user", "third")]
    trace = Trace(tmp_path, SCRIPT + ending, "barrier")
    assert crash_and_recover(trace, tmp_path / "images") == []


def test_a_power_loss_at_any_operation_loses_nothing_and_invents_nothing(tmp_path: Path) -> None:
    trace = Trace(tmp_path, SCRIPT, "power")
    losses = [("power", "none"), ("power", "torn"), ("power", "random")]
    assert crash_and_recover(trace, tmp_path / "images", losses=losses) == []


def test_a_power_loss_at_the_default_level_keeps_calls_results_and_commits(tmp_path: Path) -> None:
    """At `barrier` the newest deltas of an open stream may go, and nothing else."""
    trace = Trace(tmp_path, SCRIPT, "barrier")
    barriers = {"user", "begin", "seal", "start", "result", "commit"}

    def allowed(at: int) -> list[Outcome]:
        acked = [n for mark, n in trace.acked if mark <= at and SCRIPT[n - 1][0] in barriers]
        begun = max((n for mark, n in trace.begun if mark <= at), default=0)
        return [expected(SCRIPT[:n]) for n in range(max(acked, default=0), begun + 1)]

    trace.allowed = allowed  # type: ignore[method-assign]
    assert crash_and_recover(trace, tmp_path / "images", losses=[("power", "none")]) == []


@pytest.mark.parametrize(("durability", "loss"), [("barrier", "kill"), ("power", "power")])
def test_every_operation_of_a_recovery_is_a_crash_point_too(
    tmp_path: Path, durability: str, loss: str
) -> None:
    trace = Trace(tmp_path, SCRIPT, durability)
    # Crash where the last call left it: the whole of that recovery, then some of the next ones.
    trace.start = trace.end
    problems = crash_and_recover(trace, tmp_path / "images", losses=[(loss, "none")], levels=2)
    assert problems == []


def test_recoveries_that_crash_five_deep_settle_each_step_once(tmp_path: Path) -> None:
    trace = Trace(tmp_path, SCRIPT, "barrier")
    trace.start = trace.end
    problems = crash_and_recover(trace, tmp_path / "images", levels=6, fan=3)
    assert problems == []


def test_many_steps_that_share_a_transaction_are_each_settled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_module, "STEPS_A_CLAIM", 2)
    with FaultDisk() as disk:
        store = holdfast.open(tmp_path / "s.db", vfs=disk.name)
        for n in range(5):
            step = store.create_session(f"s{n}").begin_step()
            step.append_text(f"words {n}")
        store.close()
    path = disk.image(len(disk.ops), tmp_path / "crashed")
    recovery = recover_on_a_recording_disk(path)
    for at in range(1, len(recovery.ops) + 1):
        again = recovery.image(at, tmp_path / "again")
        recover_on_a_recording_disk(again)
        assert violations(again, [[]]) == []
        with holdfast.open(again, read_only=True) as store:
            texts = [[m.text for m in store.session(f"s{n}").messages()] for n in range(5)]
        assert texts == [[f"words {n}"] for n in range(5)]


def test_a_second_pass_writes_nothing(tmp_path: Path) -> None:
    trace = Trace(tmp_path, SCRIPT, "barrier")
    path = trace.disk.image(trace.end, tmp_path / "crashed")
    with FaultDisk() as disk, holdfast.open(path, vfs=disk.name) as store:
        assert not store.recovery.is_empty
        done = len(disk.ops)
        assert holdfast.recovery.recover(store).is_empty
        assert [op.kind for op in disk.ops[done:]] == []


def test_reading_classes_writes_nothing(tmp_path: Path) -> None:
    trace = Trace(tmp_path, SCRIPT, "barrier")
    path = trace.disk.image(trace.end, tmp_path / "crashed")
    with FaultDisk() as disk, holdfast.open(path, vfs=disk.name, recover=False) as store:
        done = len(disk.ops)
        assert isinstance(holdfast.recovery.classify(store, 2), holdfast.recovery.Complete)
        assert [op.kind for op in disk.ops[done:]] == []


# --- the tests of these tests: each rule, broken on purpose, must be noticed ---------------------


def skip_pairing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pass_module, "answer_calls", lambda *_: settle_module.Answers())


def answer_started_as_canceled(patch: pytest.MonkeyPatch) -> None:
    def timid(call: Any, policy: Any, resolver: Any, answers: Any) -> None:
        answers.results.append(
            settle_module._synthetic(call, policy.canceled_text, "canceled", "canceled")  # type: ignore[arg-type]
        )

    patch.setattr(settle_module, "_settle_doubt", timid)


def run_safe_words_for_unsafe_calls(patch: pytest.MonkeyPatch) -> None:
    words = holdfast.RecoveryPolicy().in_doubt_text
    policy = holdfast.RecoveryPolicy(in_doubt_safe_text=words)
    patch.setattr("holdfast.store.RecoveryPolicy", lambda: policy)


def forget_results(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SqliteEngine, "results", lambda *_: [])


def drop_the_last_delta(patch: pytest.MonkeyPatch) -> None:
    whole = SqliteEngine.small_streams
    patch.setattr(
        SqliteEngine,
        "small_streams",
        lambda engine, ids: {step: rows[:-1] for step, rows in whole(engine, ids).items()},
    )


def keep_broken_calls(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("holdfast.journal.stream.parse_arguments", lambda raw: {})


def settle_in_two_transactions(patch: pytest.MonkeyPatch) -> None:
    def halves(engine: SqliteEngine, settlements: Any) -> Any:
        def first(cursor: Any) -> Any:
            return [step_operations._settle_one(cursor, one) for one in settlements]

        def second(cursor: Any) -> None:
            step_operations.delete_journals(cursor, [one.step_id for one in settlements])

        settled = engine.write(first)
        engine.write(second)
        return settled

    patch.setattr(SqliteEngine, "settle", halves)


def prune_before_settling(patch: pytest.MonkeyPatch) -> None:
    whole = SqliteEngine.settle

    def backwards(engine: SqliteEngine, settlements: Any) -> Any:
        engine.write(
            lambda cursor: step_operations.delete_journals(
                cursor, [one.step_id for one in settlements]
            )
        )
        return whole(engine, settlements)

    patch.setattr(SqliteEngine, "settle", backwards)


def forget_that_it_is_settled(patch: pytest.MonkeyPatch) -> None:
    def again(engine: SqliteEngine, settlements: Any) -> Any:
        def work(cursor: Any) -> Any:
            settled = [step_operations._settle_one(cursor, one) for one in settlements]
            cursor.execute("UPDATE step_metadata SET state = 'open'")
            return settled

        return engine.write(work)

    patch.setattr(SqliteEngine, "settle", again)


def discard_what_is_interrupted(patch: pytest.MonkeyPatch) -> None:
    policy = holdfast.RecoveryPolicy(incomplete="discard")
    patch.setattr("holdfast.store.RecoveryPolicy", lambda: policy)


def skip_the_pass(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pass_module, "_find", lambda store: ([], ()))


MUTATIONS = [
    skip_pairing,
    answer_started_as_canceled,
    run_safe_words_for_unsafe_calls,
    forget_results,
    drop_the_last_delta,
    keep_broken_calls,
    settle_in_two_transactions,
    prune_before_settling,
    forget_that_it_is_settled,
    discard_what_is_interrupted,
    skip_the_pass,
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_broken_rule_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutation: Any
) -> None:
    trace = Trace(tmp_path, SCRIPT, "barrier")
    trace.start = trace.end - 60
    with monkeypatch.context() as patch:
        mutation(patch)
        problems = crash_and_recover(trace, tmp_path / "images", levels=2, every=20, fan=12)
    assert problems != []


def test_the_same_crashes_without_a_broken_rule_are_found_sound(tmp_path: Path) -> None:
    trace = Trace(tmp_path, SCRIPT, "barrier")
    trace.start = trace.end - 60
    assert crash_and_recover(trace, tmp_path / "i", levels=2, every=20, fan=12) == []


def test_commits_that_are_not_synced_are_noticed(tmp_path: Path) -> None:
    trace = Trace(tmp_path, SCRIPT, "process")
    problems = crash_and_recover(trace, tmp_path / "images", losses=[("power", "none")], every=9)
    assert problems != []
