"""The async twins keep every promise of the sync ones, and share commits while doing so."""

from __future__ import annotations

import asyncio
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

import holdfast
from holdfast.async_store import AsyncActiveJournal, AsyncSession, AsyncStore, open_async
from holdfast.journal.blocks import ToolResult, ToolUse
from holdfast.journal.engine.log import Log
from holdfast.recovery.faults import FaultDisk
from holdfast.recovery.pairing import validate

LEVELS = ("process", "barrier", "power")
Main = Coroutine[Any, Any, Any]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Main], Any]:
    def runner(main: Main) -> Any:
        with asyncio.Runner(loop_factory=request.param) as loop:
            return loop.run(main)

    return runner


def texts(path: Path) -> list[str]:
    """What the store holds, by session, in the order of its ids."""
    with holdfast.open(path) as store:
        ids = sorted(info.id for info in store.sessions())
        return [
            "".join(m.text for m in store.session(i).messages() if m.role == "assistant")
            for i in ids
        ]


# --- the same promises --------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_a_whole_turn_with_tools_ends_up_in_history(
    tmp_path: Path, run: Callable[[Main], Any], level: str
) -> None:
    async def main() -> None:
        async with await holdfast.open_async(tmp_path / "a.db", durability=level) as store:
            session = await store.create_session("s", model="gpt-4o")
            assert await session.add_user("hello") == 0
            async with session.begin_step() as step:
                await step.append_thinking("hm")
                await step.append_signature("sig")
                await step.append_text("Hi")
                await step.announce_call("c1", "add")
                await step.append_args("c1", '{"a": 1, ')
                await step.append_args("c1", '"b": 2}')
                await step.append_done(stop_reason="tool_use", usage={"out": 3})
                message = await step.seal()
                assert (await step.operation_id("c1")).endswith("-0")

                async def add(a: int, b: int) -> int:
                    return a + b

                result = await step.execute(message.tool_calls[0], add)
                assert result.content == "3"
            messages = await session.messages()
            assert [m.role for m in messages] == ["user", "assistant", "user"]
            assert validate(messages).is_valid
            assert session.history.get_entry(1).stop_reason == "tool_use"
            assert (await store.sessions())[0].entries == 3
            assert (await store.stats()).open_steps == 0

    run(main())


def test_begin_step_can_be_awaited_or_entered(tmp_path: Path) -> None:
    async def main() -> None:
        async with await open_async(tmp_path / "a.db") as store:
            session = await store.create_session()
            step = await session.begin_step()
            with pytest.raises(holdfast.StepBusy):
                await session.begin_step()
            await step.append_text("x")
            assert step.text == "x"
            assert await step.commit() == [0]
            with pytest.raises(holdfast.StepClosed):
                await step.append_text("y")
            async with session.begin_step() as other:
                assert other.step_id > step.step_id
                assert await other.discard() == 0

    asyncio.run(main())


@pytest.mark.parametrize("level", LEVELS)
def test_an_awaited_append_survives_kill_9(tmp_path: Path, level: str) -> None:
    program = f"""
import asyncio, sys, holdfast
async def stream(session, name):
    step = await session.begin_step()
    for i in range(100000):
        await step.append_text(f"{{i}},")
        sys.stdout.write(f"{{name}} {{i}}\\n"); sys.stdout.flush()
async def main():
    store = await holdfast.open_async(sys.argv[1], durability={level!r})
    sessions = [await store.create_session(f"s{{n}}") for n in range(4)]
    await asyncio.gather(*(stream(s, n) for n, s in enumerate(sessions)))
asyncio.run(main())
"""
    path = tmp_path / "a.db"
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    lines = [child.stdout.readline() for _ in range(200)]
    child.kill()
    lines += child.stdout.read().splitlines(keepends=True)
    child.stdout.close()
    child.wait()
    shown = [-1, -1, -1, -1]
    for line in lines:
        if line.endswith("\n"):
            name, i = line.split()
            shown[int(name)] = int(i)
    for name, text in enumerate(texts(path)):
        numbers = [int(n) for n in text.split(",")[:-1]]
        assert numbers == list(range(len(numbers))), "a gap or a double"
        assert len(numbers) > shown[name], "a delta that was shown is lost"


# --- shared commits -----------------------------------------------------------------------------


