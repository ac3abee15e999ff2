import base64
import gzip
import importlib
import json
import logging
import os
import pickle
import random
import subprocess
import sys
import threading
from importlib.resources import as_file, files
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.history import tokens
from holdfast.history.tokens import Provider, TokenCounter, TokenCounting
from holdfast.journal.messages import (
    Block,
    GhostSnapshot,
    Image,
    Message,
    Opaque,
    Text,
    Thinking,
    ToolResult,
    ToolUse,
)

ENCODINGS = ["cl100k_base", "o200k_base"]
PNG = "data:image/png;base64," + "iVBORw0KGgo" * 10_000


def plain(encoding: str, text: str) -> int:
    """Count as tiktoken does, in one piece."""
    encoder = tokens._shared_encoder(encoding, None)
    assert encoder is not None
    return len(encoder.encode(text, disallowed_special=()))


def run_child(code: str, **env: str) -> str:
    """Run `code` in a fresh interpreter; what it printed, with what it logged."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TIKTOKEN", "DATA_GYM"))}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=clean | env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A folder of rank files in which one byte of each is another."""
    for encoding in ENCODINGS:
        packed = files("holdfast.history.data").joinpath(f"{encoding}.tiktoken.gz").read_bytes()
        content = bytearray(gzip.decompress(packed))
        content[1000] ^= 1
        (tmp_path / f"{encoding}.tiktoken.gz").write_bytes(gzip.compress(content, 1))
    return tmp_path


# -- which encoder


@pytest.mark.parametrize(
    ("text", "cl100k", "o200k"),
    [("", 0, 0), ("hello world", 2, 2), ("tiktoken is great!", 6, 6), ("Привет, мир", 6, 4)],
)
def test_counts_are_those_the_encodings_are_known_for(text: str, cl100k: int, o200k: int) -> None:
    assert TokenCounter(encoding="cl100k_base").count_str(text) == cl100k
    assert TokenCounter(encoding="o200k_base").count_str(text) == o200k


@pytest.mark.parametrize(
    "model",
    [
        "gpt-4o",
        "gpt-4o-mini-2024-07-18",
        "chatgpt-4o-latest",
        "gpt-4.1",
        "gpt-4.1-nano",
        "gpt-4.5-preview",
        "gpt-5",
        "gpt-5-mini",
        "gpt-5.1-codex",
        "o1",
        "o1-preview",
        "o3",
        "o3-mini",
        "o4-mini",
        "openai/gpt-4o",
        "GPT-4o",
        "gpt-oss-20b",
        "ft:gpt-4o-mini:acme::abc",
    ],
)
def test_models_of_o200k_base_are_counted_by_it(model: str) -> None:
    counter = TokenCounter(model=model)
    assert (counter.name, counter.exact) == ("tiktoken:o200k_base", True)


@pytest.mark.parametrize("model", [None, "gpt-4", "gpt-4-turbo", "gpt-3.5-turbo", "gpt-35-turbo"])
def test_older_models_and_the_default_are_counted_by_cl100k_base(model: str | None) -> None:
    counter = TokenCounter(model)
    assert (counter.name, counter.exact) == ("tiktoken:cl100k_base", True)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("claude-sonnet-4-5", "tiktoken:cl100k_base:anthropic"),
        ("us.anthropic.claude-3-5-haiku", "tiktoken:cl100k_base:anthropic"),
        ("gemini-2.5-pro", "tiktoken:cl100k_base:google"),
        ("llama-4", "tiktoken:cl100k_base"),
        ("opus", "tiktoken:cl100k_base"),
    ],
)
def test_a_model_with_another_encoder_is_not_called_exact(model: str, name: str) -> None:
    counter = TokenCounter(model)
    assert (counter.name, counter.exact) == (name, False)


def test_an_encoding_overrules_the_model() -> None:
    assert TokenCounter("gpt-4", encoding="o200k_base").name == "tiktoken:o200k_base"


