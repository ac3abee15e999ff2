"""Markdown export: a session for people to read. Nothing reads it back."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import assert_never

from holdfast.history.archive import Exportable, whole_entries
from holdfast.history.atomic_file import atomic_file, refuse_store_files
from holdfast.history.entries import HistoryEntry
from holdfast.journal.blocks import Block
from holdfast.journal.messages import (
    GhostSnapshot,
    Image,
    Opaque,
    Text,
    Thinking,
    ToolResult,
    ToolUse,
)

ADDRESS_CHARS_MAX = 200


def export_markdown(session: Exportable, path: str | os.PathLike[str]) -> None:
    """Write a session to `path` for people, whole or not at all; a file there is replaced.

    Texts stand as they are; whatever came from a tool stands in a fence that it cannot close.
    """
    history = session.history
    refuse_store_files(path)
    row = history.row()
    with atomic_file(path) as file:
        file.write(f"# {_line(row.title or row.session_id)}\n\n")
        facts = (("Session", row.session_id), ("Provider", row.provider), ("Model", row.model))
        file.writelines(f"- {name}: {_code(value)}\n" for name, value in facts if value)
        for entry in whole_entries(history, row.entries):
            file.write("\n" + "\n\n".join(_entry(entry)) + "\n")
        for summary in history.summaries():
            first, last = summary.covers.start, summary.covers.stop - 1
            file.write(f"\n## Summary of {first} to {last}\n\n{summary.content}\n")


def _entry(entry: HistoryEntry) -> Iterator[str]:
    mark = "" if entry.status == "complete" else f" ({entry.status})"
    yield f"## {entry.id}. {entry.message.role.capitalize()}{mark}"
    yield f"*{entry.created_at.isoformat(timespec='seconds')}*"
    for block in entry.message.content:
        text = _block(block)
        if text:
            yield text
    error = entry.metadata.get("error") or entry.metadata.get("exception")
    if error:
        yield "Error:\n\n" + _fence(str(error))


def _block(block: Block) -> str:
    match block:
        case Text():
            return block.text
        case Thinking():
            return _quote(f"Thinking:\n\n{block.text}") if block.text else ""
        case Image():
            return _image(block)
        case ToolUse():
            arguments = json.dumps(block.input, ensure_ascii=False, indent=2)
            head = f"Tool call {_code(block.name)} ({_code(block.id)}):"
            return f"{head}\n\n{_fence(arguments, 'json')}"
        case ToolResult():
            return _result(block)
        case Opaque():
            return f"*An item for {_line(block.provider)} only.*"
        case GhostSnapshot():
            return "*A snapshot.*"
        case _:
            assert_never(block)


def _result(result: ToolResult) -> str:
    notes = [str(result.status)] if result.is_error or result.status != "success" else []
    if result.synthetic is not None:
        notes.append(result.synthetic.replace("_", " "))
    mark = f", {', '.join(notes)}" if notes else ""
    parts = [f"Tool result ({_code(result.tool_use_id)}{mark}):"]
    content = [Text(result.content)] if isinstance(result.content, str) else result.content
    parts += [_fence(part.text) if isinstance(part, Text) else _image(part) for part in content]
    return "\n\n".join(parts)


def _image(image: Image) -> str:
    address = image.url
    if address.startswith("data:") or len(address) > ADDRESS_CHARS_MAX:
        kind = image.media_type or address.partition(",")[0].removeprefix("data:")[:40]
        return f"*An image ({_line(kind)}, {len(address)} characters).*"
    plain = re.sub(r"[<>\s]", "", address)
    return f"![image](<{plain}>)"


def _fence(text: str, language: str = "") -> str:
    """A block of code whose fence is longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    ticks = "`" * max(3, longest + 1)
    return f"{ticks}{language}\n{text}\n{ticks}"


def _code(text: str) -> str:
    text = _line(text)
    ticks = "`" * (max((len(run) for run in re.findall(r"`+", text)), default=0) + 1)
    space = " " if "`" in text else ""
    return f"{ticks}{space}{text}{space}{ticks}"


def _quote(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())


def _line(text: str) -> str:
    return " ".join(text.split())
