"""Errors: one family, facts as attributes, and every one of them survives pickling."""

from __future__ import annotations

import copy
import inspect
import pickle
from concurrent.futures import ProcessPoolExecutor

import pytest

import holdfast
from holdfast.journal import errors

CLASSES = sorted(
    (getattr(errors, name) for name in errors.__all__), key=lambda kind: str(kind.__name__)
)


VALUES = {"step_id": 3, "call_ids": ("c1", "c2"), "call_id": "c1", "session_id": "s1"}


def make(kind: type[errors.HoldfastError]) -> errors.HoldfastError:
    """One of each, by what its constructor asks for."""
    if kind is errors.HoldfastError:
        return kind("found so")
    asked = list(inspect.signature(kind).parameters)
    given = {"path": "a.db", "problem": "found so", **VALUES}
    return kind(*(given.get(name, f"some {name}") for name in asked))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_survives_pickling_with_all_its_facts(kind, protocol):
    error = make(kind)
    error.add_note("seen at night")
    for again in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):
        assert type(again) is kind
        assert str(again) == str(error)
        assert again.args == error.args
        assert vars(again) == vars(error)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_is_one_of_ours_is_public_and_says_what_state_things_are_in(kind):
    assert issubclass(kind, holdfast.HoldfastError)
    assert getattr(holdfast, kind.__name__) is kind
    assert kind.__doc__ and kind.__doc__.strip().endswith(".")


def test_the_names_of_the_contract_are_all_there():
    wanted = (
        "StoreNotFound NotAStore StoreTooNew StoreCorrupt StoreNotWritable StoreBusy StoreFull"
        " StoreFailed StoreClosed ForkedStore ReadOnlyStore NetworkFilesystem SessionNotFound"
        " SessionExists SessionBusy SessionUnrecovered InvalidSessionId InvalidMessage StepBusy"
        " StepClosed UnknownCall DuplicateCall CallNotReady UnansweredCalls ResultMismatch"
        " ProcessMismatch"
    ).split()
    assert set(wanted) <= set(errors.__all__)
    for name in ("InvalidMessage", "InvalidSessionId", "InvalidPath", "InvalidArgument"):
        assert issubclass(getattr(errors, name), ValueError)


def test_the_facts_are_attributes():
    error = make(errors.UnansweredCalls)
    assert (error.path, error.step_id, error.call_ids) == ("a.db", 3, ("c1", "c2"))
    error = make(errors.SessionBusy)
    assert (error.path, error.session_id, error.problem) == ("a.db", "s1", "found so")
    error = make(errors.UnknownCall)
    assert (error.call_id, error.step_id) == ("c1", 3)


def open_elsewhere(path: str) -> None:
    holdfast.open(path, create=False)


def test_an_error_comes_back_from_a_process_pool(tmp_path):
    with ProcessPoolExecutor(1) as pool:
        future = pool.submit(open_elsewhere, str(tmp_path / "a.db"))
        with pytest.raises(holdfast.StoreNotFound) as caught:
            future.result(timeout=60)
    assert caught.value.path == str(tmp_path / "a.db")
