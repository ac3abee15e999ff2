"""A crash in thirty lines: stream, start a tool, get killed, reopen, see what is on record.

Run it with `make demo`, or `python examples/demo.py`.
"""

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import holdfast

ANSWER = "I will delete the old build folder and then run the tests again. One moment "


def agent(path: Path) -> None:
    """An agent that shows each delta only after it is on record, then runs a tool for ever."""
    with holdfast.open(path) as store:
        session = store.create_session("demo", model="any-model")
        session.add_user("clean up and run the tests")
        step = session.begin_step()
        for word in ANSWER.split(" "):
            step.append_text(word + " ")  # on record now
            print(word, end=" ", flush=True)  # shown after
            time.sleep(0.02)
        for call_id, name, folder in (
            ("call_1", "delete_folder", "build"),
            ("call_2", "run_tests", "tests"),
        ):
            step.announce_call(call_id, name)
            step.append_args(call_id, json.dumps({"path": folder}))
        step.append_done()
        step.seal()
        step.start_call("call_1")  # on record before the tool runs
        print("\n[agent] running delete_folder ...", flush=True)
        time.sleep(60)


def main() -> None:
    """Run the agent as a child, kill it in the middle of its tool, and look."""
    if sys.argv[1:2] == ["--agent"]:
        agent(Path(sys.argv[2]))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "agent.db"
        print("--- an agent streams its answer, and shows only what is on record\n[agent] ", end="")
        sys.stdout.flush()
        child = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, __file__, "--agent", path])
        while not (path.exists() and started(path)):
            time.sleep(0.05)
        time.sleep(0.1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        print("--- kill -9\n--- the next process opens the store\n")
        with holdfast.open(path) as store:
            print(store.recovery.summary(), "\n")
            session = store.session("demo")
            for message in session.messages():
                print(f"{message.role:>10}: {message.text.strip() or '(tool results)'}")
                for call in message.tool_calls:
                    print(f"{'':>10}  calls {call.name} {json.dumps(call.input)} [{call.id}]")
                for result in message.tool_results:
                    print(f"{'':>10}  {result.tool_use_id} -> {result.synthetic}: {result.content}")
        print("\nEvery word that was shown is there, and both calls have an answer: legal to send.")


def started(path: Path) -> bool:
    """Whether the agent has sealed its step: its tool starts right behind that."""
    try:
        with holdfast.open(path, read_only=True) as store:
            return store.stats().sealed_steps == 1
    except holdfast.HoldfastError:
        return False


if __name__ == "__main__":
    main()
