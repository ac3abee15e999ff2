"""Commits that are shared: what a step is in doubt about is looked at before a write."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast.journal.group_commit import Append, commit_appends
from holdfast.journal.stream import TEXT


@pytest.mark.parametrize("given", [["a", "b"], ["b"]], ids=["the retry", "another event"])
def test_an_event_that_landed_unseen_is_neither_doubled_nor_overwritten(
    tmp_path: Path, given: list[str]
):
    with holdfast.open(tmp_path / "a.db") as store:
        step = store.create_session("s").begin_step()
        # As a signal leaves it that came between the write and the count.
        step._doubt = (1, TEXT, "a", None)
        with store.engine.lock:
            store.engine.append(step._base | 1, TEXT, None, "a")
        jobs = [Append(step, TEXT, content, None, None) for content in given]
        commit_appends(store.engine, jobs)
        assert [job.error for job in jobs] == [None] * len(jobs)
        assert step.text == "ab"
        step.commit()
        assert store.session("s").messages()[0].text == "ab"
