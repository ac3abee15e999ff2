"""Random damage: a store gives correct data or a typed error, and doctor finds every wrong byte.

Each case flips bits, overwrites a stretch or cuts the end off, in the database or in its log, from
a seed of its own.  `HOLDFAST_DAMAGE_CASES` asks for more of them.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import HoldfastError, Message
from holdfast.recovery.doctor import doctor
from holdfast.recovery.salvage import salvage

CASES = int(os.environ.get("HOLDFAST_DAMAGE_CASES", "200"))
SECONDS = 30  # A case takes some milliseconds: this is a hang.

WORDS = 60
FRAME = 24 + 1024

State = dict[str, list[str]]


def build(path: Path, copy: Path) -> list[State]:
    """A store copied while it is in use, with a long log; each state that it was ever in."""
    states: list[State] = [{}]
    store = holdfast.open(path)

    def note() -> None:
        states.append(read(store))

    for name in ("a", "b"):
        session = store.create_session(name, title=f"title {name}")
        note()
        for turn in range(6):
            session.add_user(f"{name} asks {turn} " + "lorem ipsum " * 20)
            note()
            with session.begin_step("m") as step:
                step.append_text(f"{name} hears {turn} " + "dolor sit " * 20)
                step.announce_call(f"call-{turn}", "look")
                step.append_args(f"call-{turn}", '{"at": 1}')
                step.append_done(stop_reason="tool_use")
                message = step.seal()
                step.execute(message.tool_calls[0], lambda at, turn=turn: f"seen {turn} {at}")
            note()
        if name == "a":
            store.engine.checkpoint()
    session.history.add_summary(0, 4, "the beginning of it")
    left = store.create_session("c")
    note()
    left.add_user("go on")
    note()
    step = left.begin_step("m")
    for word in range(WORDS):
        step.append_text(f"word {word} ")
    shutil.copy(path, copy)
    shutil.copy(f"{path}-wal", f"{copy}-wal")
    store.close()  # Everything is in the database now.
    assert not Path(f"{path}-wal").stat().st_size
    shutil.copy(path, copy.with_name("closed.db"))
    return states


def read(store: holdfast.Store) -> State:
    return {
        info.id: [e.message.model_dump_json() for e in store.session(info.id).history.entries()]
        for info in store.sessions()
    }


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Known]:
    folder = tmp_path_factory.mktemp("original")
    return folder / "copy.db", Known(build(folder / "live.db", folder / "copy.db"))


@contextmanager
def no_hang() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise AssertionError(f"nothing came of it in {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def harm(path: Path, rng: random.Random) -> tuple[str, int]:
    """Damage a file as disks do; says how and where."""
    data = bytearray(path.read_bytes())
    kind = rng.choice(["flip", "flip", "flip", "flips", "stretch", "cut", "zeros"])
    at = rng.randrange(len(data))
    match kind:
        case "flip":
            data[at] ^= 1 << rng.randrange(8)
        case "flips":
            for _ in range(rng.randrange(2, 20)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case "stretch":
            data[at : at + 64] = rng.randbytes(len(data[at : at + 64]))
        case "zeros":
            length = rng.choice([16, 512, 4096])
            data[at : at + length] = bytes(len(data[at : at + length]))
        case "cut":
            del data[at:]
    path.write_bytes(bytes(data))
    return kind, at


class Known:
    """Everything that was ever said to the store, so that whatever it says can be judged."""

    def __init__(self, states: list[State]) -> None:
        self.states = states
        self.messages = {one for messages in states[-1].values() for one in messages}
        parsed = [Message.model_validate_json(one) for one in self.messages]
        self.texts = [message.text for message in parsed if message.text]
        self.texts.append("".join(f"word {word} " for word in range(WORDS)))
        self.results = {str(one.content) for message in parsed for one in message.tool_results}
        self.calls = {(one.id, one.name) for message in parsed for one in message.tool_calls}

    def judge(self, state: State, *, recovered: bool) -> str | None:
        """The first thing that nobody ever said; a stream may have been cut off by recovery."""
        for messages in state.values():
            for one in messages:
                if one in self.messages:
                    continue
                message = Message.model_validate_json(one)
                known = recovered and (
                    any(text.startswith(message.text) for text in self.texts)
                    and all((call.id, call.name) in self.calls for call in message.tool_calls)
                    and all(
                        result.synthetic is not None or str(result.content) in self.results
                        for result in message.tool_results
                    )
                )
                if not known:
                    return one
        return None


def examine(path: Path, known: Known, damaged: str) -> dict[str, Any]:
    """Look at a damaged store in every way; raises if one of them breaks its promise."""
    before = {one.name: one.read_bytes() for one in files(path)}
    report = doctor(path)
    report.summary()
    assert {one.name: one.read_bytes() for one in files(path)} == before, "doctor wrote"
    outcome: dict[str, Any] = {"ok": report.ok, "codes": {found.code for found in report.problems}}
    for look in ("read_only", "recover"):
        copy = path.with_name(f"{look}.db")
        for one in files(path):
            shutil.copy(one, copy.with_name(one.name.replace(path.name, copy.name)))
        outcome[look] = None
        try:
            with holdfast.open(copy, read_only=look == "read_only") as store:
                state = read(store)
                outcome[look] = state
                for name in state:
                    session = store.session(name)
                    session.messages()
                    session.history.total_tokens  # noqa: B018
                if look == "recover" and state:
                    session.add_user("go on")
        except HoldfastError as error:
            assert not report.ok, f"{damaged}: doctor saw nothing, and opening it said {error!r}"
            continue
        wrong = known.judge(state, recovered=look == "recover")
        assert wrong is None, f"{damaged}: {look} gave out {wrong}"
    if report.ok:
        states = known.states if damaged.startswith("log") else known.states[-1:]
        assert outcome["read_only"] in states, (
            f"{damaged}: something is lost, and doctor saw nothing"
        )
    return outcome


def files(path: Path) -> list[Path]:
    beside = (path, path.with_name(path.name + "-wal"))
    return [one for one in beside if one.exists()]


def commits_behind(log: bytes, at: int) -> int:
    """How many commits stand in the frames behind the one that this byte is in."""
    first = 32 + ((at - 32) // FRAME + 1) * FRAME if at >= 32 else 32
    return sum(any(log[frame + 4 : frame + 8]) for frame in range(first, len(log) - 23, FRAME))


def run(original: Path, folder: Path, known: Known, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    path = folder / "store.db"
    in_log = rng.random() < 0.4
    if in_log:
        shutil.copy(original, path)
        shutil.copy(f"{original}-wal", f"{path}-wal")
    else:
        shutil.copy(original.with_name("closed.db"), path)
    target = Path(f"{path}-wal") if in_log else path
    whole = target.read_bytes()
    kind, at = harm(target, rng)
    damaged = f"{'log' if in_log else 'database'}, {kind} at {at}"
    with no_hang():
        outcome = examine(path, known, damaged)
        if in_log and kind == "flip" and commits_behind(whole, at):
            assert outcome["codes"] & {"log-cut", "log-header"}, damaged
        if rng.random() < 0.3:
            try:
                salvage(path, folder / "saved.db")
            except HoldfastError:
                return outcome
            with holdfast.open(folder / "saved.db") as store:
                wrong = known.judge(read(store), recovered=True)
            assert wrong is None, f"{damaged}: salvage gave out {wrong}"
    return outcome


BATCHES = 8


@pytest.mark.parametrize("batch", range(BATCHES))
def test_damage_gives_correct_data_or_a_typed_error(
    original: tuple[Path, Known], tmp_path: Path, batch: int
):
    copy, known = original
    found = 0
    for seed in range(batch, CASES, BATCHES):
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            outcome = run(copy, folder, known, seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        found += not outcome["ok"]
        shutil.rmtree(folder)
    assert found > 0


def test_the_original_is_sound(original: tuple[Path, Known], tmp_path: Path):
    copy, known = original
    for one in files(copy):
        shutil.copy(one, tmp_path / one.name.replace("copy", "store"))
    outcome = examine(tmp_path / "store.db", known, "nothing")
    assert outcome["ok"]
    assert outcome["read_only"] == known.states[-1]
    assert len(outcome["recover"]["c"]) == 2
