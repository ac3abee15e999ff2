"""What a store tells those who watch it; a watcher cannot hurt the store."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True)
class StoreEvent:
    """Something that has happened and is on record.

    kind  session, delete, append, begin, seal, start, process, result, commit, discard, add, pop:
          a call that has returned its promise; rewrite: a history was imported or repaired; sync,
          checkpoint: work of the disk; recovery, synthetic_output, orphan_output, damage: what
          recovery found.
    """

    kind: str
    step_id: int | None = None
    seq: int | None = None
    session_id: str | None = None
    pages: int | None = None
    count: int = 1
    data: object = None  # what was put on record, as it was given
    call: int | None = None  # the position of the call that an event of a stream is of


Observer = Callable[[StoreEvent], object]


def guarded(observer: Observer | None) -> Observer | None:
    """Wrap a user's callback so that nothing it raises reaches the store."""
    if observer is None:
        return None

    def tell(event: StoreEvent) -> None:
        try:
            observer(event)
        except Exception as error:
            # Its words and its traceback may hold pieces of a transcript.
            log.warning("on_event raised %s for %s; ignored", type(error).__name__, event.kind)
            log.debug("on_event raised", exc_info=True)

    return tell
