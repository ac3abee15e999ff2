"""The blocks a message is made of, and the one door through which they are checked.

Whatever is wrong with a block or a message comes out as one `InvalidMessage` that names the field,
however it was built: by its constructor, by `model_validate`, or from JSON.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from enum import StrEnum
from inspect import Parameter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictStr,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from holdfast.journal.errors import InvalidMessage
from holdfast.journal.jsontext import NotJson, clean_object, clean_text


class OutputStatus(StrEnum):
    """How the run of a tool ended."""

    SUCCESS = "success"
    FAILED = "failed"
    CANCELED = "canceled"
    TIMEOUT = "timeout"

    @classmethod
    def parse(cls, text: str) -> OutputStatus:
        """Read a status from anywhere: a word that is none of ours means failed."""
        try:
            return cls(text)
        except ValueError:
            return cls.FAILED


def _check_text(value: object) -> object:
    return clean_text(str.__str__(value)) if isinstance(value, str) else value


def _check_object(value: object) -> dict[str, Any]:
    try:
        return clean_object(value)
    except NotJson as error:
        raise PydanticCustomError(
            "not_json", "{problem}", {"problem": error.problem, "place": error.place}
        ) from None


def _check_status(value: object) -> object:
    return OutputStatus.parse(value) if isinstance(value, str) else value


# StrictStr: bytes are no text.  Cleaned first, because pydantic cannot take a surrogate at all.
CleanText = Annotated[StrictStr, BeforeValidator(_check_text)]
NonEmptyText = Annotated[StrictStr, BeforeValidator(_check_text), Field(min_length=1)]
JsonObject = Annotated[dict[str, Any], BeforeValidator(_check_object)]


class Checked(BaseModel):
    """A frozen model; its fields may be given by position, its one error is `InvalidMessage`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    _by_position: ClassVar[tuple[str, ...]] = ()

    def __init__(self, /, *values: Any, **fields: Any) -> None:
        for name, value in self._named(values):
            if name in fields:
                raise InvalidMessage(f"{type(self).__name__}: {name}: given twice")
            fields[name] = value
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise _invalid(type(self), error) from None

    # Without this mark pydantic would call `__init__` for every block inside a message, and wrap
    # what it raises: slower, and the place of the bad field would be lost.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls._by_position = tuple(name for name in cls.model_fields if name != "type")
        # For whoever asks how it is called (`help`, editors, generators of test values): pydantic
        # says by keyword only.
        known = inspect.signature(cls).parameters
        cls.__signature__ = inspect.Signature(
            [known[name].replace(kind=Parameter.POSITIONAL_OR_KEYWORD) for name in cls._by_position]
        )

    @classmethod
    def _named(cls, values: tuple[Any, ...]) -> list[tuple[str, Any]]:
        if len(values) > len(cls._by_position):
            fields = ", ".join(cls._by_position)
            raise InvalidMessage(f"{cls.__name__}: {len(values)} values for the fields {fields}")
        return list(zip(cls._by_position, values, strict=False))

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """As pydantic's, with `InvalidMessage` for its `ValidationError`."""
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise _invalid(cls, error) from None

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """As pydantic's, with `InvalidMessage` for its `ValidationError`."""
        try:
            return super().model_validate_json(json_data, **options)
        except ValidationError as error:
            raise _invalid(cls, error) from None


class Text(Checked):
    """Words. May be empty, since a stream can hold "", but no provider accepts an empty one."""

    type: Literal["text"] = "text"
    text: CleanText
    signature: CleanText | None = None

    if TYPE_CHECKING:

        def __init__(self, text: str, signature: str | None = None) -> None: ...


class Image(Checked):
    """A picture by its address; a `data:` address carries the picture itself."""

    type: Literal["image"] = "image"
    url: NonEmptyText
    media_type: CleanText | None = None

    if TYPE_CHECKING:

        def __init__(self, url: str, media_type: str | None = None) -> None: ...


class ToolUse(Checked):
    """A call of a tool. `raw_arguments` are the arguments as the provider wrote them."""

    type: Literal["tool_use"] = "tool_use"
    id: NonEmptyText
    name: NonEmptyText
    input: JsonObject
    raw_arguments: CleanText | None = None
    signature: CleanText | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            id: str,
            name: str,
            input: Mapping[str, Any],
            raw_arguments: str | None = None,
            signature: str | None = None,
        ) -> None: ...


