"""Every error the engine raises on purpose, grouped by when it happens.

A message says where, what was found, what state things are in now, and what to do.  The facts are
attributes too, so nobody has to parse a message, and every error survives pickling.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


class HoldfastError(Exception):
    """Everything the engine raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Constructors take facts and build the message from them, so the default (call the class
        # with `args`) cannot rebuild one: a process pool would die on it.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(
    kind: type[HoldfastError], args: tuple[object, ...], facts: dict[str, object]
) -> HoldfastError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(facts)
    return error


# --- opening ------------------------------------------------------------------------------------


class StoreError(HoldfastError):
    """Something about the store as a whole; `path` names it."""

    def __init__(self, path: Path | str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path, self.problem = str(path), problem


class StoreNotFound(StoreError):
    """There is no store at this path and `create=False`. Nothing was created."""


class NotAStore(StoreError):
    """The file is no Holdfast store. It was left byte for byte as it was."""


class StoreTooNew(StoreError):
    """A newer Holdfast wrote this store. It was left byte for byte as it was."""


class StoreCorrupt(StoreError):
    """The file breaks the format. It was not changed; what can still be read is good."""


class StoreNotWritable(StoreError):
    """The operating system does not let this process write here. Nothing was changed."""


class StoreBusy(StoreError):
    """Someone else holds the store longer than we wait. Nothing was changed; try again."""


class NetworkFilesystem(StoreError):
    """WAL does not work over a network file system. Nothing was created or changed."""


# --- writing ------------------------------------------------------------------------------------


class StoreFull(StoreError):
    """The disk has no room. This write is not on record; the step stays usable without a gap."""


class StoreFailed(StoreError):
    """Syncs fail: this write may or may not be on record, and every later write is refused."""


class StoreClosed(StoreError):
    """The store was closed. Its unfinished steps wait for recovery; nothing was written."""


class ForkedStore(StoreError):
    """A store of the parent process was used in a forked child. Nothing was touched."""


class ReadOnlyStore(StoreError):
    """The store was opened with `read_only=True`. Nothing was written."""


class SessionError(HoldfastError):
    """Something about one session; `session_id` and `path` name it."""

    def __init__(self, path: Path | str, session_id: str, problem: str) -> None:
        super().__init__(f"{path}: session {session_id!r}: {problem}")
        self.path, self.session_id, self.problem = str(path), session_id, problem


class SessionNotFound(SessionError):
    """The store has no session of this id. Nothing was written."""


class SessionExists(SessionError):
    """The id is taken. The session that has it was not changed."""


class InvalidSessionId(SessionError, ValueError):
    """The id has a form that a session id may not have. Nothing was written."""


class SessionBusy(SessionError):
    """Another living store has a step open in this session. Nothing was written."""


class SessionUnrecovered(SessionError):
    """A dead owner left a step here, and recovery was switched off. Nothing was written."""


class EntryNotFound(SessionError, LookupError):
    """The session has no entry or summary of this id. Nothing was changed."""


class StepError(HoldfastError):
    """Something about one step; `step_id` and `path` name it."""

    def __init__(self, path: Path | str, step_id: int, problem: str) -> None:
        super().__init__(f"{path}: step {step_id}: {problem}")
        self.path, self.step_id, self.problem = str(path), step_id, problem


class StepBusy(StepError):
    """The store has a step open in this session already. Nothing was written."""


class StepClosed(StepError):
    """The step no longer takes this call. Nothing was written; what is on record stays."""


class CallError(StepError):
    """Something about one tool call; `call_id`, `step_id` and `path` name it."""

    def __init__(self, path: Path | str, step_id: int, call_id: str, problem: str) -> None:
        super().__init__(path, step_id, f"call {call_id!r}: {problem}")
        self.call_id = call_id


class UnknownCall(CallError):
    """The step never announced this call, or it was dropped. Nothing was written."""


class DuplicateCall(CallError):
    """The step has a call of this id already. Nothing was written; the first one stands."""


class CallNotReady(CallError):
    """The call cannot be run yet, or no longer changed. Nothing was written; do not run it."""


class ResultMismatch(CallError):
    """Another result for this call is on record. The first one stands."""


class ProcessMismatch(CallError):
    """Another process is on record for this call. The first one stands."""


class UnansweredCalls(StepError):
    """The step cannot be committed: `call_ids` have no result. Nothing was written."""

    def __init__(self, path: Path | str, step_id: int, call_ids: tuple[str, ...]) -> None:
        names = ", ".join(repr(call_id) for call_id in call_ids)
        super().__init__(
            path,
            step_id,
            f"no result for {names}; the step is sealed and unchanged: record_result for each,"
            " then commit again",
        )
        self.call_ids = call_ids


class InvalidArgument(HoldfastError, ValueError):
    """An argument has a value that it may not have. Nothing was opened or written."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


class InvalidPath(NotAStore, ValueError):
    """The path has a form that no store can have. Nothing was opened or written."""


class InvalidMessage(HoldfastError, ValueError):
    """What was given is no valid message, block or argument. Nothing was written."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


# --- archives -----------------------------------------------------------------------------------


class ExportFailed(HoldfastError, OSError):
    """A file could not be written. What stood at `path` before is as it was."""

    def __init__(self, path: Path | str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path, self.problem = str(path), problem


class InvalidArchive(HoldfastError, ValueError):
    """The file breaks the format of an archive; `field` says where. Nothing was imported."""

    def __init__(self, path: Path | str, field: str, problem: str) -> None:
        super().__init__(f"{path}: {field}: {problem}; nothing was imported")
        self.path, self.field, self.problem = str(path), field, problem


class ArchiveNotFound(HoldfastError, FileNotFoundError):
    """There is no file to import at `path`. Nothing was imported."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(f"{path}: no such file; nothing was imported: check the path")
        self.path = str(path)


__all__ = [
    name
    for name, value in list(globals().items())
    if isinstance(value, type) and issubclass(value, HoldfastError)
]
