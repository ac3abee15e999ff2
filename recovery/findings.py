"""What doctor found: problems by their codes, what to do about each, and the verdict in words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.recovery.dry_run import StepPlan

SALVAGE: Final = "copy what is good into a new store with salvage(path, into), and go on with that"
REPAIR: Final = "open the store and call repair() on that session"
KEEP: Final = "nothing else is touched by it; salvage(path, into) makes a store without it"

# One line a code: what a person should do.
ADVICE: Final[dict[str, str]] = {
    # the file
    "not-a-store": "check the path; if this was a store, salvage(path, into) tries to read it",
    "too-new": "upgrade holdfast, then look again",
    "old-format": "open it once: it is then brought to the present format, after a backup",
    "busy": "close it where it is open, then look again",
    "no-access": "check the permissions of the file and of its folder, then look again",
    "unreadable": SALVAGE,
    "integrity": SALVAGE,
    "broken-reference": SALVAGE,
    "schema": "find out who changed the tables; " + SALVAGE,
    "log-header": "do not open it for writing: copy the file and its -wal first, then ask for help",
    "log-cut": (
        "do not open it for writing, which overwrites what is cut off: copy the file and its -wal"
        " first; after a loss of power these may be deltas that were never synced"
    ),
    # the journal
    "event-damaged": "recovery keeps what stands before it; see to the disk",
    "event-gap": "recovery keeps what stands before it; see to the disk",
    "event-without-step": KEEP,
    "sealed-step-short": "recovery keeps what is there and says so; see to the disk",
    "step-in-two-places": SALVAGE + "; history is right, the journal's rows are left behind",
    "two-writers": SALVAGE,
    "step-counter-behind": SALVAGE + "; a new step would get the id of an old one",
    "step-damaged": "see to the disk; " + SALVAGE,
    "step-without-session": SALVAGE,
    "step-unreadable": "recovery will quarantine it and report why; its rows stay",
    "call-without-step": KEEP,
    "call-without-event": "the call is told as lost when the step is settled",
    "call-differs": "the stream is checked and stands; see to the disk",
    "batch-without-step": KEEP,
    "result-without-call": KEEP,
    "result-damaged": "recovery tells the call as in doubt: look at the world before it runs again",
    "quarantined-step": "read why; its rows are kept, and nothing else is touched by it",
    # history
    "entry-damaged": "it is left out when the session is read; " + KEEP,
    "entry-gap": SALVAGE,
    "entry-without-session": SALVAGE + "; the session gets a new name there",
    "doubled-entry": SALVAGE,
    "wrong-link": SALVAGE,
    "step-and-entry-differ": "the entry is checked and right; the step's row is not",
    "counter-off": "listings show a wrong number; " + KEEP,
    "last-status-off": "listings show a wrong status; " + KEEP,
    "session-damaged": KEEP,
    "missing-result": REPAIR,
    "orphan-result": REPAIR,
    "misplaced-result": REPAIR,
    "summary-damaged": "make the summary anew: the entries it stands for are all there",
    "summary-over-nothing": "make the summary anew; " + KEEP,
    "summary-link": "make the summary anew; " + KEEP,
    "owner-damaged": "nothing: the next open removes the row of an owner that is gone",
    # no damage
    "dead-owner": "nothing: the next open removes the row",
    "living-owner": "nothing",
    "sync-failed": "see to the disk; the next open makes the log sound",
    "not-in-log-mode": "nothing: this is a backup; opening it switches back",
}
# These say nothing about the store itself: nobody has seen it.
ELSEWHERE: Final = frozenset({"not-a-store", "too-new", "busy", "no-access"})


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding. `code` never changes its meaning; the rest is for people."""

    code: str
    where: str
    what: str
    advice: str

    def __str__(self) -> str:
        return f"[{self.code}] {self.where}: {self.what}"


def problem(code: str, where: str, what: str) -> Problem:
    """A finding with the advice that belongs to its code."""
    return Problem(code, where, what, ADVICE[code])


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """What a look at a store has found. `notes` are worth knowing and no damage."""

    path: Path
    problems: tuple[Problem, ...] = ()
    notes: tuple[Problem, ...] = ()
    would_recover: tuple[StepPlan, ...] = ()
    sessions: int = 0
    entries: int = 0
    events: int = 0
    bytes: int = 0
    wal_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether the store is sound."""
        return not self.problems

    def summary(self) -> str:
        """The report in words: what is there, what is wrong, and what to do."""
        lines = [
            f"{self.path}: {self.bytes} bytes, log {self.wal_bytes} bytes;"
            f" {self.sessions} session(s), {self.entries} entries, {self.events} journal event(s)"
        ]
        lines += [f"  note {note}" for note in self.notes]
        if self.would_recover:
            lines.append(f"The next open would settle {len(self.would_recover)} step(s):")
            lines += [f"  {plan}" for plan in self.would_recover]
        if self.ok:
            lines.append("Verdict: sound. Nothing to do.")
            return "\n".join(lines)
        lines.append(f"{len(self.problems)} problem(s):")
        lines += [f"  {found}" for found in self.problems]
        looked = not ELSEWHERE.issuperset(found.code for found in self.problems)
        verdict = "damaged" if looked else "not looked at"
        lines.append(f"Verdict: {verdict}. Nothing was changed. What to do:")
        for code in dict.fromkeys(found.code for found in self.problems):
            lines.append(f"  {code}: {ADVICE[code]}")
        return "\n".join(lines)


__all__ = ["DoctorReport", "Problem", "problem"]
