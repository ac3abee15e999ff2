"""crc32 of everything that a user would miss: SQLite does not notice a flipped bit in a page."""

from __future__ import annotations

from zlib import crc32

# The check of an event covers its place in the log, its kind and its call by way of the seed. A
# flipped bit changes a key by a power of two, and no power of two is a multiple of this prime.
PRIME = 4294967291


class _Seeds(dict[str, int]):
    def __missing__(self, kind: str) -> int:
        seed = self[kind] = crc32(kind.encode())
        return seed


SEEDS = _Seeds()


def event_crc(key: int, kind: str, call: int | None, data: bytes) -> int:
    """Check of one event: its place in the log counts as much as its content."""
    seed = SEEDS[kind] ^ key % PRIME
    return crc32(data, seed if call is None else seed ^ (call + 1 & 0xFFFF) << 8)


def row_crc(*columns: object) -> int:
    """Check of one row of anything else, over all columns that never change."""
    return crc32("\x1f".join(map(str, columns)).encode("utf-8", "surrogatepass"))