def test_an_unknown_encoding_or_provider_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'p50k_base'; known are cl100k_base, o200k_base"):
        TokenCounter(encoding="p50k_base")
    with pytest.raises(ValueError, match=r"'acme'; known are openai, anthropic, google"):
        TokenCounter(provider="acme")  # type: ignore[arg-type]


def test_a_counter_satisfies_the_protocol_and_survives_pickling() -> None:
    counter: TokenCounting = TokenCounter("gpt-4o")
    copy = pickle.loads(pickle.dumps(counter))
    assert (copy.name, copy.count_str("hello world")) == (counter.name, 2)


# -- text


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=300))
@settings(max_examples=100, deadline=None)
def test_ordinary_text_counts_as_plain_tiktoken_counts_it(encoding: str, text: str) -> None:
    assert TokenCounter(encoding=encoding).count_str(text) == plain(encoding, text)


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(text=st.text(" \n\r\t\u00a0\u2028ab7'.,/é漢", min_size=2, max_size=60))
@settings(max_examples=300, deadline=None)
def test_a_cut_at_a_harmless_place_changes_nothing(encoding: str, text: str) -> None:
    found = tokens._LAST_CUT.match(text)
    if found:
        head, tail = text[: found.end()], text[found.end() :]
        assert plain(encoding, head) + plain(encoding, tail) == plain(encoding, text)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_long_prose_and_code_count_as_in_one_piece(encoding: str) -> None:
    code = Path(tokens.__file__).read_text() * 20
    wrapped = base64.encodebytes(random.Random(1).randbytes(150_000)).decode()
    for text in (code, code.replace("\n", "\r\n"), wrapped):
        assert len(text) > 10 * tokens._CHUNK_CHARS_MAX
        assert TokenCounter(encoding=encoding).count_str(text) == plain(encoding, text)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_forced_cut_puts_the_count_off_by_three_at_most(encoding: str) -> None:
    rng = random.Random(2)
    for alphabet in ("A7+/bcd", "0123456789", "漢字かな", " \t", "\n", "-=#"):
        text = "".join(rng.choices(alphabet, k=4 * tokens._CHUNK_CHARS_MAX))
        found = TokenCounter(encoding=encoding).count_str(text)
        assert abs(found - plain(encoding, text)) <= 3 * 4, alphabet


@given(text=st.text(" a\n.", max_size=200))
def test_chunks_are_bounded_and_join_to_the_text(text: str) -> None:
    long = text * 1000
    chunks = list(tokens._chunks(long))
    assert "".join(chunks) == long
    assert all(len(chunk) <= tokens._CHUNK_CHARS_MAX for chunk in chunks)
    assert len(chunks) <= 2 * len(long) / tokens._CHUNK_CHARS_MAX + 2


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_million_spaces_are_counted(encoding: str) -> None:
    assert 1_000_000 / 200 < TokenCounter(encoding=encoding).count_str(" " * 1_000_000) < 10_000


def test_special_tokens_in_text_are_plain_text() -> None:
    counter = TokenCounter()
    assert counter.count_str("<|endoftext|>") > 1
    assert counter.count_str("a<|fim_prefix|>b") > 3


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ud83d\ude00", "\ud800" * 40_000])
def test_lone_surrogates_are_counted_and_do_not_raise(text: str) -> None:
    assert TokenCounter().count_str(text) >= 1
    assert TokenCounter().count_message(Message.user(text)) > 5


# -- messages


def test_a_message_is_its_content_its_role_and_four() -> None:
    counter = TokenCounter()
    assert counter.count_message(Message.user("hello world")) == 2 + 1 + 4
    assert counter.count_message(Message.assistant("hello world")) == 2 + 1 + 4


def test_messages_count_as_the_sum_of_each() -> None:
    counter = TokenCounter()
    messages = [Message.system("be brief"), Message.user("hello"), Message.assistant("hi")]
    assert counter.count_messages(messages) == sum(map(counter.count_message, messages))
    assert counter.count_messages(iter(messages)) == counter.count_messages(messages)
    assert counter.count_messages([]) == 0


