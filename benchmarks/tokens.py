"""How many tokens a second does `TokenCounter.count_str` count?

Prose (docstrings of the standard library), Python code (its source) and base64 without line ends,
200,000 characters of each, in both encodings.  The encoder is loaded before, and its time told
apart; one count of each text goes first as a warm-up and is not timed.  No disk is involved.

    python benchmarks/tokens.py [--runs 200] [--quick]

Last answer (two cores of an AMD EPYC, Python 3.11, tiktoken 0.14; million tokens a second, median,
and the rate at the p99 of time):
    cl100k_base, loaded in 84 ms    prose 5.4 (2.6)   code 4.7 (4.5)   base64 7.5 (7.1)
    o200k_base, loaded in 167 ms    prose 8.5 (8.4)   code 7.4 (7.1)   base64 7.7 (7.7)
"""

import argparse
import base64
import inspect
import platform
import random
import statistics
import time
import typing
from collections.abc import Callable
from functools import partial

from holdfast.history.tokens import TokenCounter

TEXT_CHARS = 200_000


def prose() -> str:
    found = (
        inspect.getdoc(member) or ""
        for module in (typing, inspect)
        for member in vars(module).values()
    )
    return _filled("\n\n".join(found))


def code() -> str:
    return _filled(inspect.getsource(argparse) + inspect.getsource(typing))


def base64_text() -> str:
    return _filled(base64.b64encode(random.Random(0).randbytes(TEXT_CHARS)).decode())


def _filled(text: str) -> str:
    return (text * (1 + TEXT_CHARS // len(text)))[:TEXT_CHARS]


def seconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="tokens a second")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="only to see that it works")
    given = parser.parse_args()
    runs: int = 2 if given.quick else given.runs
    texts = {"prose": prose(), "code": code(), "base64": base64_text()}
    print(f"Python {platform.python_version()}, {runs} runs; million tokens a second")
    print(f"{'encoding':<12} {'text':<7} {'tokens':>7} {'median':>7} {'p99':>6} {'min..max':>12}")
    for encoding in ("cl100k_base", "o200k_base"):
        counter = TokenCounter(encoding=encoding)
        print(
            f"{encoding:<12} loaded in {1000 * seconds(partial(getattr, counter, 'name')):.0f} ms"
        )
        assert counter.exact, "an estimate is no answer to this question"
        for name, text in texts.items():
            tokens = counter.count_str(text)
            count = partial(counter.count_str, text)
            rates = sorted(tokens / seconds(count) / 1e6 for _ in range(runs))
            # Rates rise from the slowest count, so its p99 of time stands at the low end.
            median, p99 = statistics.median(rates), rates[runs // 100]
            spread = f"{rates[0]:.2f}..{rates[-1]:.2f}"
            print(f"{'':<12} {name:<7} {tokens:>7} {median:>7.2f} {p99:>6.2f} {spread:>12}")


if __name__ == "__main__":
    main()
