"""The canonical message: a role and a list of blocks, the same for every provider.

A message is checked once, when it is built, and frozen from then on. Its JSON has one form: the
fields in the order they are declared, none left out, nothing that UTF-8 cannot hold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError, PydanticSerializationError, to_json

from holdfast.journal.blocks import (
    Block,
    Checked,
    GhostSnapshot,
    Image,
    JsonObject,
    Opaque,
    OutputStatus,
    Text,
    Thinking,
    ToolResult,
    ToolUse,
)
from holdfast.journal.errors import InvalidMessage
from holdfast.journal.jsontext import clean_text

__all__ = [
    "Block",
    "GhostSnapshot",
    "Image",
    "Message",
    "Opaque",
    "OutputStatus",
    "Role",
    "Text",
    "Thinking",
    "ToolResult",
    "ToolUse",
    "message_from_json",
    "message_to_json",
    "text_to_json",
]

Role = Literal["system", "user", "assistant"]


def _as_blocks(content: object) -> object:
    if isinstance(content, str):
        return [Text(content)]
    # Pydantic would take anything that can be iterated, and a block can: over its fields.
    if not isinstance(content, list | tuple):
        found = type(content).__name__
        problem = f"must be text or a list of blocks, not {found}"
        raise PydanticCustomError("not_json", "{problem}", {"problem": problem, "place": ""})
    return content


class Message(Checked):
    """One message of a conversation. A plain text as content becomes one `Text` block.

    `metadata` is any JSON object; signatures in blocks belong to the provider and model it names.
    """

    role: Role
    content: Annotated[
        list[Annotated[Block, Field(discriminator="type")]],
        BeforeValidator(_as_blocks),
        Field(min_length=1),
    ]
    metadata: JsonObject = Field(default_factory=dict)

    if TYPE_CHECKING:

        def __init__(
            self,
            role: Role,
            content: str | Sequence[Block],
            metadata: Mapping[str, Any] = ...,
        ) -> None: ...

    @classmethod
    def user(cls, text: str) -> Message:
        """A message of the user with one text."""
        return cls("user", text)

    @classmethod
    def assistant(cls, text: str) -> Message:
        """A message of the assistant with one text."""
        return cls("assistant", text)

    @classmethod
    def system(cls, text: str) -> Message:
        """A system message with one text."""
        return cls("system", text)

    @property
    def text(self) -> str:
        """The words: all text blocks joined, with nothing between them."""
        return "".join(block.text for block in self.content if isinstance(block, Text))

    @property
    def tool_calls(self) -> list[ToolUse]:
        """The calls, in order."""
        return [block for block in self.content if isinstance(block, ToolUse)]

    @property
    def tool_results(self) -> list[ToolResult]:
        """The results, in order."""
        return [block for block in self.content if isinstance(block, ToolResult)]


def message_to_json(message: Message) -> str:
    """The one JSON form of a message: equal messages give equal text."""
    try:
        return message.model_dump_json()
    except PydanticSerializationError as error:
        # Only a message that went round the checks (`model_construct`) can get here.
        raise InvalidMessage(f"Message: has no JSON form: {error}") from None


def text_to_json(role: Role, text: str) -> str:
    """What `message_to_json` gives for `Message(role, text)`, without building it.

    For a pass over thousands of plain texts, in which building messages would take most of the
    time.
    """
    words = to_json(clean_text(text)).decode()
    return (
        f'{{"role":"{role}","content":[{{"type":"text","text":{words},"signature":null}}],'
        '"metadata":{}}'
    )


def message_from_json(text: str | bytes) -> Message:
    """The message that `message_to_json` was given, or one from elsewhere in the same form."""
    try:
        # Not pydantic's own parser: it stops at an escaped lone surrogate, which others do write.
        fields = json.loads(text)
    except RecursionError:
        raise InvalidMessage("Message: JSON is nested too deeply") from None
    except ValueError as error:
        raise InvalidMessage(f"Message: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidMessage(f"Message: must be a JSON object, not {type(fields).__name__}")
    return Message.model_validate(fields)
