"""The fixtures for tests of an agent."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

import holdfast
from holdfast.recovery.oracle import BrokenPromise, check_promises


def talker(path: Path) -> None:
    """An agent that says words for ever."""
    with holdfast.open(path) as store:
        session = store.create_session("talk")
        session.add_user("go on")
        step = session.begin_step()
        for number in range(10_000_000):
            step.append_text(f"{number} ")


def waiter(path: Path) -> None:
    """An agent whose tool never comes back."""
    with holdfast.open(path) as store:
        step = store.create_session("wait").begin_step()
        step.announce_call("a", "sleep")
        step.append_args("a", "{}")
        step.append_done()
        step.execute(step.seal().tool_calls[0], lambda: time.sleep(600))


def test_a_store_of_the_tests_own_is_open_and_is_closed_behind_it(holdfast_store, tmp_path):
    assert holdfast_store.path == tmp_path / "agent.db"
    holdfast_store.create_session("s").add_user("hello")
    assert [info.id for info in holdfast_store.sessions()] == ["s"]


def test_a_fault_disk_gives_an_image_of_any_moment(fault_disk, tmp_path):
    with holdfast.open(tmp_path / "a" / "agent.db", vfs=fault_disk.name) as store:
        store.create_session("s").begin_step().append_text("said")
        image = fault_disk.image(len(fault_disk.ops), tmp_path / "image")
    with holdfast.open(image) as store:
        assert store.session("s").messages()[-1].text == "said"


def test_a_child_is_killed_when_it_has_come_to_a_point(killable, tmp_path):
    child = killable(talker, tmp_path / "agent.db")
    child.kill_at("text", nth=5)
    said = [ack.data for ack in child.acks if ack.kind == "text"]
    assert len(said) >= 5
    with holdfast.open(tmp_path / "agent.db") as store:
        assert store.session("talk").messages()[-1].text.startswith("".join(said))


def test_what_a_child_was_promised_can_be_held_against_its_store(killable, tmp_path):
    child = killable(talker, tmp_path / "agent.db")
    child.kill_at("text", nth=3)
    with holdfast.open(tmp_path / "agent.db") as store:
        check_promises(child.acks, store)
        last = child.acks[-1]
        never = last._replace(seq=last.seq + 1, data="never said")
        with pytest.raises(BrokenPromise):
            check_promises([*child.acks, never], store)


def test_a_call_whose_tool_was_killed_with_the_agent_is_in_doubt(killable, tmp_path):
    killable(waiter, tmp_path / "agent.db").kill_at("start")
    with holdfast.open(tmp_path / "agent.db") as store:
        assert store.recovery.steps[0].in_doubt == ("a",)


def test_a_script_is_killed_as_well_as_a_function(killable, tmp_path):
    script = tmp_path / "agent.py"
    script.write_text(
        "import sys, time, holdfast\n"
        "with holdfast.open(sys.argv[1]) as store:\n"
        "    store.create_session('s').add_user('hello')\n"
        "    time.sleep(600)\n"
    )
    child = killable(script, tmp_path / "agent.db")
    child.kill_at("user")
    assert [ack.kind for ack in child.acks] == ["session", "user"]
    assert child.wait() == -9


def test_a_point_that_never_comes_is_an_error_that_says_what_came(killable, tmp_path):
    script = tmp_path / "agent.py"
    script.write_text("import sys, holdfast\nholdfast.open(sys.argv[1]).create_session('s')\n")
    with pytest.raises(AssertionError, match=r"not come to 'commit' number 1.*'session'"):
        killable(script, tmp_path / "agent.db").kill_at("commit")


def test_a_function_that_another_process_cannot_find_is_refused(killable):
    with pytest.raises(TypeError, match="not a function of a module"):
        killable(lambda: None)


def test_nothing_is_loaded_into_a_suite_that_has_not_asked_for_it(tmp_path):
    (tmp_path / "test_mine.py").write_text("def test_it(holdfast_store):\n    assert True\n")
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    without = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "fixture 'holdfast_store' not found" in without.stdout
    opted = [*run, "-p", "holdfast.recovery.pytest_plugin"]
    with_it = subprocess.run(opted, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert with_it.returncode == 0, with_it.stdout
