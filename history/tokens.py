"""Token counts without a network: tiktoken over the rank files that are shipped with the package.

The encoder is built once a process, when the first count is asked for; importing this module or
making a `TokenCounter` loads nothing.  If it cannot be built, counts become estimates, a warning
on the logger "holdfast" says so once, and `exact` and `name` tell.

HOW EXACT  Text of up to 16,384 characters is counted in one piece.  Longer text is cut where the
encoder cuts anyway (before a space that follows a word, before a line end that follows a letter or
digit), which changes nothing.  Only where 16,384 characters have no such place (base64, a run of
spaces, Chinese) is the cut forced, and each forced cut may put the count off by a token or two
(three at most in 80,000 trials on awkward text).  Without cuts a million spaces makes tiktoken
raise, and one long word takes more than its share of time and memory.
"""

import base64
import builtins
import gzip
import hashlib
import importlib
import importlib.resources
import json
import logging
import os
import re
import threading
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, assert_never

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    import tiktoken

    from holdfast.journal.messages import Block, Message

__all__ = ["Provider", "TokenCounter", "TokenCounting"]

Provider = Literal["openai", "anthropic", "google"]

_CHUNK_CHARS_MAX = 16_384
_MESSAGE_OVERHEAD = 4  # what a provider wraps around each message, in tokens

# The greedy start makes this the last place in the window where no encoder piece can straddle: all
# pieces stop before a space that follows something visible, and before a line end that follows a
# letter or digit (after punctuation the line end belongs to the piece).
_LAST_CUT = re.compile(r".*(?:\S(?= )|[0-9A-Za-z](?=[\r\n]))", re.DOTALL)

# sha256 of the unpacked rank files; tiktoken names the same ones when it asks for them.
_RANKS_SHA256 = {
    "cl100k_base": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    "o200k_base": "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
}
_O200K_MODEL = re.compile(r"(chatgpt-4o|gpt-4o|gpt-4\.[15]|gpt-[5-9]|gpt-oss|o[1-9]|codex-mini)\b")
_CL100K_MODEL = re.compile(r"(gpt-4|gpt-3\.?5|text-embedding-(ada-002|3)|(davinci|babbage)-002)\b")

_log = logging.getLogger("holdfast")


class TokenCounting(Protocol):
    """What the library asks of a counter; bring your own.

    `name` is stored beside each count, so two counters that may differ need different names.
    `exact` says whether the counts are those of the model's own encoder.
    """

    @property
    def name(self) -> str:
        """The counter's name, the same in every process that counts the same way."""

    @property
    def exact(self) -> bool:
        """Whether text is counted as the model itself does."""

    def count_str(self, text: str, /) -> int:
        """Tokens of `text`; never raises for any str."""

    def count_message(self, message: "Message", /) -> int:
        """Tokens of one whole message, its wrapping included."""


