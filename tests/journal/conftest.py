"""What the tests of the journals share."""

import sys
from pathlib import Path

import pytest

import holdfast.journal

PACKAGE = str(Path(holdfast.journal.__file__).parent)


class Interrupted(BaseException):
    """What a signal handler raises."""


@pytest.fixture
def interrupt_at():
    """Run an act and raise at the nth point at which Python would let a signal handler in.

    Those points are the start of a function and the return of one that is written in C: the
    events that a profiler is told of. (There is also the jump back of a loop, which comes to the
    same.) Answers with whether it came to that, and with what the act returned if it did not.
    """

    def run(point, act):
        count = 0

        def watch(frame, event, argument):
            nonlocal count
            if event in ("call", "c_return") and frame.f_code.co_filename.startswith(PACKAGE):
                count += 1
                if count == point:
                    raise Interrupted

        sys.setprofile(watch)
        try:
            return False, act()
        except Interrupted:
            return True, None
        finally:
            sys.setprofile(None)

    return run