async def stream_side_by_side(path: Path, vfs: str, level: str, streams: int, deltas: int) -> None:
    async with await open_async(path, vfs=vfs, durability=level) as store:
        sessions = [await store.create_session(f"s{n:02}") for n in range(streams)]
        steps = [await session.begin_step() for session in sessions]

        async def stream(step: AsyncActiveJournal) -> None:
            for i in range(deltas):
                await step.append_text(f"{i},")

        await asyncio.gather(*(stream(step) for step in steps))
        for step in steps:
            await step.commit()


def test_streams_side_by_side_share_syncs_and_one_stream_pays_for_none_else(
    tmp_path: Path,
) -> None:
    def syncs(level: str, streams: int, deltas: int) -> int:
        with FaultDisk() as disk:
            path = tmp_path / f"{level}-{streams}-{deltas}.db"
            asyncio.run(stream_side_by_side(path, disk.name, level, streams, deltas))
            return disk.count("sync")

    # What else is synced does not depend on the number of deltas.
    extra = syncs("power", 16, 60) - syncs("power", 16, 10)
    assert extra <= 16 * 50 / 4, "sixteen streams hardly share a sync"
    # A checkpoint or two may come along; 800 deltas do not wait for the disk.
    assert syncs("barrier", 16, 60) - syncs("barrier", 16, 10) <= 10, "deltas wait for the disk"


def commits(disk: FaultDisk) -> int:
    """Transactions in the log: the header of a commit's last frame names the database's size."""
    headers = [op.data for op in disk.ops if op.file == "wal" and op.data and len(op.data) == 24]
    return sum(header[4:8] != bytes(4) for header in headers)


def test_streams_side_by_side_share_transactions_at_normal(tmp_path: Path) -> None:
    counted = []
    for deltas in (5, 65):
        with FaultDisk() as disk:
            path = tmp_path / f"{deltas}.db"
            asyncio.run(stream_side_by_side(path, disk.name, "process", 16, deltas))
            counted.append(commits(disk))
    few, many = counted
    assert few > 16
    assert many - few <= 60 + 16, "sixteen streams do not share their commits"
    assert texts(path) == ["".join(f"{i}," for i in range(65))] * 16


@pytest.mark.parametrize("level", LEVELS)
def test_order_is_kept_whether_appends_are_awaited_or_not(tmp_path: Path, level: str) -> None:
    async def main() -> None:
        async with await open_async(tmp_path / "a.db", durability=level) as store:
            session = await store.create_session("a")
            other = await (await store.create_session("b")).begin_step()
            async with session.begin_step() as step:
                await asyncio.gather(*(step.append_text(f"{i},") for i in range(50)))
                tasks = [asyncio.create_task(step.append_text(f"{i},")) for i in range(50, 100)]
                await step.append_text("100,")
                await asyncio.gather(*tasks)
            await other.commit()

    asyncio.run(main())
    # What is awaited directly starts at once; tasks start in the order they were made.
    first, *_ = texts(tmp_path / "a.db")
    numbers = [int(n) for n in first.split(",")[:-1]]
    assert sorted(numbers) == list(range(101))
    assert numbers[:50] == list(range(50))
    assert [n for n in numbers if 50 <= n < 100] == list(range(50, 100))


def test_one_bad_append_fails_alone(tmp_path: Path) -> None:
    async def main() -> list[Any]:
        async with await open_async(tmp_path / "a.db", durability="process") as store:
            steps = [await (await store.create_session(f"s{n}")).begin_step() for n in range(3)]
            await steps[1].append_done()
            answers = await asyncio.gather(
                steps[0].append_text("a"),
                steps[1].append_text("too late"),
                steps[0].append_text(b"bytes"),  # type: ignore[arg-type]
                steps[2].append_args("nobody", "{}"),
                steps[2].append_text("c"),
                steps[0].append_text("b"),
                return_exceptions=True,
            )
            for step in steps:
                await step.commit()
            return answers

    answers = asyncio.run(main())
    kinds = [type(answer) for answer in answers]
    nothing = type(None)
    assert kinds[0] is kinds[4] is kinds[5] is nothing
    assert kinds[1] is holdfast.StepClosed
    assert kinds[2] is holdfast.InvalidMessage
    assert kinds[3] is holdfast.UnknownCall
    assert texts(tmp_path / "a.db") == ["ab", "", "c"]


