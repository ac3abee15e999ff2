"""Markdown for people: all that was said, and nothing that breaks the page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast import (
    ExportFailed,
    GhostSnapshot,
    Image,
    InvalidArgument,
    Message,
    Opaque,
    Store,
    Text,
    Thinking,
    ToolResult,
    ToolUse,
)
from holdfast.history import export_markdown
from holdfast.history.markdown import _code, _fence


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with holdfast.open(tmp_path / "a.db", durability="process") as store:
        yield store


def exported(store: Store, *messages: Message) -> str:
    session = store.create_session("s", title="A talk", model="m", provider="p")
    for message in messages:
        session.add(message)
    path = store.path.with_name("s.md")
    export_markdown(session, path)
    return path.read_text()


def test_it_has_a_title_facts_and_a_heading_for_each_message(store: Store):
    page = exported(store, Message.user("hello"), Message.assistant("hi\n\nthere"))
    assert page.startswith("# A talk\n\n- Session: `s`\n- Provider: `p`\n- Model: `m`\n")
    assert re.findall(r"^## .*", page, re.M) == ["## 0. User", "## 1. Assistant"]
    assert "\nhello\n" in page and "\nhi\n\nthere\n" in page


def test_every_kind_of_block_is_shown(store: Store):
    page = exported(
        store,
        Message(
            "assistant",
            [
                Thinking("first\nsecond"),
                Text("words"),
                ToolUse("c1", "look", {"at": "é"}),
                Opaque("openai", {"id": 1}),
                GhostSnapshot({"commit": "x"}),
            ],
        ),
        Message(
            "user",
            [
                ToolResult("c1", "seen"),
                ToolResult("c2", [Text("part"), Image("https://e.org/a.png")], is_error=True),
                Image("data:image/png;base64," + "A" * 5000),
            ],
        ),
    )
    assert "> Thinking:\n>\n> first\n> second\n" in page
    assert 'Tool call `look` (`c1`):\n\n```json\n{\n  "at": "é"\n}\n```\n' in page
    assert "Tool result (`c1`):\n\n```\nseen\n```\n" in page
    assert "![image](<https://e.org/a.png>)" in page
    assert "*An image (image/png;base64, 5022 characters).*" in page and "AAAA" not in page
    assert "*An item for openai only.*" in page and "*A snapshot.*" in page


def test_it_says_how_a_step_ended_and_what_is_synthetic(store: Store):
    session = store.create_session("s")
    with pytest.raises(RuntimeError), session.begin_step() as step:
        step.append_text("so far")
        step.announce_call("c1", "pay")
        step.append_args("c1", "{}")
        raise RuntimeError("the line went dead")
    export_markdown(session, store.path.with_name("s.md"))
    page = store.path.with_name("s.md").read_text()
    assert "## 0. Assistant (errored)" in page
    assert "```\nRuntimeError: the line went dead\n```" in page
    assert "Tool result (`c1`, canceled, canceled):" in page


def test_summaries_stand_at_the_end(store: Store):
    session = store.create_session("s")
    for _ in range(3):
        session.add_user("x")
    session.history.add_summary(0, 2, "it was said")
    export_markdown(session, store.path.with_name("s.md"))
    assert (
        store.path.with_name("s.md").read_text().endswith("\n## Summary of 0 to 1\n\nit was said\n")
    )


@given(st.text(alphabet="`~a\n ", max_size=30))
def test_no_text_closes_its_fence(text: str):
    lines = _fence(text).splitlines()
    ticks = lines[0]
    assert set(ticks) == {"`"} and len(ticks) >= 3 and lines[-1] == ticks
    assert ticks not in text


@given(st.text(alphabet="`a", min_size=1, max_size=12))
def test_no_name_closes_its_quotes(text: str):
    quoted = _code(text)
    ticks = re.match("`+", quoted)
    assert ticks is not None
    inside = quoted.removeprefix(ticks[0]).removesuffix(ticks[0]).strip()
    assert inside == text and ticks[0] not in re.findall("`+", inside)


def test_a_failed_export_leaves_the_old_page(tmp_path: Path, store: Store):
    session = store.create_session()
    with pytest.raises(ExportFailed):
        export_markdown(session, tmp_path / "none" / "s.md")
    with pytest.raises(InvalidArgument, match="a file of a store"):
        export_markdown(session, store.path)
