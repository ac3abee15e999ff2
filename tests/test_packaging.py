"""What is installed: a whole wheel, light to import, that gets on with the program around it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("holdfast", "journal", "history", "recovery")
HEAVY = ("tiktoken", "hypothesis", "pytest", "typer", "rich", "openai", "anthropic", "google.genai")

EMBEDDING_PROGRAM = """\
import sys
import history
import journal
import recovery
import holdfast
from holdfast.journal import StreamJournal
from holdfast.recovery import normalize

assert history.OWNER == journal.OWNER == recovery.OWNER == "the program"
with StreamJournal.open(sys.argv[1]) as ours:
    step = ours.begin_step("a-model")
    step.append_text("still ")
    step.append_text("here")
    assert step.seal().text == "still here"
    ours.commit_and_prune_step(step.step_id)
with holdfast.open(sys.argv[1]) as store:
    session = store.create_session()
    session.add_user("are you")
    with session.begin_step() as step:
        step.append_text("still here")
    print(normalize(session.messages())[-1].text)
"""

TYPED_PROGRAM = """\
import holdfast
from holdfast import Message, StoreBusy, StreamJournal


def answer(store: holdfast.Store, words: list[str]) -> list[Message]:
    session = store.create_session()
    with session.begin_step() as step:
        for word in words:
            step.append_text(word)
    return session.messages()


try:
    with holdfast.open("agent.db") as opened:
        answer(opened, ["a"])
except StoreBusy as busy:
    print(busy)
with StreamJournal.open("other.db") as journal:
    left: holdfast.Complete | holdfast.Errored | holdfast.Incomplete | None = journal.recover()
"""

LIGHT = """\
import json, sys
import holdfast
print(json.dumps(sorted(sys.modules)))
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a program without a word of this one's environment that could change what it imports."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def packages_on_disk() -> set[str]:
    """Every folder of ours with code in it, as a path inside the wheel."""
    found = set()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            inside = path.parent.relative_to(ROOT)
            if not any(link.is_symlink() for link in path.parents):
                found.add((inside if folder == "holdfast" else "holdfast" / inside).as_posix())
    return found


def files_on_disk(suffix: str) -> set[str]:
    return {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob(f"*{suffix}")
        if not any(link.is_symlink() for link in path.parents)
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built by way of the source archive, so that this one is seen to be whole too."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tree / folder, symlinks=True, ignore=ignored)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, tree, cwd=tree)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment that has the wheel, what it declares to need, and nothing else.

    What it needs is linked from here: no test may depend on a network.
    """
    home = tmp_path_factory.mktemp("bare")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    paths = sysconfig.get_paths(vars={"base": str(home), "platbase": str(home)})
    site = Path(paths["purelib"])
    site.mkdir(parents=True, exist_ok=True)
    needed = home / "needed"
    needed.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    link_closure(importlib.metadata.PathDistribution((site / metadata).parent), needed, set())
    (site / "needed.pth").write_text(f"{needed}\n")
    return python


def link_closure(distribution: importlib.metadata.Distribution, into: Path, seen: set[str]) -> None:
    for line in distribution.requires or []:
        requirement = Requirement(line)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if not applies or requirement.name in seen:
            continue
        seen.add(requirement.name)
        found = importlib.metadata.distribution(requirement.name)
        tops = {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}
        for top in tops:
            if not (into / top).exists():
                (into / top).symlink_to(Path(str(found.locate_file(top))))
        link_closure(found, into, seen)


# --- the wheel ----------------------------------------------------------------------------------


def test_the_wheel_holds_every_package_on_disk(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    inside = {Path(name).parent.as_posix() for name in names if name.endswith(".py")}
    assert packages_on_disk() - inside == set(), "name it under packages in pyproject.toml"
    assert inside - packages_on_disk() == set()


def test_the_wheel_holds_every_module_once(wheel: Path):
    names = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")]
    assert len(names) == len(set(names)) == len(files_on_disk(".py"))


def test_the_wheel_holds_the_rank_files_and_the_type_mark(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    ranks = files_on_disk(".gz")
    assert len(ranks) >= 2
    assert {f"holdfast/{name}" for name in ranks} <= names
    assert "holdfast/py.typed" in names


def test_the_wheel_puts_one_name_at_the_top_level(wheel: Path):
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"holdfast"}


# --- beside a program ---------------------------------------------------------------------------


def test_a_program_with_its_own_history_and_journal_runs(bare: Path, tmp_path: Path):
    for name in ("history", "journal", "recovery"):
        (tmp_path / f"{name}.py").write_text('OWNER = "the program"\n')
    (tmp_path / "app.py").write_text(EMBEDDING_PROGRAM)
    assert run(bare, "app.py", tmp_path / "agent.db", cwd=tmp_path) == "still here\n"


def test_a_program_with_its_own_history_and_journal_runs_on_an_editable_install(tmp_path: Path):
    for name in ("history", "journal", "recovery"):
        (tmp_path / f"{name}.py").write_text('OWNER = "the program"\n')
    (tmp_path / "app.py").write_text(EMBEDDING_PROGRAM)
    printed = run(sys.executable, "app.py", tmp_path / "agent.db", cwd=tmp_path)
    assert printed == "still here\n"


def test_the_editable_install_runs_the_working_tree(tmp_path: Path):
    installs = importlib.metadata.distributions(name="holdfast")  # An egg-info may lie about too.
    told = [json.loads(install.read_text("direct_url.json") or "{}") for install in installs]
    if not any(origin.get("dir_info", {}).get("editable") for origin in told):
        pytest.skip("holdfast is not installed editable here")
    source = "import holdfast.journal.engine.schema as m; print(m.__file__)"
    printed = run(sys.executable, "-c", source, cwd=tmp_path).strip()
    assert Path(printed).resolve() == ROOT / "journal" / "engine" / "schema.py"


def test_the_links_for_editors_are_relative():
    for name in ("journal", "history", "recovery"):
        assert (ROOT / "holdfast" / name).readlink() == Path("..") / name


def test_a_typed_program_sees_the_types_of_what_it_imports(bare: Path, tmp_path: Path):
    (tmp_path / "app.py").write_text(TYPED_PROGRAM)
    run(
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--python-executable",
        bare,
        "app.py",
        cwd=tmp_path,
    )


# --- what an import loads -----------------------------------------------------------------------


def test_what_the_wheel_declares_is_all_it_needs(bare: Path, tmp_path: Path):
    source = (
        "import importlib.util, holdfast, holdfast.journal, holdfast.history, holdfast.recovery\n"
        "for name in getattr(holdfast, '__all__', ()):\n"
        "    getattr(holdfast, name)\n"
        "print([n for n in ('pytest', 'hypothesis', 'typer') if importlib.util.find_spec(n)])\n"
    )
    assert run(bare, "-I", "-c", source, cwd=tmp_path) == "[]\n"


def test_importing_holdfast_loads_nothing_heavy(bare: Path, tmp_path: Path):
    loaded = set(json.loads(run(bare, "-I", "-c", LIGHT, cwd=tmp_path)))
    assert loaded & set(HEAVY) == set()


def test_importing_holdfast_loads_nothing_heavy_that_is_installed(tmp_path: Path):
    """Here everything is there to be loaded; in the bare environment a try could hide it."""
    loaded = set(json.loads(run(sys.executable, "-c", LIGHT, cwd=tmp_path)))
    assert loaded & set(HEAVY) == set()