def test_a_transaction_that_fails_is_tried_again_one_by_one(tmp_path: Path) -> None:
    async def main(vfs: str) -> None:
        async with await open_async(tmp_path / "a.db", vfs=vfs, durability="process") as store:
            steps = [await (await store.create_session(f"s{n}")).begin_step() for n in range(3)]
            disk.fail("write", nth=1, error="full", file="wal")
            answers = await asyncio.gather(
                *(step.append_text("x") for step in steps), return_exceptions=True
            )
            assert answers == [None, None, None]
            for step in steps:
                await step.append_text("y")
                await step.commit()

    with FaultDisk() as disk:
        asyncio.run(main(disk.name))
    assert texts(tmp_path / "a.db") == ["xy", "xy", "xy"]


# --- cancellation -------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_a_cancelled_append_is_neither_lost_nor_doubled_and_leaves_no_gap(
    tmp_path: Path, level: str
) -> None:
    async def main() -> None:
        async with await open_async(tmp_path / "a.db", durability=level) as store:
            other = await (await store.create_session("b")).begin_step()
            step = await (await store.create_session("a")).begin_step()
            for i in range(300):
                task = asyncio.create_task(step.append_text(f"{i},"))
                await asyncio.sleep(0)
                if i % 3 == 0:
                    task.cancel()
                else:
                    await task
            await other.discard()
            await step.commit()

    asyncio.run(main())
    numbers = [int(n) for n in texts(tmp_path / "a.db")[0].split(",")[:-1]]
    # It was accepted before it was cancelled, so it is on record: once, in its place.
    assert numbers == list(range(300))


def test_cancelling_inside_the_block_settles_as_interrupted_and_goes_on(tmp_path: Path) -> None:
    async def turn(session: AsyncSession, told: asyncio.Event) -> None:
        async with session.begin_step() as step:
            await step.append_text("half an ans")
            told.set()
            await asyncio.sleep(60)

    async def main() -> None:
        async with await open_async(tmp_path / "a.db") as store:
            session = await store.create_session("s")
            told = asyncio.Event()
            task = asyncio.create_task(turn(session, told))
            await told.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            entry = session.history.get_entry(0)
            assert (entry.status, entry.message.text) == ("interrupted", "half an ans")
            await session.add_user("the session goes on")

    asyncio.run(main())


def test_a_begin_that_is_cancelled_leaves_no_step_in_the_way(tmp_path: Path) -> None:
    async def main() -> None:
        async with await open_async(tmp_path / "a.db") as store:
            session = await store.create_session("s")
            for _ in range(20):
                task = asyncio.ensure_future(session.begin_step()._begin())
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            async with session.begin_step() as step:
                await step.append_text("free")

    asyncio.run(main())
    assert texts(tmp_path / "a.db") == ["free"]


def test_a_tool_that_is_cancelled_stays_started_and_is_not_run_again(tmp_path: Path) -> None:
    runs: list[int] = []

    async def tool() -> str:
        runs.append(1)
        await asyncio.sleep(60)
        return "never"

    async def main() -> None:
        async with await open_async(tmp_path / "a.db") as store:
            session = await store.create_session("s")
            step = await session.begin_step()
            await step.announce_call("c", "t")
            await step.append_done()
            call = (await step.seal()).tool_calls[0]
            task = asyncio.create_task(step.execute(call, tool))
            while not runs:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(holdfast.CallNotReady):
                await step.execute(call, tool)

    asyncio.run(main())
    assert runs == [1]
    with holdfast.open(tmp_path / "a.db") as store:
        assert store.recovery.steps[0].in_doubt == ("c",)


def test_execute_runs_sync_tools_in_a_thread_and_records_what_they_raise(tmp_path: Path) -> None:
    threads: list[int] = []

    def tool(x: int) -> dict[str, int]:
        threads.append(threading.get_ident())
        if x == 2:
            raise RuntimeError("no")
        return {"x": x}

    async def main() -> list[ToolResult]:
        async with (
            await open_async(tmp_path / "a.db") as store,
            (await store.create_session("s")).begin_step() as step,
        ):
            for n in (1, 2):
                await step.announce_call(f"c{n}", "t")
                await step.append_args(f"c{n}", f'{{"x": {n}}}')
            await step.append_done()
            calls: list[ToolUse] = (await step.seal()).tool_calls
            return list(await asyncio.gather(*(step.execute(c, tool) for c in calls)))

    good, bad = asyncio.run(main())
    assert good.content == '{"x": 1}'
    assert bad.is_error and "no" in str(bad.content)
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("repeats", [False, True], ids=["leaves", "repeats"])
def test_a_result_that_found_no_room_is_kept_and_its_tool_does_not_run_again(
    tmp_path: Path, repeats: bool
) -> None:
    """It was thrown away here, while the sync twin kept it: the call was told as in doubt."""
    runs: list[int] = []

    async def main(disk: FaultDisk) -> list[ToolResult]:
        def tool() -> str:
            runs.append(1)
            disk.fail("write", error="full")
            return "precious"

        async with await open_async(tmp_path / "a.db", vfs=disk.name) as store:
            session = await store.create_session("s")
            async with session.begin_step() as step:
                await step.announce_call("c", "t")
                await step.append_done()
                call = (await step.seal()).tool_calls[0]
                with pytest.raises(holdfast.StoreFull):
                    await step.execute(call, tool)
                if repeats:
                    assert (await step.execute(call, tool)).content == "precious"
            return (await session.messages())[-1].tool_results

    with FaultDisk() as disk:
        results = asyncio.run(main(disk))
    assert [result.content for result in results] == ["precious"]
    assert runs == [1]


