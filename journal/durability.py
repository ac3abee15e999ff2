"""Durability levels: which commits wait for the disk, and what each level therefore survives."""

from __future__ import annotations

from enum import StrEnum

from holdfast.journal.errors import InvalidArgument


class Durability(StrEnum):
    """How much a returned call has survived.

    A commit that waits for the disk also makes every commit before it durable: that is why
    `barrier` is nearly as cheap as `process` and nearly as strong as `power`.
    """

    PROCESS = "process"  # kill -9, OOM, any exception
    BARRIER = "barrier"  # the above; power loss may take only the newest deltas of an open stream
    POWER = "power"  # the above; power loss takes nothing that was acknowledged

    @classmethod
    def of(cls, level: str | Durability) -> Durability:
        """Read a level as users type it."""
        try:
            return cls(level)
        except ValueError:
            levels = ", ".join(repr(str(known)) for known in cls)
            raise InvalidArgument(f"durability is {level!r}, expected one of {levels}") from None

    @property
    def deltas_sync(self) -> bool:
        """Whether an append waits for the disk."""
        return self is Durability.POWER

    @property
    def barriers_sync(self) -> bool:
        """Whether calls, results, seals and commits wait for the disk."""
        return self is not Durability.PROCESS