def _text_or_blocks(value: object) -> str:
    return "<blocks>" if isinstance(value, list | tuple) else "<text>"


class ToolResult(Checked):
    """What a tool gave back. `synthetic` is None unless nobody heard it from the tool itself.

    An error without a status has status `failed`.
    """

    type: Literal["tool_result"] = "tool_result"
    tool_use_id: NonEmptyText
    content: Annotated[
        Annotated[CleanText, Tag("<text>")]
        | Annotated[list[Annotated[Text | Image, Field(discriminator="type")]], Tag("<blocks>")],
        Discriminator(_text_or_blocks),
    ]
    is_error: StrictBool = False
    status: Annotated[OutputStatus, BeforeValidator(_check_status)] = OutputStatus.SUCCESS
    synthetic: Literal["canceled", "in_doubt", "resolved"] | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            tool_use_id: str,
            content: str | Sequence[Text | Image],
            is_error: bool = False,
            status: OutputStatus | str = OutputStatus.SUCCESS,
            synthetic: Literal["canceled", "in_doubt", "resolved"] | None = None,
        ) -> None: ...

    @model_validator(mode="before")
    @classmethod
    def _an_error_without_a_status_has_failed(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("is_error") is True and "status" not in fields:
            return {**fields, "status": OutputStatus.FAILED}
        return fields


class Thinking(Checked):
    """What a model thought aloud. Providers take it back only with the signature they gave it."""

    type: Literal["thinking"] = "thinking"
    text: CleanText
    signature: CleanText | None = None

    if TYPE_CHECKING:

        def __init__(self, text: str, signature: str | None = None) -> None: ...


class Opaque(Checked):
    """An item that one provider wants back verbatim and that means nothing to us."""

    type: Literal["opaque"] = "opaque"
    provider: NonEmptyText
    data: JsonObject

    if TYPE_CHECKING:

        def __init__(self, provider: str, data: Mapping[str, Any]) -> None: ...


class GhostSnapshot(Checked):
    """State that must survive every compaction."""

    type: Literal["ghost_snapshot"] = "ghost_snapshot"
    data: JsonObject

    if TYPE_CHECKING:

        def __init__(self, data: Mapping[str, Any]) -> None: ...


Block = Text | Image | ToolUse | ToolResult | Thinking | Opaque | GhostSnapshot


def _invalid(model: type[BaseModel], error: ValidationError) -> InvalidMessage:
    """One error for all that is wrong, in places, rules and types: no text of a transcript."""
    problems = [_problem(details) for details in error.errors(include_url=False)]
    more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    return InvalidMessage(f"{model.__name__}: {'; '.join(problems[:3])}{more}")


def _problem(details: ErrorDetails) -> str:
    place = _place(details["loc"])
    context, found = details.get("ctx", {}), details["input"]
    match details["type"]:
        case "missing":
            rule = "missing"
        case "extra_forbidden":
            rule = "unknown field"
        case "not_json":
            place, rule = place + context["place"], context["problem"]
        case "union_tag_not_found":
            place, rule = f"{place}.type", "missing"
        case "union_tag_invalid":
            place, rule = (
                f"{place}.type",
                f"{context['tag'][:40]!r} is none of {context['expected_tags']}",
            )
        case "literal_error":
            shown = repr(found[:40]) if isinstance(found, str) else type(found).__name__
            rule = f"must be {context['expected']}, not {shown}"
        case "model_attributes_type" | "model_type" | "list_type":
            wanted = "a list of blocks" if details["type"] == "list_type" else "an object"
            rule = f"must be {wanted}, not {type(found).__name__}"
        case "string_type":
            rule = f"must be text, not {type(found).__name__}"
        case "string_too_short" | "too_short":
            rule = "must not be empty"
        case _:
            rule = f"{details['msg'][:1].lower()}{details['msg'][1:]}, not {type(found).__name__}"
    return f"{place}: {rule}" if place else rule


def _place(location: tuple[int | str, ...]) -> str:
    """`("content", 0, "tool_use", "id")` as `content[0].id`: the tags of unions are no fields."""
    place, after_index = "", False
    for step in location:
        if isinstance(step, int):
            place += f"[{step}]"
        elif not after_index and not step.startswith("<"):
            place += f".{step}" if place else step
        after_index = isinstance(step, int)
    return place
