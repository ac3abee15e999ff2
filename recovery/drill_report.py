"""What a drill has seen, as a table and as JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.journal.errors import HoldfastError


class DrillError(HoldfastError):
    """A drill cannot be run as asked. No promise was found broken; the store is as it was left."""


@dataclass(slots=True)
class DrillReport:
    """What a drill has seen. It is good if `violations` is empty and `kills` is what was asked."""

    path: str
    durability: str
    seed: int
    planned: int
    command: str | None = None
    kills: int = 0
    acked: int = 0  # calls that had returned
    lost: int = 0
    doubled: int = 0
    in_doubt: int = 0  # calls that a kill caught between their start and their result
    seconds: float = 0.0
    where: dict[str, int] = field(default_factory=dict)  # what the agents were doing when killed
    recovery_seconds: list[float] = field(default_factory=list)  # each opening after a kill
    violations: list[str] = field(default_factory=list)
    opening_guess: float = 0.005  # seconds that an opening takes: kills are aimed into it
    acks_guess: int = 100  # acknowledgements in a life of the user's program

    @property
    def ok(self) -> bool:
        """Whether every promise was kept."""
        return not self.violations

    @property
    def kills_per_second(self) -> float:
        """How fast it went."""
        return self.kills / self.seconds if self.seconds else 0.0

    @property
    def recovery_p50_ms(self) -> float:
        """How long it took to open the store after a kill: half of them took less."""
        return percentile(self.recovery_seconds, 0.50) * 1000

    @property
    def recovery_p99_ms(self) -> float:
        """How long it took to open the store after a kill: all but one in a hundred took less."""
        return percentile(self.recovery_seconds, 0.99) * 1000

    @property
    def repeat(self) -> str:
        """The command that runs this drill again."""
        program = "" if self.command is None else f" --command {shlex.quote(self.command)}"
        return (
            f"holdfast drill --db {shlex.quote(self.path)}{program} --kills {self.planned}"
            f" --durability {self.durability} --seed {self.seed}"
        )

    def rows(self) -> list[tuple[str, str]]:
        """The lines of the table."""
        where = ", ".join(f"{name} {count}" for name, count in sorted(self.where.items()))
        return [
            ("kills", f"{self.kills} ({self.kills_per_second:.0f} a second)"),
            ("killed during", where or "-"),
            ("calls acknowledged", str(self.acked)),
            ("lost", str(self.lost)),
            ("doubled", str(self.doubled)),
            ("calls in doubt, and told so", str(self.in_doubt)),
            (
                "time to recover",
                f"p50 {self.recovery_p50_ms:.1f} ms, p99 {self.recovery_p99_ms:.1f} ms",
            ),
            ("violations", str(len(self.violations))),
        ]

    def summary(self) -> str:
        """The table in plain text, what is wrong, and how to repeat it."""
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows]
        return "\n".join([*lines, *self.accusation()])

    def accusation(self) -> list[str]:
        """What is wrong, and how to repeat it; nothing if nothing is."""
        if not self.violations:
            return []
        return [*(f"VIOLATION {what}" for what in self.violations), f"repeat: {self.repeat}"]

    def to_json(self) -> str:
        """The report for programs."""
        facts: dict[str, Any] = {
            "ok": self.ok,
            "path": self.path,
            "command": self.command,
            "durability": self.durability,
            "seed": self.seed,
            "kills": self.kills,
            "acked": self.acked,
            "lost": self.lost,
            "doubled": self.doubled,
            "in_doubt": self.in_doubt,
            "where": self.where,
            "seconds": round(self.seconds, 3),
            "recovery_p50_ms": round(self.recovery_p50_ms, 3),
            "recovery_p99_ms": round(self.recovery_p99_ms, 3),
            "violations": self.violations,
            "repeat": self.repeat,
        }
        return json.dumps(facts)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that is not less than this share of them; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0
