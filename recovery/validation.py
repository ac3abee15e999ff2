"""The words of pairing: what stands in for an output, what was found wrong, what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

# What the model reads in place of an output.  The first is for lists of unknown origin: nobody
# knows whether the tool ran.  The others are for calls whose journal says how far they came.
CANCELED_TEXT = "Tool execution was interrupted. Output was not received."
NOT_STARTED_TEXT = f"{CANCELED_TEXT} The tool had not started: it is safe to run it again."
_STARTED = (
    "Tool execution was interrupted after it had started. "
    "The outcome is unknown: it may have taken effect."
)
IN_DOUBT_TEXT = f"{_STARTED} Check before running it again."
IN_DOUBT_SAFE_TEXT = f"{_STARTED} It may be run again."


@dataclass(frozen=True, slots=True)
class MissingOutput:
    """A call that nothing answers; `index` is the place of its message in the list."""

    call_id: str
    tool_name: str
    index: int


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """What keeps a list of messages from being valid, each in the order of the list.

    Orphans (second outputs of a call among them) and misplaced outputs are named by call id. A
    misplaced output has its call, but does not stand where providers want it.
    """

    missing_outputs: tuple[MissingOutput, ...] = ()
    orphan_outputs: tuple[str, ...] = ()
    misplaced: tuple[str, ...] = ()

    @property
    def is_valid(self) -> bool:
        """True if and only if `normalize` would change nothing."""
        return not (self.missing_outputs or self.orphan_outputs or self.misplaced)

    def summary(self) -> str:
        """One line for people."""
        if self.is_valid:
            return "History invariants are valid"
        missing, orphans = len(self.missing_outputs), len(self.orphan_outputs)
        line = f"{missing} missing outputs, {orphans} orphan outputs"
        return f"{line}, {len(self.misplaced)} misplaced outputs" if self.misplaced else line


@dataclass(frozen=True, slots=True)
class PairingSettings:
    """What to do about a history that someone else built; recovery of our own steps always pairs.

    `enforce` lets `enforce_invariants` repair a living history, `auto_recover` lets
    `recover_from_crash` repair a loaded one, and `warn` logs what either finds, repaired or not.
    """

    enforce: bool = False
    auto_recover: bool = True
    warn: bool = True
