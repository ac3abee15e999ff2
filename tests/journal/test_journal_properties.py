"""Whatever is streamed, however it is cut and wherever it stops: the journal equals its model."""

import json
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from holdfast.journal import Complete, Errored, Incomplete, StreamJournal
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.journal.jsontext import clean_text

# Surrogates too: a provider's JSON may hold one half of a pair.
words = st.text(st.characters(exclude_categories=()), max_size=12)
labels = st.text(st.characters(exclude_categories=()), min_size=1, max_size=4)
leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=6)
objects = st.dictionaries(
    st.text(max_size=4),
    st.recursive(leaves, lambda inner: st.lists(inner, max_size=3), max_leaves=5),
    max_size=3,
)


def cut(text, places):
    """The text in pieces, cut at these places."""
    at = sorted({place % (len(text) + 1) for place in places})
    return [text[low:high] for low, high in zip([0, *at], [*at, len(text)], strict=True)]


@given(text=words, places=st.lists(st.integers(0, 50), max_size=6))
def test_a_text_comes_back_however_it_is_cut(text, places):
    with StreamJournal.open_in_memory() as journal:
        step = journal.begin_step("m")
        for piece in cut(text, places):
            step.append_text(piece)
        assert step.text == clean_text(text)
        assert step.seal().text == clean_text(text)


@given(arguments=objects, places=st.lists(st.integers(0, 200), max_size=12), escaped=st.booleans())
def test_arguments_come_back_however_they_are_cut(arguments, places, escaped):
    raw = json.dumps(arguments, ensure_ascii=escaped)
    with StreamJournal.open_in_memory() as journal:
        step = journal.begin_step("m")
        step.announce_call("c", "f")
        for piece in cut(raw, places):
            step.append_args("c", piece)
        step.append_done()
        (call,) = step.seal().tool_calls
        assert (call.input, call.raw_arguments) == (arguments, raw)


class ModelStep:
    """The dumbest thing that can be right: a list of what was said."""

    def __init__(self, step_id, handle):
        self.step_id = step_id
        self.handle = handle  # None once its journal was closed
        self.text = [""]  # a call ends a block of text
        self.events = 0
        self.end = None
        self.error = ""
        self.sealed = False


class JournalMachine(RuleBasedStateMachine):
    """Steps are begun, spoken to, ended, left and taken over; nothing is lost or invented."""

    steps = Bundle("steps")

    @initialize()
    def open(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "j.db"
        self.journal = self._open()
        self.living = {}
        self.newest = 0

    def _open(self):
        return StreamJournal(SqliteEngine.open(self.path, durability="process"))

    def teardown(self):
        if hasattr(self, "journal"):
            self.journal.close()
            self.folder.cleanup()

    @rule(target=steps)
    def begin(self):
        handle = self.journal.begin_step("m")
        assert handle.step_id == self.newest + 1
        self.newest = handle.step_id
        self.living[handle.step_id] = ModelStep(handle.step_id, handle)
        return self.living[handle.step_id]

    @rule(step=steps, delta=words)
    def say(self, step, delta):
        if step.handle is not None and step.end is None and not step.sealed:
            step.handle.append_text(delta)
            step.text[-1] += delta
            step.events += 1

    @rule(step=steps, call_id=labels)
    def call(self, step, call_id):
        if step.handle is None or step.end is not None or step.sealed:
            return
        if step.handle._book.get(call_id) is None:
            step.handle.announce_call(call_id, "f")
            step.handle.append_args(call_id, "{}")
            step.text.append("")
            step.events += 2

    @rule(step=steps, well=st.booleans(), message=words)
    def end(self, step, well, message):
        if step.handle is not None and step.end is None and not step.sealed:
            if well:
                step.handle.append_done()
            else:
                step.handle.append_error(message)
            step.end, step.error = ("done" if well else "error"), clean_text(message)
            step.events += 1

    @rule(step=steps)
    def seal(self, step):
        if step.handle is not None:
            assert step.handle.seal().text == "".join(map(clean_text, step.text))
        else:
            assert self.journal.seal_unsealed(step.step_id) == self._said(step)
        step.sealed = True

    @rule(target=steps, step=consumes(steps), commit=st.booleans())
    def finish(self, step, commit):
        if commit and not step.sealed:
            return step
        ask = self.journal.commit_and_prune_step if commit else self.journal.discard_step
        assert ask(step.step_id) == step.events
        del self.living[step.step_id]
        return multiple()

    @rule()
    def reopen(self):
        self.journal.close()
        self.journal = self._open()
        for step in self.living.values():
            step.handle = None

    def _said(self, step):
        return clean_text("".join(step.text))

    @invariant()
    def what_was_left_equals_the_model(self):
        if not hasattr(self, "journal"):
            return
        left = self.journal.recover_all()
        expected = [step for step in self.living.values() if step.handle is None]
        assert [one.step_id for one in left] == [step.step_id for step in expected]
        for one, step in zip(left, expected, strict=True):
            kind = {"done": Complete, "error": Errored, None: Incomplete}[step.end]
            assert type(one) is (Complete if step.sealed else kind)
            assert one.partial_text == self._said(step)
            assert (one.last_seq, one.gap_at) == (step.events, None)
            if isinstance(one, Errored):
                assert one.error == step.error

    @invariant()
    def the_counts_equal_the_model(self):
        if not hasattr(self, "journal"):
            return
        stats = self.journal.stats()
        assert stats.current_step_id == self.newest
        assert stats.sealed == sum(s.events for s in self.living.values() if s.sealed)
        assert stats.unsealed == sum(s.events for s in self.living.values() if not s.sealed)


TestJournalMachine = JournalMachine.TestCase
TestJournalMachine.settings = settings(max_examples=40, stateful_step_count=25)