class TokenCounter:
    """Counts with tiktoken, offline; with an estimate if tiktoken or its ranks cannot be had.

    `model` chooses the encoding: o200k_base for the OpenAI models that use it, cl100k_base for all
    others; `encoding` overrules it.  `provider` decides what an image costs and how the estimate
    works; if not given it follows the model's name, else it is "openai".  Anthropic and Google
    publish no encoder: their models are counted by cl100k_base, and `exact` is False.
    Thread-safe; may be pickled.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        encoding: str | None = None,
        provider: Provider | None = None,
        _ranks: "Traversable | None" = None,
    ) -> None:
        if encoding is not None and encoding not in _RANKS_SHA256:
            known = ", ".join(_RANKS_SHA256)
            raise ValueError(f"unknown encoding {encoding!r}; known are {known}")
        if provider is not None and provider not in _ESTIMATES:
            known = ", ".join(_ESTIMATES)
            raise ValueError(f"unknown provider {provider!r}; known are {known}")
        chosen, known_model = _encoding_for(model)
        self._encoding = encoding or chosen
        self._provider: Provider = provider or _provider_of(model)
        # Exact only if this is the model's own encoder: the caller's word, or a model we know.
        self._own_encoder = self._provider == "openai" and (encoding is not None or known_model)
        self._ranks = _ranks

    def __repr__(self) -> str:
        return f"TokenCounter(encoding={self._encoding!r}, provider={self._provider!r})"

    @property
    def name(self) -> str:
        """`tiktoken:<encoding>`, with `:<provider>` if not OpenAI; or `estimate:<provider>`."""
        if self._encoder() is None:
            return f"estimate:{self._provider}"
        suffix = "" if self._provider == "openai" else f":{self._provider}"
        return f"tiktoken:{self._encoding}{suffix}"

    @property
    def exact(self) -> bool:
        """True if text is counted by the model's own encoder; images are an allowance always."""
        return self._own_encoder and self._encoder() is not None

    def count_str(self, text: str) -> int:
        """Tokens of `text`.  Special tokens in it are plain text; lone surrogates count as U+FFFD.

        Zero for the empty string and for no other.  Time is linear, whatever the text.
        """
        encoder = self._encoder()
        if encoder is None:
            return max(_ESTIMATES[self._provider].of_chars(len(text)), 1) if text else 0
        return sum(len(encoder.encode(chunk, disallowed_special=())) for chunk in _chunks(text))

    def count_message(self, message: "Message") -> int:
        """Tokens of the content, the role, and 4 for what wraps a message.

        Counted are text, thinking, names and arguments of calls, results, and the data of opaque
        and snapshot blocks as compact JSON; an image is an allowance (OpenAI 85, Anthropic 1000,
        Google 258) whatever its size.  Call ids and signatures are not.
        An estimate takes the provider's own formula instead, which has no role.
        """
        estimate = _ESTIMATES[self._provider]
        texts, images = _counted_parts(message.content)
        if self._encoder() is None:
            content = estimate.of_chars(sum(map(len, texts)))
            return estimate.overhead + content + images * estimate.image
        content = sum(map(self.count_str, texts)) + images * estimate.image
        return content + self.count_str(message.role) + _MESSAGE_OVERHEAD

    def count_messages(self, messages: Iterable["Message"]) -> int:
        """The sum of `count_message` over all of them."""
        return sum(map(self.count_message, messages))

    def _encoder(self) -> "tiktoken.Encoding | None":
        return _shared_encoder(self._encoding, self._ranks)


@dataclass(frozen=True, slots=True)
class _Estimate:
    """How one provider counts, roughly: characters (code points) by a ratio, images in tokens."""

    overhead: int
    numerator: int
    denominator: int
    image: int

    def of_chars(self, count: int) -> int:
        return count * self.numerator // self.denominator


_ESTIMATES: dict[str, _Estimate] = {
    "openai": _Estimate(overhead=4, numerator=1, denominator=4, image=85),
    "anthropic": _Estimate(overhead=3, numerator=10, denominator=35, image=1000),
    "google": _Estimate(overhead=4, numerator=1, denominator=4, image=258),
}


def _encoding_for(model: str | None) -> tuple[str, bool]:
    """The encoding for a model, and whether the model is known to use it."""
    if model is None:
        return "cl100k_base", True
    # Routers write `openai/gpt-4o`, fine-tuned models are `ft:gpt-4o:...`.
    base = model.lower().rpartition("/")[2].removeprefix("ft:")
    if _O200K_MODEL.match(base):
        return "o200k_base", True
    return "cl100k_base", _CL100K_MODEL.match(base) is not None


def _provider_of(model: str | None) -> Provider:
    name = (model or "").lower()
    if "claude" in name:
        return "anthropic"
    if "gemini" in name:
        return "google"
    return "openai"


