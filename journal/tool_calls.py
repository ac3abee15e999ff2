"""Starting and answering the calls of one step: the part of the tool journal that every step needs.

INVARIANT  A start is on record before the tool runs; the first start, process and result stand.
"""

from __future__ import annotations

import json
from typing import Any

from holdfast.journal.blocks import ToolResult
from holdfast.journal.engine.engine import SqliteEngine
from holdfast.journal.errors import CallNotReady, InvalidArgument, ProcessMismatch, ResultMismatch
from holdfast.journal.observers import StoreEvent
from holdfast.journal.processes import GONE, ToolProcess, start_time
from holdfast.journal.recovered import CallState
from holdfast.journal.writer import CallBook, JournaledCall, unknown_call

REPLAYS = ("never", "safe")


class CallRecorder:
    """Records what becomes of calls; whoever keeps the step's book hands it in."""

    def __init__(self, engine: SqliteEngine) -> None:
        self._engine = engine

    def start(self, step_id: int, book: CallBook, call_id: str, replay: str = "never") -> None:
        """On record before the tool runs; the first start stands."""
        if replay not in REPLAYS:
            raise InvalidArgument(f"replay is {replay!r}, expected 'never' or 'safe'")
        call = self.known(step_id, book, call_id)
        if call.state in (CallState.STARTED, CallState.ANSWERED):
            return
        self._engine.start_call(step_id, call.sealed, replay=replay)
        call.state, call.replay = CallState.STARTED, replay
        self._tell("start", step_id, call.position, call_id)

    def put_process(self, step_id: int, book: CallBook, call_id: str, pid: int) -> None:
        """A child process runs the call; another one later is refused."""
        if not isinstance(pid, int) or isinstance(pid, bool) or pid < 1:
            raise InvalidArgument(f"pid is {pid!r}, expected the id of a process")
        call = self.known(step_id, book, call_id)
        given = ToolProcess(pid, start_time(pid))
        if call.process is None:
            if call.state is not CallState.STARTED:
                raise CallNotReady(
                    self._engine.name,
                    step_id,
                    call_id,
                    f"is {call.state}, and a process runs a started call; nothing was written",
                )
            call.process = ToolProcess(
                *self._engine.record_process(
                    step_id, call.position, pid=given.pid, started=given.started
                )
            )
            self._tell("process", step_id, call.position, pid)
        # The one on record may have ended meanwhile; a pid that lives again is somebody else's.
        if call.process.pid != pid or given.started not in (call.process.started, GONE):
            raise ProcessMismatch(
                self._engine.name,
                step_id,
                call_id,
                f"process {call.process.pid} is on record, not {pid}; the first one stands",
            )

    def answer(self, step_id: int, book: CallBook, result: ToolResult) -> ToolResult:
        """On record when this returns; the first result stands."""
        call = self.known(step_id, book, result.tool_use_id)
        if call.result is None:
            body = self._engine.put_result(step_id, call.sealed, _result_json(result))
            call.result = ToolResult.model_validate(json.loads(body))
            call.state = CallState.ANSWERED
            if call.result == result:
                self._tell("result", step_id, call.position, result)
        if call.result != result:
            raise ResultMismatch(
                self._engine.name,
                step_id,
                result.tool_use_id,
                "another result is on record, and the first one stands; nothing was written",
            )
        return call.result

    def known(self, step_id: int, book: CallBook, call_id: str) -> JournaledCall:
        """The call of this id; raises if the step never announced it."""
        call = book.get(call_id)
        if call is None:
            raise unknown_call(self._engine.name, step_id, book, call_id)
        return call

    def no_arguments(self, step_id: int, call_id: str) -> CallNotReady:
        """What is raised for a call whose arguments are no JSON object."""
        return CallNotReady(
            self._engine.name,
            step_id,
            call_id,
            "its arguments are no JSON object, so it must not be run; nothing was written",
        )

    def _tell(self, kind: str, step_id: int, position: int, data: Any) -> None:
        if self._engine.observer is not None:
            self._engine.observer(StoreEvent(kind, step_id, position, data=data))


def _result_json(result: ToolResult) -> str:
    """As `model_dump_json` has it, without callbacks: those would hide what a signal raises."""
    content = result.content
    fields = {
        "type": result.type,
        "tool_use_id": result.tool_use_id,
        "content": content if isinstance(content, str) else [dict(block) for block in content],
        "is_error": result.is_error,
        "status": str(result.status),
        "synthetic": result.synthetic,
    }
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