def test_a_stream_that_waits_for_nothing_else_can_be_cancelled(tmp_path: Path) -> None:
    """An append that goes straight through does not suspend; a tight loop of them never gave the
    loop a turn, and its cancellation never came."""
    shown: list[int] = []

    async def stream(session: AsyncSession) -> None:
        async with session.begin_step() as step:
            while len(shown) < 1_000_000:
                await step.append_text(f"{len(shown)},")
                shown.append(len(shown))

    async def main() -> None:
        async with await open_async(tmp_path / "a.db") as store:
            session = await store.create_session("s")
            task = asyncio.create_task(stream(session))
            while len(shown) < 100:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(shown) < 1000
            assert session.history.get_entry(0).status == "interrupted"

    asyncio.run(main())
    numbers = [int(n) for n in texts(tmp_path / "a.db")[0].split(",")[:-1]]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) >= len(shown)


# --- the loop is never held up ------------------------------------------------------------------


def test_an_append_does_not_wait_behind_a_commit_that_is_running(tmp_path: Path) -> None:
    """The commit ends only when the loop says so: a loop that waited for it would wait for ever."""

    async def main() -> None:
        async with await open_async(tmp_path / "a.db", durability="barrier") as store:
            first = await (await store.create_session("a")).begin_step()
            running, may_end = threading.Event(), threading.Event()
            engine = store._store.engine

            def slow_commit() -> None:
                with engine.lock:
                    running.set()
                    assert may_end.wait(30), "the loop was held up"

            slow = asyncio.create_task(store._queue.call(slow_commit))
            while not running.is_set():
                await asyncio.sleep(0.001)
            append = asyncio.create_task(first.append_text("behind it"))
            for _ in range(10):
                await asyncio.sleep(0)
            assert not append.done()
            may_end.set()
            await asyncio.gather(slow, append)
            assert first.text == "behind it"
            await first.commit()

    asyncio.run(main())


HOLDS_THE_WRITE_LOCK = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("BEGIN IMMEDIATE")
print("mine", flush=True)
sys.stdin.read()
db.execute("ROLLBACK")
"""


def test_an_append_does_not_wait_for_the_write_lock_of_another_process(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "a.db"
        async with await open_async(path, durability="barrier") as store:
            step = await (await store.create_session("a")).begin_step()
            stranger = subprocess.Popen(
                [sys.executable, "-c", HOLDS_THE_WRITE_LOCK, str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert stranger.stdin is not None and stranger.stdout is not None
            stranger.stdout.readline()
            append = asyncio.create_task(step.append_text("patience"))
            for _ in range(20):
                await asyncio.sleep(0.001)
            assert not append.done()
            stranger.communicate(b"enough")
            await append
            assert step.text == "patience"
            await step.commit()

    asyncio.run(main())


@pytest.mark.parametrize("streams", [1, 3])
def test_a_log_that_reaches_its_cap_is_emptied_behind_the_back_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams: int
) -> None:
    monkeypatch.setattr("holdfast.journal.engine.steps.LOG_LOOK_PAGES", 50)
    monkeypatch.setattr("holdfast.journal.engine.core.LOG_LOOK_PAGES", 50)
    monkeypatch.setattr("holdfast.journal.engine.log.LOG_TIDY_PAGES", 0)
    monkeypatch.setattr("holdfast.journal.engine.log.LOG_CAP_PAGES", 100)
    emptied_by = []

    def note(event: holdfast.StoreEvent) -> None:
        if event.kind == "checkpoint":
            emptied_by.append(threading.get_ident())

    async def main() -> None:
        path = tmp_path / "a.db"
        async with await open_async(path, durability="process", on_event=note) as store:
            steps = [
                await (await store.create_session(f"s{n}")).begin_step() for n in range(streams)
            ]
            emptied_by.clear()
            for i in range(600):
                await asyncio.gather(*(step.append_text(f"{i},") for step in steps))
            assert emptied_by
            assert threading.get_ident() not in emptied_by
            for step in steps:
                await step.commit()

    asyncio.run(main())
    assert texts(tmp_path / "a.db") == ["".join(f"{i}," for i in range(600))] * streams


def test_a_log_in_doubt_is_made_sound_behind_the_back_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed write the whole log is written again and synced before the next append."""
    healed_by = []

    def heal(self: Log) -> None:
        healed_by.append(threading.get_ident())
        heal_log(self)

    heal_log = Log.heal_log
    monkeypatch.setattr(Log, "heal_log", heal)

    async def main(disk: FaultDisk) -> None:
        path = tmp_path / "a.db"
        async with await open_async(path, durability="process", vfs=disk.name) as store:
            step = await (await store.create_session("a")).begin_step()
            await step.append_text("one ")
            disk.fail("write", error="full", file="wal")
            with pytest.raises(holdfast.StoreFull):
                await step.append_text("two ")
            await step.append_text("two ")
            assert healed_by
            assert threading.get_ident() not in healed_by
            await step.commit()

    with FaultDisk() as disk:
        asyncio.run(main(disk))
    assert texts(tmp_path / "a.db") == ["one two "]