def _counted_parts(blocks: "Iterable[Block]") -> tuple[list[str], int]:
    """Every text in the blocks that counts, and how many images they have."""
    texts: list[str] = []
    images = 0
    for block in blocks:
        match block.type:
            case "text" | "thinking":
                texts.append(block.text)
            case "image":
                images += 1
            case "tool_use":
                # The raw string, where there is one, is what goes back to the provider.
                raw = block.raw_arguments
                texts += [block.name, _compact(block.input) if raw is None else raw]
            case "tool_result":
                if isinstance(block.content, str):
                    texts.append(block.content)
                else:
                    inner_texts, inner_images = _counted_parts(block.content)
                    texts += inner_texts
                    images += inner_images
            case "opaque" | "ghost_snapshot":
                texts.append(_compact(block.data))
            case _:
                assert_never(block)
    return texts, images


def _compact(value: object) -> str:
    # `default` because a count must not fail on what some caller put into a dict.
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=str)


def _chunks(text: str) -> Iterator[str]:
    """Cut `text` into pieces of bounded length, at harmless places if there are any."""
    start, length = 0, len(text)
    while length - start > _CHUNK_CHARS_MAX:
        limit = start + _CHUNK_CHARS_MAX
        found = _LAST_CUT.match(text, start, limit)
        end = found.end() if found else limit
        yield text[start:end]
        start = end
    yield text[start:]


# One encoder a process and encoding; None stands for one that could not be built, so that a broken
# installation costs one attempt.  The lock is taken for the first count only.
_encoders: dict[tuple[str, object], "tiktoken.Encoding | None"] = {}
_warned: set[str] = set()
_lock = threading.Lock()


def _forget_lock() -> None:
    """Free a forked child from a lock that a thread of its parent held."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)


def _shared_encoder(encoding: str, ranks: "Traversable | None") -> "tiktoken.Encoding | None":
    key = (encoding, ranks)
    if key in _encoders:
        return _encoders[key]
    with _lock:
        if key not in _encoders:
            try:
                _encoders[key] = _build(encoding, ranks)
            except Exception as error:  # Whatever is wrong with it, a rough count beats none.
                _warn_once(f"{type(error).__name__}: {error}")
                _encoders[key] = None
        return _encoders[key]


def _warn_once(reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        _log.warning("token counts are estimates from now on: %s; reinstall holdfast", reason)


def _build(encoding: str, folder: "Traversable | None") -> "tiktoken.Encoding":
    """Build tiktoken's encoder from our ranks, and its own pattern and special tokens.

    tiktoken offers the pattern only inside a function that also downloads the ranks.  So that
    function is run with other globals: the module's strings, and a loader that reads our file.  It
    reaches nothing else, so it cannot download, and tiktoken itself stays as it was.
    """
    import tiktoken

    public = importlib.import_module("tiktoken_ext.openai_public")
    scope: dict[str, Any] = {k: v for k, v in vars(public).items() if isinstance(v, str)}
    scope["__builtins__"] = builtins

    def load(_url: str, expected_hash: str | None = None) -> dict[bytes, int]:
        return _read_ranks(encoding, folder, expected_hash)

    scope["load_tiktoken_bpe"] = load
    constructor = types.FunctionType(public.ENCODING_CONSTRUCTORS[encoding].__code__, scope)
    return tiktoken.Encoding(**constructor())


def _read_ranks(
    encoding: str, folder: "Traversable | None", expected_hash: str | None
) -> dict[bytes, int]:
    """The ranks of our file, if it is the very one that tiktoken expects."""
    folder = folder or importlib.resources.files("holdfast.history.data")
    name = f"{encoding}.tiktoken.gz"
    content = gzip.decompress(folder.joinpath(name).read_bytes())
    found, expected = hashlib.sha256(content).hexdigest(), _RANKS_SHA256[encoding]
    if expected_hash not in (None, expected):
        raise ValueError(f"{name}: sha256 is {expected}, tiktoken expects {expected_hash}")
    if found != expected:
        raise ValueError(f"{name}: sha256 is {found}, expected {expected}")
    return {
        base64.b64decode(token): int(rank)
        for token, rank in (line.split() for line in content.splitlines() if line)
    }
