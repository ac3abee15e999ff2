"""Child processes that run a tool: told apart by pid and start time, since pids are reused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

GONE = "gone"


@dataclass(frozen=True, slots=True)
class ToolProcess:
    """A process on record for a call; `started` is opaque and equal only for the same process."""

    pid: int
    started: str

    @property
    def is_running(self) -> bool:
        """Whether this very process still runs: the same pid with the same start time."""
        return self.started != GONE and start_time(self.pid) == self.started

    def end(self) -> bool:
        """Kill it, only if it is still this very process; True if it was."""
        try:
            # Looked at after it is held: what is held cannot come to mean another process.
            with _held(self.pid) as kill:
                if not self.is_running:
                    return False
                kill()
        except ProcessLookupError:
            return False
        return True


def start_time(pid: int) -> str:
    """When this pid started, in the system's own words; `gone` if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except FileNotFoundError:
        return GONE if Path("/proc/self/stat").exists() else _ask_ps(pid)
    except OSError:
        return GONE
    # The name in parentheses may hold anything; field 22, the start in clock ticks, is behind it.
    fields = stat.rpartition(")")[2].split()
    if fields[0] in "ZX":  # A zombie runs nothing any more.
        return GONE
    return f"{boot}:{fields[19]}"


def _ask_ps(pid: int) -> str:
    """For systems without /proc."""
    answer = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return answer.stdout.strip() or GONE


@contextmanager
def _held(pid: int) -> Iterator[Callable[[], None]]:
    """A way to kill a process that, where the system has one, survives the reuse of its pid."""
    if sys.platform == "linux":
        descriptor = os.pidfd_open(pid)
        try:
            yield lambda: signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)
    else:
        yield lambda: os.kill(pid, signal.SIGKILL)
