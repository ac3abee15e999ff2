"""What may stand in our JSON: text that UTF-8 can hold, values that any parser gives back equal."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

# JSON parsers give up at different depths, and each of them must be able to read what we store.
DEPTH_MAX = 128
# Python refuses to print an integer of more than 4,300 digits; this stays well below.
INTEGER_BITS_MAX = 8192


def clean_text(text: str) -> str:
    """The text as UTF-8 can hold it: surrogate pairs joined, a lone surrogate as U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def clean_object(value: object) -> dict[str, Any]:
    """A copy of a JSON object that comes back equal from our JSON, or `ValueError` with the place.

    Texts are cleaned as by `clean_text` and tuples become lists. Refused is what JSON has no word
    for: keys that are no text, numbers that are not finite, objects of a program.
    """
    if not isinstance(value, Mapping):
        raise NotJson(f"must be an object, not {type(value).__name__}")
    cleaned: dict[str, Any] = _clean_json(value, DEPTH_MAX)
    return cleaned


def parse_arguments(raw: str) -> dict[str, Any] | None:
    """A call's arguments, ready to be the `input` of a `ToolUse`; None if they are no JSON object.

    Stricter than `json.loads`: what it accepts (NaN, 1e400) and a message refuses must be found
    out before the message is built.
    """
    try:
        return clean_object(json.loads(raw))
    except (ValueError, RecursionError):
        return None


class NotJson(ValueError):
    """A value that JSON cannot hold, and its place.

    The place is put together on the way out, so that good values pay nothing for it.
    """

    def __init__(self, problem: str, place: str = "") -> None:
        super().__init__(problem, place)
        self.problem, self.place = problem, place

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}" if self.place else self.problem

    def within(self, step: str) -> NotJson:
        """The same problem, seen from one level further up."""
        return NotJson(self.problem, step + self.place)


def _clean_json(value: Any, depth_left: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return clean_text(str.__str__(value))
    if isinstance(value, int):
        if value.bit_length() > INTEGER_BITS_MAX:
            raise NotJson(f"is an integer of more than {INTEGER_BITS_MAX} bits")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise NotJson("is not a finite number")
        return float(value)
    if depth_left == 0:
        raise NotJson(f"is nested more than {DEPTH_MAX} deep")
    if isinstance(value, Mapping):
        return {
            _clean_key(key): _clean_item(item, f".{key}", depth_left - 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_clean_item(item, i, depth_left - 1) for i, item in enumerate(value)]
    raise NotJson(f"must be JSON, not {type(value).__name__}")


def _clean_key(key: object) -> str:
    if not isinstance(key, str):
        raise NotJson(f"must have texts as keys, not {type(key).__name__}")
    return clean_text(str.__str__(key))


def _clean_item(value: Any, step: str | int, depth_left: int) -> Any:
    try:
        return _clean_json(value, depth_left)
    except NotJson as error:
        # At the bottom of a nest that is too deep the whole place would be no help.
        if depth_left < DEPTH_MAX - 8:
            raise
        raise error.within(step if isinstance(step, str) else f"[{step}]") from None