def test_every_kind_of_block_is_counted() -> None:
    counter = TokenCounter()
    call = ToolUse(id="c1", name="read_file", input={"path": "é.txt", "mode": ["r"]})
    spaced = ToolUse(id="c1", name="read_file", input={"n": 1}, raw_arguments='{ "n" :  1 }')
    cases: list[tuple[Block, list[str], int]] = [
        (Text(text="some text"), ["some text"], 0),
        (Thinking(text="let me see", signature="s" * 500), ["let me see"], 0),
        (call, ["read_file", '{"path":"é.txt","mode":["r"]}'], 0),
        (spaced, ["read_file", '{ "n" :  1 }'], 0),
        (ToolResult(tool_use_id="c1", content="it said no"), ["it said no"], 0),
        (
            ToolResult(tool_use_id="c1", content=[Text(text="see"), Image(url=PNG)]),
            ["see"],
            1,
        ),
        (Image(url=PNG), [], 1),
        (Opaque(provider="openai", data={"a": [1, 2]}), ['{"a":[1,2]}'], 0),
        (GhostSnapshot(data={"todo": "tests"}), ['{"todo":"tests"}'], 0),
    ]
    for block, texts, images in cases:
        content = sum(map(counter.count_str, texts)) + 85 * images
        assert counter.count_message(Message(role="user", content=[block])) == content + 1 + 4
    whole = Message(role="user", content=[block for block, _, _ in cases])
    each = [counter.count_message(Message(role="user", content=[b])) - 5 for b, _, _ in cases]
    assert counter.count_message(whole) == sum(each) + 5


@pytest.mark.parametrize(
    ("provider", "image"), [("openai", 85), ("anthropic", 1000), ("google", 258)]
)
def test_an_image_costs_tokens_and_not_its_bytes(provider: Provider, image: int) -> None:
    for url in (PNG, "https://example.org/cat.png"):
        message = Message(role="user", content=[Image(url=url)])
        assert TokenCounter(provider=provider).count_message(message) == image + 1 + 4


# -- loading


def test_importing_and_making_a_counter_loads_no_tiktoken() -> None:
    code = """if True:
        import sys
        from holdfast.history.tokens import TokenCounter
        counter = TokenCounter("gpt-4o")
        repr(counter)
        assert "tiktoken" not in sys.modules
        assert counter.count_str("hello world") == 2
        assert "tiktoken" in sys.modules
    """
    assert run_child(code) == ""


def test_it_counts_with_the_network_off_on_a_fresh_machine(tmp_path: Path) -> None:
    code = """if True:
        import os, socket
        def refuse(*args, **kwargs):
            raise AssertionError("the network was touched")
        socket.socket = socket.create_connection = socket.getaddrinfo = refuse
        before = dict(os.environ)
        from holdfast.history.tokens import TokenCounter
        for encoding in ("cl100k_base", "o200k_base"):
            counter = TokenCounter(encoding=encoding)
            print(counter.name, counter.exact, counter.count_str("hello world"))
        assert dict(os.environ) == before
    """
    told = "tiktoken:cl100k_base True 2\ntiktoken:o200k_base True 2\n"
    home = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    assert run_child(code, **home) == told
    assert run_child(code, **home, TIKTOKEN_CACHE_DIR=str(tmp_path)) == told
    assert list(tmp_path.iterdir()) == []


def test_tiktoken_itself_stays_as_it_was() -> None:
    import tiktoken.load

    public = importlib.import_module("tiktoken_ext.openai_public")
    TokenCounter().count_str("x")
    assert public.load_tiktoken_bpe is tiktoken.load.load_tiktoken_bpe


