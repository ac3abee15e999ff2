"""What recovery would do with an unfinished step, told without doing it."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.journal.processes import ToolProcess
from holdfast.journal.recovered import CallState, Leftover, RecoveredCall


@dataclass(frozen=True, slots=True)
class CallPlan:
    """What recovery would make of a call: recorded, canceled, in_doubt or dropped."""

    call_id: str
    name: str
    outcome: str
    process: ToolProcess | None = None  # a child that still runs it


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What recovery would do with a step: keep it as complete, errored or interrupted, or empty."""

    step_id: int
    session_id: str
    outcome: str
    text: str
    calls: tuple[CallPlan, ...] = ()

    def __str__(self) -> str:
        calls = "".join(f", {call.call_id} {call.outcome}" for call in self.calls)
        size = f"{len(self.text)} characters"
        return f"step {self.step_id} of session {self.session_id}: {self.outcome}, {size}{calls}"


def plan(leftover: Leftover) -> StepPlan:
    """What recovery would do with this step, by its default policy and with nobody to ask."""
    row, stream = leftover.row, leftover.stream
    message = stream.message(model=row.model_name)
    outcome = "empty" if message is None else stream.status
    calls = [_call_plan(leftover, call) for call in leftover.calls]
    calls += [
        CallPlan(lost.call_id, lost.name, "in_doubt" if lost.state == "started" else "lost")
        for lost in leftover.lost_calls
    ]
    return StepPlan(row.step_id, str(row.session), outcome, stream.text, tuple(calls))


def _call_plan(leftover: Leftover, call: RecoveredCall) -> CallPlan:
    if call.position in leftover.results:
        return CallPlan(call.call_id, call.name, "recorded")
    running = call.process if call.process is not None and call.process.is_running else None
    if call.input is None:
        outcome = "dropped"
    elif call.state is CallState.STARTED or call.position in leftover.damaged_results:
        outcome = "in_doubt"
    else:
        outcome = "canceled"
    return CallPlan(call.call_id, call.name, outcome, running)
