"""Session ids: given or made, and never able to leave a folder when exported."""

from __future__ import annotations

import os
import re
import time

from holdfast.journal.errors import InvalidSessionId

LENGTH_MAX = 128
_FORM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")


def check_session_id(store: str, session_id: object) -> str:
    """The id, if it has the form of one."""
    if not isinstance(session_id, str):
        problem = f"an id must be text, not {type(session_id).__name__}"
    elif not session_id or len(session_id) > LENGTH_MAX:
        problem = f"an id has 1 to {LENGTH_MAX} characters, this one {len(session_id)}"
    elif not _FORM.match(session_id) or ".." in session_id:
        problem = (
            "an id holds ASCII letters, digits, '-', '_' and '.', begins with a letter or digit"
            " and has no '..'"
        )
    else:
        return session_id
    raise InvalidSessionId(store, str(session_id)[:LENGTH_MAX], f"{problem}; nothing was written")


def make_session_id() -> str:
    """A new id; later ones sort behind earlier ones."""
    return f"{time.time_ns() // 1000:016x}-{os.urandom(5).hex()}"