def test_threads_that_count_first_share_one_encoder(tmp_path: Path) -> None:
    reads: list[str] = []

    class Folder(type(tmp_path)):  # type: ignore[misc]
        def joinpath(self, *names: str) -> Path:
            reads.append(names[0])
            return Path(self, *names)

    with as_file(files("holdfast.history.data")) as data:
        folder = Folder(data)
        start, found = threading.Barrier(8), []

        def count() -> None:
            start.wait()
            found.append(TokenCounter(_ranks=folder).count_str("hello world"))

        threads = [threading.Thread(target=count) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [2] * 8
    assert reads == ["cl100k_base.tiktoken.gz"]


def test_a_child_forked_while_the_encoder_is_built_can_count() -> None:
    """A thread of the parent may hold the lock at the fork; in the child nobody would free it."""
    code = """if True:
        import os, signal
        from holdfast.history import tokens
        with tokens._lock:
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)
                os._exit(0 if tokens.TokenCounter().count_str("hello world") == 2 else 1)
        print(os.waitpid(pid, 0)[1])
    """
    assert run_child(code) == "0\n"


# -- the estimate


def test_a_corrupt_rank_file_means_an_estimate_and_one_warning(
    broken: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counters = [TokenCounter(_ranks=broken) for _ in range(3)]
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        for counter in counters:
            assert (counter.name, counter.exact) == ("estimate:openai", False)
            assert counter.count_str("x" * 400) == 100
    assert [record.name for record in caplog.records] == ["holdfast"]
    assert "cl100k_base.tiktoken.gz: sha256 is " in caplog.text


@pytest.mark.parametrize("damage", ["missing", "truncated", "not gzip"])
def test_ranks_that_cannot_be_read_mean_an_estimate(broken: Path, damage: str) -> None:
    path = broken / "o200k_base.tiktoken.gz"
    match damage:
        case "missing":
            path.unlink()
        case "truncated":
            path.write_bytes(path.read_bytes()[:5000])
        case _:
            path.write_bytes(b"junk")
    assert TokenCounter("gpt-4o", _ranks=broken).name == "estimate:openai"


def test_ranks_that_failed_are_not_tried_again(broken: Path) -> None:
    """One process must not change its counter halfway."""
    assert TokenCounter(_ranks=broken).name == "estimate:openai"
    name = "cl100k_base.tiktoken.gz"
    (broken / name).write_bytes(files("holdfast.history.data").joinpath(name).read_bytes())
    assert TokenCounter(_ranks=broken).name == "estimate:openai"


def test_without_tiktoken_every_counter_estimates_and_one_warning_is_given() -> None:
    code = """if True:
        import logging, sys
        logging.basicConfig()
        sys.modules["tiktoken"] = None
        from holdfast.history.tokens import TokenCounter
        for model in (None, "gpt-4o", "claude-sonnet-4-5", "gemini-2.5-pro"):
            counter = TokenCounter(model)
            print(counter.name, counter.exact, counter.count_str("x" * 70))
    """
    *lines, warning = run_child(code).splitlines()
    assert lines == [
        "estimate:openai False 17",
        "estimate:openai False 17",
        "estimate:anthropic False 20",
        "estimate:google False 17",
    ]
    assert "token counts are estimates" in warning and "tiktoken" in warning


@pytest.mark.parametrize(
    ("provider", "expected"),
    [
        ("openai", 4 + 44 // 4 + 85),
        ("anthropic", 3 + 44 * 10 // 35 + 1000),
        ("google", 4 + 44 // 4 + 258),
    ],
)
def test_an_estimated_message_follows_its_provider(
    broken: Path, provider: Provider, expected: int
) -> None:
    call = ToolUse(id="c1", name="read", input={"path": "a"})
    blocks: list[Block] = [
        Text(text="é" * 20),
        call,
        ToolResult(tool_use_id="c1", content="done"),
        Image(url=PNG),
    ]
    assert 20 + len("read") + len(json.dumps(call.input, separators=(",", ":"))) + 4 == 40
    counter = TokenCounter(provider=provider, _ranks=broken)
    message = Message(role="user", content=[*blocks, Text(text="tail")])
    assert counter.count_message(message) == expected
    assert counter.count_messages([message, message]) == 2 * expected


def test_an_estimate_is_zero_for_no_text_alone(broken: Path) -> None:
    counter = TokenCounter(_ranks=broken)
    assert [counter.count_str(text) for text in ("", "a", "abcd", "\ud800")] == [0, 1, 1, 1]
