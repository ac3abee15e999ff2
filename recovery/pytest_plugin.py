"""Fixtures for tests of an agent. Opt-in: `pytest -p holdfast.recovery.pytest_plugin`.

holdfast_store   a store in the test's own folder, closed when the test ends
fault_disk       a disk that forgets: holdfast.open(path, vfs=fault_disk.name)
killable         starts a child that runs a function or a script, and kills it at a point
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.recovery.faults import FaultDisk
from holdfast.recovery.killable import Killable

if TYPE_CHECKING:
    from holdfast.store import Store


@pytest.fixture
def holdfast_store(tmp_path: Path) -> Iterator[Store]:
    """A store in the test's own folder; `holdfast_store.path` says where."""
    import holdfast

    with holdfast.open(tmp_path / "agent.db") as store:
        yield store


@pytest.fixture
def fault_disk() -> Iterator[FaultDisk]:
    """A disk that forgets."""
    with FaultDisk() as disk:
        yield disk


@pytest.fixture
def killable() -> Iterator[Callable[..., Killable]]:
    """A function that starts a `Killable`: `killable(agent, path)`; none outlives the test."""
    children: list[Killable] = []

    def start(target: Any, *args: Any) -> Killable:
        children.append(Killable(target, *args))
        return children[-1]

    yield start
    for child in children:
        child.close()
