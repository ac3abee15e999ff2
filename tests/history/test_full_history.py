"""FullHistory: ids, taking back, summaries, lazy reading, and tokens that never stop a write."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import apsw
import pytest

import holdfast
from holdfast import (
    EntryNotFound,
    HoldfastError,
    InvalidArgument,
    InvalidMessage,
    Message,
    MessageId,
    SessionNotFound,
    StepBusy,
    StepClosed,
    Store,
    StoreCorrupt,
)
from holdfast.history.entries import microseconds_of, new_entry, time_of
from holdfast.history.full_history import PAGE, FullHistory
from holdfast.journal.engine.rows import NewEntry


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with holdfast.open(tmp_path / "a.db", durability="process") as store:
        yield store


@pytest.fixture
def history(store: Store) -> FullHistory:
    return store.create_session("s").history


def fill(history: FullHistory, count: int) -> None:
    for number in range(count):
        history.push(Message.user(f"m{number}"), 10)


def sql(store: Store, statement: str) -> None:
    """What somebody does to the file who does not know us."""
    db = apsw.Connection(str(store.path))
    try:
        db.execute(statement)
    finally:
        db.close()


class Words:
    """Counts words; fails where it is told to."""

    name = "words"
    exact = True

    def __init__(self, fails: str | None = None) -> None:
        self.fails = fails

    def count_str(self, text: str, /) -> int:
        if self.fails is not None and self.fails in text:
            raise RuntimeError("no such word")
        return len(text.split())

    def count_message(self, message: Message, /) -> int:
        return self.count_str(message.text)


# --- pushing ------------------------------------------------------------------------------------


def test_ids_count_from_zero_in_each_session(store: Store):
    first, second = store.create_session().history, store.create_session().history
    assert [first.push(Message.user("x")) for _ in range(3)] == [0, 1, 2]
    assert [second.push(Message.user("x")) for _ in range(2)] == [0, 1]
    assert (len(first), len(second)) == (3, 2)


def test_an_entry_says_what_is_known_of_it(history: FullHistory):
    entry = history.get_entry(history.push(Message.user("hello"), 7))
    assert (entry.id, entry.message, entry.token_count) == (0, Message.user("hello"), 7)
    assert (entry.status, entry.stream_step_id, entry.summary_id) == ("complete", None, None)
    assert (entry.model_name, entry.stop_reason, entry.usage) == (None, None, None)
    assert entry.metadata == {} and not entry.is_summarized
    assert entry.created_at.utcoffset() == timedelta(0)


def test_a_pushed_message_outlives_its_store(tmp_path: Path):
    with holdfast.open(tmp_path / "a.db") as store:
        store.create_session("s").history.push(Message.user("kept"), 3)
    with holdfast.open(tmp_path / "a.db") as store:
        assert [e.message.text for e in store.session("s").history.entries()] == ["kept"]


@pytest.mark.parametrize("what", ["text", None, {"role": "user"}])
def test_what_is_no_message_is_refused(history: FullHistory, what: object):
    with pytest.raises(InvalidMessage, match="expected a Message"):
        history.push(what)  # type: ignore[arg-type]
    with pytest.raises(InvalidMessage, match="expected a Message"):
        history.push_with_step_id(what, 1, 7)  # type: ignore[arg-type]
    assert len(history) == 0


@pytest.mark.parametrize("count", [-1, True, 1.5, "3", 1 << 60])
def test_a_token_count_that_is_none_is_refused(history: FullHistory, count: object):
    with pytest.raises(InvalidArgument, match="token_count"):
        history.push(Message.user("x"), count)  # type: ignore[arg-type]
    assert len(history) == 0


def test_an_empty_history_is_still_true(history: FullHistory):
    assert history and len(history) == 0


def test_a_history_whose_session_is_gone_says_so(store: Store, history: FullHistory):
    store.delete_session("s")
    for act in (
        lambda: len(history),
        lambda: history.push(Message.user("x")),
        lambda: history.pop_if_last(MessageId(0)),
        lambda: history.add_summary(0, 1, "x"),
        lambda: history.total_tokens,
    ):
        with pytest.raises(SessionNotFound, match="session 's'"):
            act()


# --- steps --------------------------------------------------------------------------------------


def test_the_same_step_twice_is_refused_and_changes_nothing(history: FullHistory):
    history.push_with_step_id(Message.assistant("a"), 1, 42)
    with pytest.raises(StepClosed, match="step 42: is in history already") as refused:
        history.push_with_step_id(Message.assistant("b"), 1, 42)
    assert refused.value.path.endswith("a.db")
    assert [entry.message.text for entry in history.entries()] == ["a"]
    assert history.total_tokens == 1


def test_it_is_the_database_that_refuses_the_same_step(store: Store, history: FullHistory):
    history.push_with_step_id(Message.assistant("a"), 1, 42)
    columns = "role, body, status, created_us, stream_step_id, part, metadata, crc"
    with pytest.raises(apsw.ConstraintError, match=r"stream_step_id.*part"):
        sql(
            store,
            f"INSERT INTO history_entries (id, {columns})"
            f" SELECT id + 1, {columns} FROM history_entries",
        )


def test_a_step_has_a_place_for_what_was_said_and_one_for_its_results(history: FullHistory):
    history.push_with_step_id(Message.assistant("a"), 1, 42)
    history.push_with_step_id(Message.user("results"), 1, 42)
    assert [entry.stream_step_id for entry in history.entries()] == [42, 42]


def test_has_step_id_is_of_this_session(store: Store, history: FullHistory):
    history.push_with_step_id(Message.assistant("a"), 1, 42)
    assert history.has_step_id(42) and not history.has_step_id(41)
    assert not store.create_session().history.has_step_id(42)


def test_a_step_to_come_never_gets_an_id_that_was_pushed_by_hand(store: Store):
    """A message pushed as step 2 took the place of the real step 2, which could never commit."""
    session = store.create_session()
    session.history.push_with_step_id(Message.assistant("by hand"), 1, 2)
    for _ in range(3):
        with session.begin_step() as step:
            step.append_text("x")
        assert step.step_id > 2
    assert len(session.history) == 4


def test_an_unfinished_step_is_not_pushed_by_hand(store: Store, history: FullHistory):
    step = store.create_session("other").begin_step()
    step.append_text("mine")
    with pytest.raises(StepBusy, match="unfinished in session 'other'"):
        history.push_with_step_id(Message.assistant("stolen"), 1, step.step_id)
    assert step.commit() == [0]


# --- taking back --------------------------------------------------------------------------------


def test_the_last_message_is_taken_back_and_its_id_given_again(history: FullHistory):
    fill(history, 2)
    assert history.pop_if_last(MessageId(1)) == Message.user("m1")
    assert len(history) == 1 and history.total_tokens == 10
    assert history.push(Message.user("again")) == 1


@pytest.mark.parametrize("id", [0, 2, -1, 99])
def test_only_the_last_message_is_taken_back(history: FullHistory, id: int):
    fill(history, 2)
    assert history.pop_if_last(MessageId(id)) is None
    assert len(history) == 2


def test_nothing_is_taken_back_from_an_empty_history(history: FullHistory):
    assert history.pop_if_last(MessageId(0)) is None


def test_a_summarised_message_is_not_taken_back(history: FullHistory):
    fill(history, 2)
    history.add_summary(1, 2, "said something")
    assert history.pop_if_last(MessageId(1)) is None


def test_a_message_of_a_step_is_not_taken_back(store: Store):
    session = store.create_session()
    with session.begin_step() as step:
        step.append_text("answer")
    assert session.history.pop_if_last(MessageId(0)) is None
    session.history.push_with_step_id(Message.assistant("x"), 1, 99)
    assert session.history.pop_if_last(MessageId(1)) is None


def test_nothing_is_taken_back_under_an_open_step(store: Store):
    session = store.create_session()
    asked = session.add_user("question")
    step = session.begin_step()
    with pytest.raises(StepBusy):
        session.history.pop_if_last(asked)
    step.discard()
    assert session.history.pop_if_last(asked) == Message.user("question")


def test_taking_back_is_a_change_of_the_session(store: Store):
    session = store.create_session("old")
    last = session.add_user("x")
    store.create_session("new")
    before = {info.id: info.updated_at for info in store.sessions()}
    session.history.pop_if_last(last)
    assert [info.id for info in store.sessions()] == ["old", "new"]
    assert store.sessions()[0].updated_at > before["old"]


# --- summaries ----------------------------------------------------------------------------------


def test_a_summary_stands_for_its_range(history: FullHistory):
    fill(history, 5)
    made = history.add_summary(1, 4, "short", token_count=3, generated_by="m")
    summary = history.summary(made)
    assert (made, summary.covers, summary.content) == (0, range(1, 4), "short")
    assert (summary.token_count, summary.original_tokens, summary.generated_by) == (3, 30, "m")
    assert [entry.summary_id for entry in history.entries()] == [None, 0, 0, 0, None]
    assert (history.summarized_count, history.summaries_len) == (3, 1)


def test_a_summary_knows_what_it_saves(history: FullHistory):
    fill(history, 2)
    small = history.summary(history.add_summary(0, 2, "x", token_count=50, original_tokens=500))
    assert small.compression_ratio() == 0.1 and small.tokens_saved() == 450
    large = history.summary(history.add_summary(0, 2, "x", token_count=9, original_tokens=4))
    assert large.tokens_saved() == 0
    empty = history.summary(history.add_summary(0, 2, "x", token_count=9, original_tokens=0))
    assert empty.compression_ratio() == 1.0


def test_a_summary_over_an_older_one_orphans_it(history: FullHistory):
    fill(history, 6)
    history.add_summary(1, 3, "a")
    assert history.orphaned_summaries() == []
    history.add_summary(0, 2, "b")
    assert history.orphaned_summaries() == []  # Entry 2 still has the older one.
    history.add_summary(0, 6, "c")
    assert history.orphaned_summaries() == [0, 1]
    assert [entry.summary_id for entry in history.entries()] == [2] * 6
    assert (history.summarized_count, history.summaries_len) == (6, 3)


@pytest.mark.parametrize("bounds", [(0, 0), (2, 1), (3, 3), (0, 6), (5, 6), (-1, 2), (0, "2")])
def test_an_invalid_range_is_refused_and_changes_nothing(history: FullHistory, bounds: tuple):
    fill(history, 5)
    with pytest.raises(InvalidArgument):
        history.add_summary(*bounds, "text")
    assert (history.summaries_len, history.summarized_count) == (0, 0)


@pytest.mark.parametrize("content", ["", "  \n", None, 7])
def test_a_summary_must_say_something(history: FullHistory, content: object):
    fill(history, 2)
    with pytest.raises(InvalidArgument, match="content"):
        history.add_summary(0, 1, content)  # type: ignore[arg-type]
    assert history.summaries_len == 0


def test_a_summary_is_checked_once_more_where_nothing_can_come_between(
    history: FullHistory, monkeypatch: pytest.MonkeyPatch
):
    """Entries may be taken back between the look at the range and the transaction."""
    fill(history, 3)

    def meanwhile(_: str) -> int:
        history.pop_if_last(MessageId(2))
        return 1

    monkeypatch.setattr(history, "count_text", meanwhile)
    with pytest.raises(InvalidArgument, match="2 entries"):
        history.add_summary(0, 3, "late", original_tokens=1)
    assert history.summaries_len == 0


# --- reading ------------------------------------------------------------------------------------


def test_entries_iterate_slice_and_index_like_a_list(history: FullHistory):
    fill(history, 20)
    texts = [f"m{n}" for n in range(20)]
    entries = history.entries()
    assert len(entries) == 20 and [e.message.text for e in entries] == texts
    assert [e.message.text for e in reversed(entries)] == texts[::-1]
    assert entries[3].id == 3 and entries[-1].id == 19
    with pytest.raises(IndexError):
        entries[20]
    points = (None, 0, 3, 19, 25, -1, -7)
    for start, stop, step in itertools.product(points, points, (None, 1, 2, -1, -3)):
        found = [e.message.text for e in entries[start:stop:step]]
        assert found == texts[start:stop:step], (start, stop, step)
    assert [e.id for e in history.entries(5, 8)] == [5, 6, 7]
    assert [e.id for e in history.entries(-2)] == [18, 19]


def test_reading_pages_over_the_edges_of_a_page(history: FullHistory):
    put(history, PAGE * 2 + 1)
    assert [entry.id for entry in history.entries()] == list(range(PAGE * 2 + 1))


def put(history: FullHistory, count: int) -> None:
    entry = new_entry(Message.user("x" * 1000), created_us=1, token_count=1, counter="given")
    entries: list[NewEntry] = [entry] * count
    history._engine.add_entries(history._session_id, entries)


def test_a_long_history_is_read_in_little_memory(history: FullHistory):
    put(history, 20_000)
    next(iter(history.entries()))
    tracemalloc.start()
    try:
        assert sum(1 for _ in history.entries()) == 20_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000  # Twenty megabytes went by.


def test_a_half_read_iteration_keeps_nobody_from_writing_or_emptying_the_log(store: Store):
    session = store.create_session()
    put(session.history, PAGE * 2)
    reading = iter(session.history.entries())
    assert next(reading).id == 0
    session.add_user("meanwhile")
    assert store.engine.checkpoint()
    assert [entry.id for entry in reading] == list(range(1, PAGE * 2))


@pytest.mark.parametrize("id", [-1, 2, 1 << 32, (1 << 32) + 1, 1 << 70])
def test_an_entry_that_is_not_there_raises(store: Store, history: FullHistory, id: int):
    """An id past 32 bits reached into the rows of another session."""
    fill(history, 2)
    fill(store.create_session().history, 3)
    with pytest.raises(EntryNotFound, match=f"no entry {id}; it has 2"):
        history.get_entry(id)


def test_a_summary_that_is_not_there_raises(history: FullHistory):
    with pytest.raises(EntryNotFound, match="no summary 0"):
        history.summary(0)


def test_a_damaged_entry_hides_nothing_else(tmp_path: Path):
    told = []
    with holdfast.open(tmp_path / "a.db", on_event=told.append) as store:
        history = store.create_session("s").history
        fill(history, 3)
        sql(store, "UPDATE history_entries SET body = replace(body, 'm1', 'm9')")
        assert [entry.message.text for entry in history.entries()] == ["m0", "m2"]
        assert [(e.session_id, e.seq) for e in told if e.kind == "damage"] == [("s", 1)]
        for act in (lambda: history.get_entry(1), lambda: history.entries()[1]):
            with pytest.raises(StoreCorrupt, match=r"session 's': entry 1: its crc"):
                act()


def test_a_damaged_summary_is_told(store: Store, history: FullHistory):
    fill(history, 2)
    history.add_summary(0, 2, "right")
    sql(store, "UPDATE summaries SET content = 'wrong'")
    with pytest.raises(StoreCorrupt, match="summary 0"):
        history.summary(0)


def test_moments_come_back_as_they_were():
    for microseconds in (0, 1, 1_704_067_200_999_999, 253_402_300_799_999_999):
        assert microseconds_of(time_of(microseconds)) == microseconds


# --- tokens -------------------------------------------------------------------------------------


def test_tokens_are_counted_if_not_given_and_the_counter_is_named(history: FullHistory):
    history.push(Message.user("hello"))
    history.push(Message.user("hello"), 100)
    counted, given = history.entries()
    assert counted.token_count == history.counter.count_message(Message.user("hello"))
    assert (counted.counter, given.counter) == (history.counter.name, "given")
    assert history.total_tokens == (counted.token_count or 0) + 100


def test_a_counter_that_fails_stops_no_write_and_is_asked_again(history: FullHistory):
    counter = history.counter = Words(fails="bad")
    history.push(Message.user("two words"))
    history.push(Message.user("three bad words"))
    assert history.get_entry(1).token_count is None
    assert history.total_tokens == 2  # Asked again, and it still fails.
    counter.fails = None
    assert history.total_tokens == 5
    assert [(e.token_count, e.counter) for e in history.entries()] == [(2, "words"), (3, "words")]


def test_a_summary_counts_first_what_nobody_has_counted(history: FullHistory):
    counter = history.counter = Words(fails="three")
    history.push(Message.user("now three words"))
    counter.fails = None
    assert history.summary(history.add_summary(0, 1, "short")).original_tokens == 3


def test_counts_that_fail_do_not_keep_later_ones_from_being_filled_in(history: FullHistory):
    history.counter = Words(fails="")  # Fails on everything.
    for _ in range(PAGE + 5):
        history._engine.add_entries("s", [new_entry(Message.user("bad"), created_us=1)])
    history.push(Message.user("good one"))
    history.counter = Words(fails="bad")
    assert history.total_tokens == 2


@pytest.mark.parametrize("nonsense", [None, -3, 1.5, "7"])
def test_a_counter_that_gives_nonsense_stops_no_write(history: FullHistory, nonsense: object):
    class Nonsense(Words):
        def count_message(self, message: Message, /) -> int:
            return nonsense  # type: ignore[return-value]

    history.counter = Nonsense()
    assert history.push(Message.user("x")) == 0
    assert history.total_tokens == 0


def test_a_read_only_store_counts_without_storing(tmp_path: Path):
    with holdfast.open(tmp_path / "a.db") as store:
        history = store.create_session("s").history
        history.counter = Words(fails="")
        history.push(Message.user("two words"))
    with holdfast.open(tmp_path / "a.db", read_only=True) as store:
        history = store.session("s").history
        history.counter = Words()
        assert history.total_tokens == 2
        assert history.get_entry(0).token_count is None


def test_every_refusal_is_one_of_ours(history: FullHistory):
    fill(history, 1)
    for act in (
        lambda: history.get_entry(5),
        lambda: history.summary(5),
        lambda: history.add_summary(3, 2, "x"),
        lambda: history.push_with_step_id(Message.user("x"), 1, -1),
    ):
        with pytest.raises(HoldfastError):
            act()


@pytest.mark.parametrize("id", [-(1 << 70), -1, 1 << 31, 1 << 32, 1 << 63, 1 << 70])
def test_an_id_that_no_store_can_hold_is_just_not_there(history: FullHistory, id: int):
    fill(history, 2)
    assert not history.has_step_id(id)
    assert history.pop_if_last(MessageId(id)) is None
    for look in (history.get_entry, history.summary):
        with pytest.raises(EntryNotFound):
            look(id)


def test_a_step_id_that_would_use_up_all_ids_is_refused(store: Store, history: FullHistory):
    with pytest.raises(InvalidArgument, match="step_id"):
        history.push_with_step_id(Message.assistant("x"), 1, 1 << 30)
    history.push_with_step_id(Message.assistant("x"), 1, (1 << 30) - 1)
    with store.session("s").begin_step() as step:
        step.append_text("steps to come are sound")
    assert step.step_id == 1 << 30