def test_a_slow_disk_slows_the_producers_and_memory_stays_flat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.asyncio_queue.QUEUE_MAX", 100)
    most = 0

    async def main(vfs: str) -> None:
        nonlocal most
        async with await open_async(tmp_path / "a.db", vfs=vfs, durability="power") as store:
            step = await (await store.create_session("a")).begin_step()
            disk.sync_delay = 0.01
            tasks = []
            for i in range(1000):
                tasks.append(asyncio.create_task(step.append_text(f"{i},")))
                if i % 10 == 0:
                    await asyncio.sleep(0)
                most = max(most, store._queue._accepted)
            await asyncio.gather(*tasks)
            disk.sync_delay = 0
            await step.commit()

    with FaultDisk() as disk:
        asyncio.run(main(disk.name))
    assert most <= 100
    assert texts(tmp_path / "a.db") == ["".join(f"{i}," for i in range(1000))]


# --- the end ------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_closing_waits_for_what_was_accepted(tmp_path: Path, level: str) -> None:
    async def main() -> None:
        store = await open_async(tmp_path / "a.db", durability=level)
        step = await (await store.create_session("a")).begin_step()
        tasks = [asyncio.create_task(step.append_text(f"{i},")) for i in range(100)]
        await asyncio.sleep(0)
        await store.close()
        await store.close()
        await asyncio.gather(*tasks)
        with pytest.raises(holdfast.StoreClosed):
            await step.append_text("too late")

    asyncio.run(main())
    assert texts(tmp_path / "a.db") == ["".join(f"{i}," for i in range(100))]


def test_a_loop_closed_with_appends_in_flight_loses_nothing_acknowledged(tmp_path: Path) -> None:
    acknowledged: list[int] = []

    async def main() -> AsyncStore:
        store = await open_async(tmp_path / "a.db", durability="power")
        step = await (await store.create_session("a")).begin_step()

        async def one(i: int) -> None:
            await step.append_text(f"{i},")
            acknowledged.append(i)

        tasks = [asyncio.create_task(one(i)) for i in range(2000)]
        while len(acknowledged) < 100:
            await asyncio.sleep(0)
        assert tasks
        return store

    loop = asyncio.new_event_loop()
    store = loop.run_until_complete(main())
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()

    async def elsewhere() -> None:
        with pytest.raises(holdfast.HoldfastError, match="another event loop"):
            await store.create_session("b")

    asyncio.run(elsewhere())
    store._store.close()
    numbers = [int(n) for n in texts(tmp_path / "a.db")[0].split(",")[:-1]]
    assert numbers == list(range(len(numbers)))
    assert set(acknowledged) <= set(numbers)


def test_a_resolver_may_be_a_coroutine_function(tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "a.db") as store:
        step = store.create_session("s").begin_step()
        step.announce_call("c", "t")
        step.append_done()
        step.seal()
        step.start_call("c")

    async def resolver(call: holdfast.RecoveredCall) -> ToolResult:
        await asyncio.sleep(0)
        return ToolResult(call.call_id, "it did happen")

    async def main() -> None:
        async with await open_async(tmp_path / "a.db", resolver=resolver) as store:
            assert store.recovery.steps[0].resolved == ("c",)

    asyncio.run(main())


