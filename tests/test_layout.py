"""Who may import whom, and what may stand where: read from the source itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("holdfast", "journal", "history", "recovery")
LINES_MAX = 400

# The proof kit stands above the front door and may import it, lazily.
PROOF_KIT = set("faults injection images trace explore drill oracle pytest_plugin".split())
PROOF_KIT |= {"strategies", "generators", "workloads", "nursery", "drill_agent", "killable"}
# The oracle judges the engine, so it must not read through it.
PLAIN_SQLITE = {"holdfast.recovery.oracle"}
# The fault kit is a file layer under SQLite.
APSW_TOO = {"holdfast.recovery.faults", "holdfast.recovery.injection"}

# Plain file calls there are, and why none of them can drop SQLite's locks. Closing any descriptor
# of the database, its -wal or its -shm does that, and acknowledged rows vanish.
PLAIN_FILE_CALLS = {
    "holdfast.journal.owners:_open": "the lock file, through its one descriptor",
    "holdfast.journal.owners:_boot": "a file of the kernel",
    "holdfast.journal.processes:start_time": "files of the kernel",
    "holdfast.journal.locations:sync_folder": "a folder",
    "holdfast.journal.locations:filesystem_type": "the mount table",
    "holdfast.journal.engine:_mark_failed": "the mark beside the lock file",
    "holdfast.journal.engine:back_up": "a backup that did not exist before",
    "holdfast.history.tokens:_read_ranks": "package data",
    "holdfast.history.atomic_file:_create": "a file of a name that nobody else has",
    "holdfast.history.archive_reader:read_archive": "an archive; files of a store are refused",
    "holdfast.recovery.drill:_image": "a store whose users are all dead",
    "holdfast.recovery.kills:start_program": "what a program writes to stderr",
    "holdfast.recovery.kills:_tail": "what a program has written to stderr",
    "holdfast.recovery.nursery:_execute": "the null device",
    "holdfast.recovery.faults:_adopt": "a log, on which nobody holds a lock",
    "holdfast.recovery.images:write": "an image of the disk, in a folder of its own",
}


@dataclass(frozen=True)
class Module:
    """One source file, by the name that it is imported under."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def part(self) -> str:
        """journal, history, recovery, or holdfast for the front door."""
        return part_of(self.name)


def part_of(name: str) -> str:
    pieces = name.split(".")
    return pieces[1] if len(pieces) > 1 and pieces[1] in FOLDERS else "holdfast"


def read_modules() -> list[Module]:
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT).with_suffix("")
            if folder == "holdfast" and any(link.is_symlink() for link in path.parents):
                continue  # The links that editors follow.
            pieces = [*([] if folder == "holdfast" else ["holdfast"]), *inside.parts]
            name = ".".join(pieces).removesuffix(".__init__")
            found.append(Module(name, path, ast.parse(path.read_text(encoding="utf-8"))))
    return found


MODULES = read_modules()


def parse(source: str, name: str = "holdfast.history.planted") -> Module:
    return Module(name, Path("planted.py"), ast.parse(source))


def walk(node: ast.AST, inside: str = "") -> Iterator[tuple[ast.AST, str]]:
    """Every node with what keeps it from running at import: a function, TYPE_CHECKING or ""."""
    for child in ast.iter_child_nodes(node):
        yield child, inside
        match child:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield from walk(child, name)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from walk(child, "TYPE_CHECKING")
            case _:
                yield from walk(child, inside)


# --- who imports whom ---------------------------------------------------------------------------


def imports(module: Module) -> Iterator[tuple[str, str]]:
    """Every imported name, also those that only types need, with what keeps it from running."""
    for node, inside in walk(module.tree):
        match node:
            case ast.Import(names=names):
                yield from ((alias.name, inside) for alias in names)
            case ast.ImportFrom(module=source, names=names, level=0):
                yield from ((f"{source}.{alias.name}", inside) for alias in names)
            case ast.ImportFrom():
                pytest.fail(f"{module.name}, line {node.lineno}: write the import out in full")


def forbidden_imports(module: Module) -> list[str]:
    below = {
        "journal": {"journal"},
        "history": {"journal", "history"},
        "recovery": {"journal", "history", "recovery"},
        "holdfast": {"journal", "history", "recovery", "holdfast"},
    }[module.part]
    lazy = module.part == "recovery" and module.name.split(".")[-1] in PROOF_KIT
    return [
        f"{module.name} imports {name}"
        for name, inside in imports(module)
        if name.split(".")[0] == "holdfast" and part_of(name) not in below and not (lazy and inside)
    ]


def test_imports_point_one_way():
    assert [wrong for module in MODULES for wrong in forbidden_imports(module)] == []


