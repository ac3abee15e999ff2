"""Reading a damaged table: what can be read is, and the keys that cannot are named.

A scan that dies in the middle goes on from the other end, and halves what is left between the two
until nothing but single keys, or ranges that fail again and again, are lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import apsw

# The columns that hold text, in whatever table.
TEXTS = frozenset(
    "assistant_text body boot call_id content counter generated_by host kind last_status metadata"
    " model model_name name nonce pid_space problem process_started provider replay role session"
    " session_id state status stop_reason title usage".split()
)
ROWS_A_PAGE = 512
# How many ranges in a row may prove unreadable before the rest between them is given up.
PROBES = 400
LOWEST, HIGHEST = -(1 << 63), (1 << 63) - 1
# Everything that reading damaged bytes raises; text that is no UTF-8 is no apsw.Error.
BROKEN = (apsw.Error, UnicodeDecodeError)


class Unreadable(NamedTuple):
    """The keys from `low` up to and with `high` of a table cannot be read."""

    table: str
    low: int
    high: int
    why: str


def raw(column: str) -> str:
    """A text as bytes: SQLite hands out anything, and one bad letter must not end a scan."""
    return f"CAST({column} AS BLOB)"


class Garbled(str):
    """A text that was no UTF-8: U+FFFD stands for what could not be read."""


def text(value: Any) -> Any:
    """What `raw` gave as text again, as far as it is one."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return Garbled(value.decode("utf-8", "replace"))


def select(cursor: apsw.Cursor, columns: str, rest: str, bindings: Sequence[Any] = ()) -> list[Any]:
    """Rows of one table; a text that is no UTF-8 comes garbled and hides no other row."""
    try:
        return cursor.execute(f"SELECT {columns} {rest}", bindings).fetchall()
    except UnicodeDecodeError:
        rows = cursor.execute(f"SELECT {raw_columns(columns)} {rest}", bindings)
        return [tuple(text(value) for value in row) for row in rows]


def raw_columns(columns: str) -> str:
    """The same columns, with every text as bytes."""
    names = columns.split(", ")
    return ", ".join(raw(name) if name in TEXTS else name for name in names)


def refuse_disorder(keys: Sequence[int], at_least: int) -> None:
    """Raise if keys do not rise: whoever pages through a damaged tree would go round in circles."""
    for key in keys:
        if key < at_least:
            raise apsw.CorruptError("keys are out of order")
        at_least = key + 1


def scan(db: apsw.Connection, table: str, key: str, columns: str) -> Iterator[Any]:
    """The rows of a table by its integer key; an `Unreadable` stands where some are lost."""
    sql = f"SELECT {key}, {columns} FROM {table} WHERE {key} BETWEEN ? AND ? ORDER BY {key}"
    lost: Unreadable | None = None
    for row in _Scan(db, table, sql).range(LOWEST, HIGHEST):
        if not isinstance(row, Unreadable):
            if lost is not None:
                yield lost
                lost = None
            yield row
        else:
            lost = row if lost is None else lost._replace(high=row.high)
    if lost is not None:
        yield lost


class _Scan:
    def __init__(self, db: apsw.Connection, table: str, sql: str) -> None:
        self.db = db
        self.table = table
        self.up = f"{sql} LIMIT {ROWS_A_PAGE}"
        self.down = f"{sql} DESC LIMIT {ROWS_A_PAGE}"
        self.probes = PROBES

    def range(self, low: int, high: int) -> Iterator[Any]:
        """Everything that can be read of [low, high], in order."""
        while True:  # Upwards, to the end or to the first place that cannot be read.
            rows, why = self.page(self.up, low, high)
            yield from rows
            if rows:
                low = rows[-1][0] + 1
            if why is None and len(rows) < ROWS_A_PAGE:
                return
            if why is not None:
                break
        readable = self.readable_from(low, high)
        if low < readable:
            yield from self.halves(low, readable - 1, why)
        while readable <= high:
            rows, why = self.page(self.up, readable, high)
            yield from rows
            if rows:
                readable = rows[-1][0] + 1
            if why is None and len(rows) < ROWS_A_PAGE:
                return
            if why is not None:  # It could be read a moment ago, from the other side.
                yield from self.halves(readable, high, why)
                return

    def readable_from(self, low: int, high: int) -> int:
        """The lowest key from which on all can be read, coming from above."""
        readable = high + 1
        while readable > low:
            rows, why = self.page(self.down, low, readable - 1)
            if rows:
                readable = rows[-1][0]
            if why is not None:
                return readable
            if len(rows) < ROWS_A_PAGE:
                return low
        return readable

    def halves(self, low: int, high: int, why: str) -> Iterator[Any]:
        """A range that can be read from neither end: both halves of it, or nothing."""
        self.probes -= 1
        if low == high or self.probes <= 0:
            yield Unreadable(self.table, low, high, why)
        else:
            middle = (low + high) // 2
            yield from self.range(low, middle)
            yield from self.range(middle + 1, high)

    def page(self, sql: str, low: int, high: int) -> tuple[list[Any], str | None]:
        """A page of rows; and if it ended early, why."""
        rows: list[Any] = []
        step = -1 if sql is self.down else 1
        cursor = self.db.cursor()
        try:
            for row in cursor.execute(sql, (low, high)):
                # In a damaged tree keys may go round in circles, and we with them.
                if not low <= row[0] <= high or (rows and (row[0] - rows[-1][0]) * step <= 0):
                    return rows, "keys are out of order"
                rows.append(row)
        except BROKEN as error:
            return rows, f"{type(error).__name__}: {error}"
        finally:
            cursor.close()
            if rows:
                self.probes = PROBES
        return rows, None
