"""What the journals have in common when they are used on their own: an engine to open and close."""

from __future__ import annotations

import os
from types import TracebackType
from typing import NoReturn, Self

from holdfast.journal.engine.engine import SqliteEngine


class StandaloneJournal:
    """A journal that has a store to itself, or shares its file with others."""

    def __init__(self, engine: SqliteEngine) -> None:
        self._engine = engine

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open or make a store for this journal alone."""
        return cls(SqliteEngine.open(path))

    @classmethod
    def open_in_memory(cls) -> Self:
        """A journal that ends with the process."""
        return cls(SqliteEngine.open_in_memory())

    def close(self) -> None:
        """Close; what is not committed can be recovered. Idempotent."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"a {name} cannot be pickled: open the store in the other process")