def test_the_import_rule_sees_what_it_forbids():
    upwards = "from holdfast.recovery import settle"
    assert forbidden_imports(parse(upwards))
    assert forbidden_imports(parse("def f():\n    import holdfast"))
    assert forbidden_imports(parse(f"if TYPE_CHECKING:\n    {upwards}"))
    assert forbidden_imports(parse("import holdfast", "holdfast.recovery.faults"))
    assert not forbidden_imports(parse("def f():\n    import holdfast", "holdfast.recovery.faults"))
    assert not forbidden_imports(parse("from holdfast.journal import Message"))


def test_no_module_or_test_imports_the_folders_by_their_bare_names():
    """An embedding program may have a history.py of its own, and would get that one."""
    tests = [
        Module(path.stem, path, ast.parse(path.read_text(encoding="utf-8")))
        for folder in ("tests", "benchmarks", "examples")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    bare = {"journal", "history", "recovery"}
    assert [
        (str(module.path), name)
        for module in [*MODULES, *tests]
        for name, _ in imports(module)
        if name.split(".")[0] in bare
    ] == []


def test_apsw_stays_in_the_engine_and_the_fault_kit():
    users = {m.name for m in MODULES if any(n.split(".")[0] == "apsw" for n, _ in imports(m))}
    assert {name for name in users if not in_engine(name)} <= APSW_TOO


def test_nothing_but_the_oracle_uses_another_sqlite():
    users = {m.name for m in MODULES if any(n.split(".")[0] == "sqlite3" for n, _ in imports(m))}
    assert users <= PLAIN_SQLITE


def in_engine(name: str) -> bool:
    return f"{name}.".startswith("holdfast.journal.engine.")


# --- SQL ----------------------------------------------------------------------------------------

SQL = re.compile(
    r"\bselect\s.+\sfrom\s|\binsert\s+(or\s+\w+\s+)?into\s|\bupdate\s+\S+\s+set\s|\bdelete\s+from\s"
    r"|\breplace\s+into\s|\bpragma\s+\w|\b(create|drop|alter)\s+(unique\s+)?(table|index|view|trigger)\b"
    r"|\bbegin\s+(immediate|exclusive|deferred)\b|^\s*(?-i:BEGIN|COMMIT|ROLLBACK|VACUUM|SAVEPOINT)\b",
    re.IGNORECASE | re.DOTALL,
)


def literals(module: Module) -> Iterator[str]:
    """Every text in the code; a docstring or a bare text is prose."""
    prose = {
        id(node.value)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(module.tree):
        match node:
            case ast.Constant(value=str() as text) if id(node) not in prose:
                yield text
            case ast.JoinedStr(values=values):
                yield "".join(v.value if isinstance(v, ast.Constant) else "?" for v in values)


def sql_in(module: Module) -> list[str]:
    return [f"{module.name}: {text[:60]!r}" for text in literals(module) if SQL.search(text)]


def test_all_sql_stands_in_the_engine():
    outside = [m for m in MODULES if not in_engine(m.name) and m.name not in PLAIN_SQLITE]
    assert [wrong for module in outside for wrong in sql_in(module)] == []


def test_the_sql_rule_sees_every_kind_of_statement():
    engine = "".join(text for m in MODULES if in_engine(m.name) for text in literals(m))
    assert SQL.search(engine)
    for statement in (
        "select a\n from b ",
        "INSERT INTO t VALUES (1)",
        "INSERT OR IGNORE INTO t VALUES (1)",
        "UPDATE t SET a = 1",
        "DELETE FROM t",
        "PRAGMA user_version",
        "CREATE TABLE t (a)",
        "create unique index i on t (a)",
        "BEGIN IMMEDIATE",
        "COMMIT",
    ):
        assert sql_in(parse(f"def f(db):\n    db.execute({statement!r})")), statement
    assert sql_in(parse("def f(db, t):\n    db.execute(f'DELETE FROM {t}')"))
    assert not sql_in(parse('"""Select one from many."""'))
    assert not sql_in(parse("reason = 'nothing was selected; commit() it first'"))


# --- plain file calls ---------------------------------------------------------------------------

READS_AND_WRITES = {"read_bytes", "read_text", "write_bytes", "write_text"}
COPIES = {"copy", "copy2", "copyfile", "copyfileobj", "copytree", "move", "truncate"}


def is_plain_file_call(call: ast.Call) -> bool:
    match call.func:
        case ast.Name(id="open"):
            return True
        case ast.Attribute(value=ast.Name(id="cls" | "self" | "agent"), attr="open"):
            return False
        case ast.Attribute(value=ast.Name(id="holdfast"), attr="open"):
            return False
        case ast.Attribute(value=ast.Name(id=owner), attr="open") if owner[0].isupper():
            return False  # A constructor of ours: SqliteEngine.open.
        case ast.Attribute(attr=attr) if attr == "open" or attr in READS_AND_WRITES:
            return True
        case ast.Attribute(value=ast.Name(id="shutil" | "os"), attr=attr):
            return attr in COPIES
        case _:
            return False


def plain_file_calls(module: Module) -> set[str]:
    place = "holdfast.journal.engine" if in_engine(module.name) else module.name
    return {
        f"{place}:{inside}"
        for node, inside in walk(module.tree)
        if isinstance(node, ast.Call) and is_plain_file_call(node)
    }


def test_no_code_opens_the_database_files_with_plain_file_calls():
    found = {place for module in MODULES for place in plain_file_calls(module)}
    assert found - set(PLAIN_FILE_CALLS) == set(), "say in PLAIN_FILE_CALLS which file this opens"


def test_the_list_of_plain_file_calls_has_no_stale_line():
    found = {place for module in MODULES for place in plain_file_calls(module)}
    assert set(PLAIN_FILE_CALLS) - found == set()


def test_the_file_rule_sees_what_it_forbids():
    for act in ("open(p)", "p.open('rb')", "p.read_bytes()", "os.open(p, 0)", "io.open(p)"):
        assert plain_file_calls(parse(f"def f(p):\n    {act}")), act
    assert not plain_file_calls(parse("def f(p):\n    StreamJournal.open(p)"))


# --- what a reader may expect -------------------------------------------------------------------


def public(node: ast.AST, prefix: str) -> Iterator[tuple[ast.AST, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if child.name.startswith("_"):
                continue
            yield child, f"{prefix}.{child.name}"
            if isinstance(child, ast.ClassDef):
                yield from public(child, f"{prefix}.{child.name}")
        elif isinstance(child, ast.If | ast.Try):
            yield from public(child, prefix)


def is_overload(node: ast.AST) -> bool:
    marks = getattr(node, "decorator_list", [])
    return any(isinstance(mark, ast.Name) and mark.id == "overload" for mark in marks)


def test_every_public_name_says_its_promise():
    silent = [m.name for m in MODULES if not ast.get_docstring(m.tree)]
    for module in MODULES:
        for node, name in public(module.tree, module.name):
            assert isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if not ast.get_docstring(node) and not is_overload(node):
                silent.append(name)
    assert silent == []


def test_every_public_function_is_typed():
    bare = []
    for module in MODULES:
        for node, name in public(module.tree, module.name):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            given += [extra for extra in (node.args.vararg, node.args.kwarg) if extra]
            untyped = [a.arg for a in given if not a.annotation and a.arg not in ("self", "cls")]
            if node.returns is None or untyped:
                bare.append((name, untyped))
    assert bare == []


def test_no_source_file_is_longer_than_one_idea():
    sources = [m.path for m in MODULES]
    sources += [p for folder in ("benchmarks", "examples") for p in (ROOT / folder).rglob("*.py")]
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in sources}
    assert {name: count for name, count in lengths.items() if count > LINES_MAX} == {}


# --- words that have no place here --------------------------------------------------------------

STRAY = {
    "a registry or its address": r"pypi\.org|pythonhosted|index-url|find-links|trusted-host",
    "a path of one machine": r"(?<![\w.])/(root|work|Users|opt)/\w",
    "a number that only a tracker knows": r"\b[Ii]ssues? #?\d|\bPR ?#?\d|(?<=\s)#\d+\b",
    "a document that is not here": r"\b(DESIGN|API|STYLE|FACTS|INVENTORY|CLAUDE|AGENTS)\.md\b",
    "a note to oneself": r"\b(TODO|FIXME|XXX|HACK)\b",
}
TEXTS = {".py", ".md", ".toml", ".cfg", ".ini", ".yml", ".yaml", ".sh", ".txt", ""}
# AGENTS.md is also a file of users' projects, and some texts quote it.
QUOTES = {"AGENTS.md"}


def project_files() -> Iterator[Path]:
    for path in sorted(ROOT.rglob("*")):
        inside = path.relative_to(ROOT)
        hidden = any(p.startswith(".") and p not in (".ci", ".gitignore") for p in inside.parts)
        made = {"__pycache__", "build", "dist", "holdfast.egg-info"} & set(inside.parts)
        if path.is_file() and path.suffix in TEXTS and not hidden and not made:
            yield path


@pytest.mark.parametrize("what", STRAY)
def test_the_project_speaks_of_itself_alone(what: str):
    pattern = re.compile(STRAY[what])
    assert [
        f"{path.relative_to(ROOT)}:{number}: {found.group()}"
        for path in project_files()
        if path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (found := pattern.search(line)) and found.group() not in QUOTES
    ] == []