def test_the_twins_refuse_to_be_pickled(tmp_path: Path) -> None:
    async def main() -> None:
        async with await open_async(tmp_path / "a.db") as store:
            session = await store.create_session()
            step = await session.begin_step()
            for thing in (store, session, step):
                with pytest.raises(TypeError, match="cannot be pickled"):
                    pickle.dumps(thing)

    asyncio.run(main())


def test_every_method_of_the_sync_side_has_its_twin() -> None:
    pairs = [
        (holdfast.Store, AsyncStore),
        (holdfast.Session, AsyncSession),
        (holdfast.ActiveJournal, AsyncActiveJournal),
    ]
    inside = {"counter_for", "ended", "note_recovered", "put_session", "who_is"}
    for plain, twin in pairs:
        public = {name for name in vars(plain) if not name.startswith("_")} - inside
        assert public <= set(dir(twin)), (twin, public - set(dir(twin)))


# --- threads at the level of power --------------------------------------------------------------


def test_threads_share_syncs_at_power_and_lose_nothing(tmp_path: Path) -> None:
    with (
        FaultDisk() as disk,
        holdfast.open(tmp_path / "a.db", vfs=disk.name, durability="power") as store,
    ):
        steps = [store.create_session(f"s{n}").begin_step() for n in range(8)]
        disk.sync_delay = 0.001
        before = disk.count("sync")

        def stream(step: Any) -> None:
            for i in range(40):
                step.append_text(f"{i},")

        threads = [threading.Thread(target=stream, args=(step,)) for step in steps]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        shared = disk.count("sync") - before
        disk.sync_delay = 0
        for step in steps:
            step.commit()
    assert shared < 8 * 40 / 2
    assert texts(tmp_path / "a.db") == ["".join(f"{i}," for i in range(40))] * 8


def give_all(step: Any, alarm: type[Exception]) -> int:
    """Append 300 deltas, each until it is acknowledged; how often that was interrupted."""
    rings, i = 0, 0
    while i < 300:
        try:
            step.append_text(f"{i},")
            i += 1
        except alarm:
            rings += 1
    return rings


def ignore_alarms(alarm: type[Exception]) -> None:
    while True:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
            return
        except alarm:
            pass


# An alarm that rings while its handler is taken away is Python's to complain of, and means nothing.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_raises_while_a_thread_waits_for_the_others_leaves_no_double(
    tmp_path: Path,
) -> None:
    class Alarm(Exception):
        pass

    def ring(_: int, frame: Any) -> None:
        # Only inside an append: between two of them a program does not know what it had done.
        while frame is not None and frame.f_code.co_name != "append_text":
            frame = frame.f_back
        if frame is not None:
            raise Alarm

    with holdfast.open(tmp_path / "a.db", durability="power") as store:
        mine = store.create_session("a").begin_step()
        theirs = store.create_session("b").begin_step()
        stop = threading.Event()

        def noise() -> None:
            while not stop.is_set():
                theirs.append_text("x")

        other = threading.Thread(target=noise)
        other.start()
        old = signal.signal(signal.SIGALRM, ring)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0007)
            rings = give_all(mine, Alarm)
        finally:
            ignore_alarms(Alarm)
            signal.signal(signal.SIGALRM, old)
            stop.set()
            other.join()
        assert rings > 10
        mine.commit()
        theirs.discard()
    assert texts(tmp_path / "a.db")[0] == "".join(f"{i}," for i in range(300))


@pytest.mark.parametrize("level", LEVELS)
def test_a_producer_that_never_suspends_lets_the_loop_go_round(run, tmp_path: Path, level: str):
    """Else neither a timer, nor another task, nor Ctrl-C would ever have its turn."""
    path = tmp_path / "a.db"
    shown: list[int] = []

    async def produce(session: AsyncSession) -> None:
        async with session.begin_step() as step:
            while len(shown) < 20_000:
                await step.append_text(f"{len(shown)},")
                shown.append(len(shown))

    async def main() -> None:
        async with await open_async(path, durability=level) as store:
            producer = asyncio.ensure_future(produce(await store.create_session("s")))
            while not shown:
                await asyncio.sleep(0)
            producer.cancel()
            with pytest.raises(asyncio.CancelledError):
                await producer

    run(main())
    assert len(shown) < 20_000
    assert texts(path)[0].startswith("".join(f"{number}," for number in shown))
