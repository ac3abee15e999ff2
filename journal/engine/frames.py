"""The frames of a write-ahead log, read as SQLite reads them: what counts, and what was cut off.

ON DISK (`<store>-wal`)
    header   32 bytes: magic, version, page size, checkpoint number, two salts, two checksums
    frame    24 bytes and one page: page number, size of the database if this frame commits, the
             salts of the header, two checksums that run on from the frame before

A frame is valid if and only if its salts are those of the header, its checksums match, and the
frame before it is valid.  SQLite stops at the first frame that is not and says nothing.

A crash leaves the last frames unwritten or half written, with nothing behind them, or with frames
of the log's last round, which have other salts.  A frame of *this* round behind an invalid one that
commits something was once acknowledged: damage has cut it off.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from operator import mul
from typing import NamedTuple

import apsw

from holdfast.journal.engine import failures
from holdfast.journal.locations import Location

HEADER_BYTES = 32
FRAME_HEADER_BYTES = 24
MAGIC = {0x377F0682: "<", 0x377F0683: ">"}  # The last bit tells the byte order of the checksums.
READ_BYTES = 1 << 16
TRIES = 5
_WORD = 0xFFFFFFFF


class LogState(NamedTuple):
    """What a log holds. `bad_frame` counts from 1; None if nothing behind it is of this round."""

    bytes: int
    frames: int = 0  # valid and committed: what a reader sees
    header_problem: str | None = None
    bad_frame: int | None = None
    cut_commits: int = 0  # commits behind the bad frame that no reader sees


def read_log(location: Location, vfs: str | None = None) -> LogState:
    """Judge the log without changing it, beside a living writer or not."""
    before: tuple[str | None, int | None] | None = None
    for _ in range(TRIES):
        try:
            state = _read_once(location, vfs)
        except (apsw.Error, OSError) as error:
            raise failures.translate(str(location.wal), error, 0) from error
        found = state.header_problem, state.bad_frame
        # A writer at work may have been between two frames, or beginning a new round, and then it
        # is somewhere else by now. Damage stays where it is.
        if found in ((None, None), before):
            return state
        before = found
    return state._replace(header_problem=None, bad_frame=None, cut_commits=0)


def _read_once(location: Location, vfs: str | None) -> LogState:
    if not location.wal.exists():
        return LogState(0)
    file = apsw.VFSFile(
        vfs or "", str(location.wal), [apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_READONLY, 0]
    )
    try:
        size = file.xFileSize()
        return judge(lambda count, offset: file.xRead(count, offset), size)
    finally:
        file.xClose()


def judge(read: Callable[[int, int], bytes], size: int) -> LogState:
    """Judge a log of `size` bytes; `read(count, offset)` gives its bytes."""
    if size < HEADER_BYTES:
        return LogState(size)  # Empty, or killed while its first header was written.
    header = read(HEADER_BYTES, 0)
    magic, _, page_size, _, salt_1, salt_2, sum_1, sum_2 = struct.unpack(">8I", header)
    order = MAGIC.get(magic)
    frame_size = FRAME_HEADER_BYTES + page_size
    problem = None
    if order is None:
        problem = f"its first bytes are {magic:#010x}, which is no log"
    elif checksum(order, header[:24], 0, 0) != (sum_1, sum_2):
        problem = "the checksum of its header does not match"
    if problem is not None or order is None:
        lost = size > HEADER_BYTES + FRAME_HEADER_BYTES
        return LogState(size, header_problem=problem if lost else None)
    committed = bad = cut = 0
    running = (sum_1, sum_2)
    batch = max(1, READ_BYTES // frame_size)
    total = (size - HEADER_BYTES) // frame_size
    for first in range(0, total, batch):
        count = min(batch, total - first)
        block = read(count * frame_size, HEADER_BYTES + first * frame_size)
        for number in range(count):
            frame = block[number * frame_size : (number + 1) * frame_size]
            if len(frame) < frame_size:
                break  # Cut shorter meanwhile.
            _, commits, first_salt, second_salt, sum_1, sum_2 = struct.unpack(">6I", frame[:24])
            of_this_round = (first_salt, second_salt) == (salt_1, salt_2)
            if not bad:
                if of_this_round:
                    running = checksum(order, frame[:8] + frame[24:], *running)
                if of_this_round and running == (sum_1, sum_2):
                    committed = first + number + 1 if commits else committed
                else:
                    bad = first + number + 1
            elif of_this_round and commits:
                cut += 1
    return LogState(size, committed, None, bad if cut else None, cut)


def checksum(order: str, data: bytes, sum_1: int, sum_2: int) -> tuple[int, int]:
    """SQLite's checksum of `data`, running on from the one before.

    It is linear, so that a whole page is two sums of products instead of a loop.
    """
    count = len(data) // 4
    words = struct.unpack(f"{order}{count}I", data)
    start, first, second = _factors(count)
    (a, b), (c, d) = start
    return (
        (a * sum_1 + b * sum_2 + sum(map(mul, first, words))) & _WORD,
        (c * sum_1 + d * sum_2 + sum(map(mul, second, words))) & _WORD,
    )


_Matrix = tuple[tuple[int, int], tuple[int, int]]


@lru_cache(maxsize=8)
def _factors(count: int) -> tuple[_Matrix, tuple[int, ...], tuple[int, ...]]:
    """How each word counts in the end; a pair (x, y) does s1 += x + s2, then s2 += y + s1."""
    first, second = [0] * count, [0] * count
    a, b, c, d = 1, 0, 0, 1
    for at in range(count - 2, -1, -2):
        first[at], first[at + 1] = (a + b) & _WORD, b
        second[at], second[at + 1] = (c + d) & _WORD, d
        a, b, c, d = (a + b) & _WORD, (a + 2 * b) & _WORD, (c + d) & _WORD, (c + 2 * d) & _WORD
    return ((a, b), (c, d)), tuple(first), tuple(second)
