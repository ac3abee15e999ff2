"""Whatever is done to a history, it equals a plain Python list."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import holdfast
from holdfast import InvalidArgument, Message, MessageId, StepClosed
from holdfast.history import export_history, import_history


@dataclass
class Entry:
    text: str
    tokens: int
    step: int | None = None
    summary: int | None = None


@dataclass
class Model:
    entries: list[Entry] = field(default_factory=list)
    summaries: list[tuple[int, int, str]] = field(default_factory=list)


class HistoryMachine(RuleBasedStateMachine):
    """The model is two lists, of entries and of summaries; reopening is a rule like any other."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="holdfast-")
        self.path = Path(self.folder.name) / "a.db"
        self.store = holdfast.open(self.path, durability="process")
        self.session = self.store.create_session("s0")
        self.model = Model()
        self.imports = 0
        self.steps: set[int] = set()  # of the whole store: each has one place in it

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.folder.cleanup()

    @rule(text=st.text(min_size=1, max_size=20), tokens=st.integers(0, 1000))
    def push(self, text: str, tokens: int) -> None:
        assert self.session.history.push(Message.user(text), tokens) == len(self.model.entries)
        self.model.entries.append(Entry(text, tokens))

    @rule(step=st.integers(1, 6), tokens=st.integers(0, 1000))
    def push_with_step(self, step: int, tokens: int) -> None:
        known = step in self.steps
        try:
            self.session.history.push_with_step_id(Message.assistant("a"), tokens, step)
            assert not known
            self.steps.add(step)
            self.model.entries.append(Entry("a", tokens, step))
        except StepClosed:
            assert known

    @rule(offset=st.integers(-2, 1))
    def pop(self, offset: int) -> None:
        wanted = len(self.model.entries) + offset
        popped = self.session.history.pop_if_last(MessageId(wanted))
        last = self.model.entries[-1] if self.model.entries else None
        if offset == -1 and last is not None and last.summary is None and last.step is None:
            assert popped is not None and popped.text == last.text
            self.model.entries.pop()
        else:
            assert popped is None

    @rule(start=st.integers(-1, 8), length=st.integers(-1, 8))
    def summarise(self, start: int, length: int) -> None:
        end = start + length
        legal = 0 <= start < end <= len(self.model.entries)
        try:
            made = self.session.history.add_summary(start, end, f"{start}-{end}", token_count=1)
        except InvalidArgument:
            assert not legal
            return
        assert legal and made == len(self.model.summaries)
        self.model.summaries.append((start, end, f"{start}-{end}"))
        for entry in self.model.entries[start:end]:
            entry.summary = made

    @rule(text=st.text(min_size=1, max_size=5))
    def step(self, text: str) -> None:
        with self.session.begin_step() as step:
            step.append_text(text)
        assert step.step_id not in self.steps
        self.steps.add(step.step_id)
        entry = self.session.history.entries()[-1]
        self.model.entries.append(Entry(text, entry.token_count or 0, step.step_id))

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = holdfast.open(self.path, durability="process")
        assert self.store.recovery.is_empty
        self.session = self.store.session(self.session.id)

    @precondition(lambda self: self.imports < 3)
    @rule()
    def export_and_import(self) -> None:
        archive = self.path.with_name("h.json")
        export_history(self.session, archive)
        self.imports += 1
        self.session = import_history(self.store, archive, f"s{self.imports}")
        for entry in self.model.entries:
            entry.step = None  # A step belongs to the session in which it was taken.

    @invariant()
    def equals_the_model(self) -> None:
        if not hasattr(self, "session"):
            return
        history, model = self.session.history, self.model
        assert [
            (e.id, e.message.text, e.token_count, e.stream_step_id, e.summary_id)
            for e in history.entries()
        ] == [(n, e.text, e.tokens, e.step, e.summary) for n, e in enumerate(model.entries)]
        assert [(s.covers.start, s.covers.stop, s.content) for s in history.summaries()] == (
            model.summaries
        )
        assert len(history) == len(model.entries)
        assert history.total_tokens == sum(entry.tokens for entry in model.entries)
        summarised = [entry.summary for entry in model.entries if entry.summary is not None]
        assert history.summarized_count == len(summarised)
        assert history.orphaned_summaries() == [
            n for n in range(len(model.summaries)) if n not in summarised
        ]


TestHistoryMachine = HistoryMachine.TestCase
TestHistoryMachine.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, print_blob=True
)
