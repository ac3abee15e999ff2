"""Any interleaving of events, cut anywhere, recovers to a legal history of what was acknowledged.

On a disk that does not sync: nothing here is about the power.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

from crash_rig import SESSION, Op, do, expected, run, violations
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import holdfast
from holdfast.recovery.faults import FaultDisk

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
FRAGMENT = st.sampled_from(['{"a"', ": 1}", "{}", "{", "}", "[1]", "", " ", '{"b": "c"}'])
DELTA = st.one_of(
    st.tuples(st.just("text"), TEXT),
    st.tuples(st.just("think"), TEXT),
    st.tuples(st.just("call")),
    st.tuples(st.just("args"), st.integers(0, 3), FRAGMENT),
)
AFTER = st.one_of(
    st.tuples(st.just("start"), st.integers(0, 3), st.sampled_from(["never", "safe"])),
    st.tuples(st.just("result"), st.integers(0, 3), TEXT),
)


@st.composite
def turns(draw: st.DrawFn) -> list[Op]:
    """One turn that may be cut anywhere: deltas, an ending, sealing, starts and results."""
    script: list[Op] = [("user", draw(TEXT) + "?"), ("begin",)]
    calls: list[str] = []
    for verb, *words in draw(st.lists(DELTA, max_size=12)):
        if verb == "call":
            calls.append(f"c{len(calls)}")
            script.append(("call", calls[-1], "run"))
        elif verb != "args":
            script.append((verb, *words))
        elif calls:
            script.append(("args", calls[words[0] % len(calls)], words[1]))
    script += draw(st.sampled_from([[], [("done",)], [("error", "overloaded")]]))
    script.append(("seal",))
    ready = _ready(script)
    answered: set[str] = set()
    for verb, which, word in draw(st.lists(AFTER, max_size=6)) if ready else []:
        call_id = ready[which % len(ready)]
        if call_id not in answered:
            script.append((verb, call_id, word))
            answered |= {call_id} if verb == "result" else set()
    if draw(st.booleans()):
        script += [("result", c, "late") for c in ready if c not in answered]
        script.append(("commit",))
    return script


def _ready(script: list[Op]) -> list[str]:
    """The calls that are in the message, by the model."""
    said = [entry for entry in expected(script) if entry[0] == "assistant"]
    return [block[1] for entry in said for block in entry[2] if block[0] == "call"]


@st.composite
def cut_scripts(draw: st.DrawFn) -> list[Op]:
    """Whole turns, which end in a commit, and then one that is cut off somewhere."""
    whole = [turn for turn in draw(st.lists(turns(), max_size=2)) if turn[-1] == ("commit",)]
    last = draw(turns())
    return [*itertools.chain(*whole), *last[: draw(st.integers(0, len(last)))]]


@settings(max_examples=150)
@given(cut_scripts())
def test_any_stream_cut_anywhere_recovers_to_exactly_what_was_acknowledged(
    script: list[Op],
) -> None:
    script = _first_starts_stand(script)
    with tempfile.TemporaryDirectory() as folder, FaultDisk() as disk:
        path = Path(folder) / "s.db"
        with holdfast.open(path, vfs=disk.name) as store:
            run(store.create_session(SESSION), script)
        with holdfast.open(path, vfs=disk.name) as store:
            session = store.session(SESSION)
            assert holdfast.recovery.validate(session.messages()).is_valid
            stored = [entry.message for entry in session.history.entries()]
            assert holdfast.recovery.validate(stored).is_valid
        assert violations(path, [expected(script)]) == []


def _first_starts_stand(script: list[Op]) -> list[Op]:
    """A call is started once a step: the second start is a no-op, which the model does not know."""
    kept: list[Op] = []
    started: set[str] = set()
    for op in script:
        if op[0] == "begin":
            started = set()
        if op[0] == "start":
            if op[1] in started:
                continue
            started.add(op[1])
        kept.append(op)
    return kept


class SessionsThatCrash(RuleBasedStateMachine):
    """Whatever is done and whenever the owner goes away, history equals the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.disk = FaultDisk()
        self.path = Path(self.folder.name) / "s.db"
        self.script: list[Op] = []
        self.calls: list[str] = []
        self.sealed = self.ended = False

    @initialize()
    def open(self) -> None:
        self.store = holdfast.open(self.path, vfs=self.disk.name)
        self.session = self.store.create_session(SESSION)
        self.step: Any = None

    def do(self, *op: Any) -> None:
        self.step = do(self.session, self.step, op)
        self.script.append(op)

    @precondition(lambda self: self.step is None)
    @rule(text=TEXT)
    def add(self, text: str) -> None:
        self.do("user", text + "?")

    @precondition(lambda self: self.step is None)
    @rule()
    def begin(self) -> None:
        self.do("begin")
        self.calls, self.sealed, self.ended = [], False, False

    @precondition(lambda self: self.step is not None and not self.ended)
    @rule(kind=st.sampled_from(["text", "think"]), text=TEXT)
    def append(self, kind: str, text: str) -> None:
        self.do(kind, text)

    @precondition(lambda self: self.step is not None and not self.ended)
    @rule(fragment=FRAGMENT)
    def call(self, fragment: str) -> None:
        self.calls.append(f"c{len(self.calls)}")
        self.do("call", self.calls[-1], "run")
        self.do("args", self.calls[-1], fragment)

    @precondition(lambda self: self.step is not None and not self.ended)
    @rule()
    def end(self) -> None:
        self.ended = True
        self.do("done")

    @precondition(lambda self: self.step is not None and not self.sealed)
    @rule()
    def seal(self) -> None:
        self.sealed = self.ended = True
        self.do("seal")
        self.ready = _ready(self.script[self.last_begin() :])

    @precondition(lambda self: self.step is not None and self.sealed and self.ready)
    @rule(which=st.integers(0, 3), answer=st.booleans())
    def run_tool(self, which: int, answer: bool) -> None:
        call_id = self.ready[which % len(self.ready)]
        done = {op[:2] for op in self.script[self.last_begin() :]}
        if ("start", call_id) not in done and ("result", call_id) not in done:
            self.do("start", call_id, "never")
        if answer and ("result", call_id) not in done:
            self.do("result", call_id, "answer")

    @precondition(lambda self: self.step is not None)
    @rule()
    def commit_or_leave(self) -> None:
        done = {op[:2] for op in self.script[self.last_begin() :]}
        if self.sealed and all(("result", call_id) in done for call_id in self.ready):
            self.do("commit")

    @precondition(lambda self: self.step is not None)
    @rule()
    def discard(self) -> None:
        self.do("discard")

    @rule()
    def crash(self) -> None:
        """The owner goes away; the next one finds what was on record, once."""
        self.store.close()
        if self.step is not None:
            self.step = None
            self.script.append(("commit",))
        holdfast.open(self.path, vfs=self.disk.name).close()
        assert violations(self.path, [expected(self.script)]) == []
        self.store = holdfast.open(self.path, vfs=self.disk.name)
        self.session = self.store.session(SESSION)

    def last_begin(self) -> int:
        return max(n for n, op in enumerate(self.script) if op == ("begin",))

    def teardown(self) -> None:
        self.store.close()
        self.disk.close()
        self.folder.cleanup()


TestSessionsThatCrash = SessionsThatCrash.TestCase
TestSessionsThatCrash.settings = settings(max_examples=40, stateful_step_count=30)
