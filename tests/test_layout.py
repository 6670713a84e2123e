"""The house rules, read off the source: who may import whom, what stays light, what a clone holds."""

import ast
import fnmatch
import graphlib
import gzip
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from safetensors import safe_open

import moeprune
from moeprune.reference import DATA_DIR, DOMAINS, HERE, MODEL_DIR

PACKAGE = Path(moeprune.__file__).parent
ROOT = PACKAGE.parent
FILES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# A room may import itself, the rooms named here, and moeprune.reference. A dotted name admits one module of a room.
BELOW = {"models", "data", "artifacts", "console"}
WORK = {"recording", "selection", "checkpoint", "dense", "evaluation", "serving"}
OPTIONS = {f"{room}.options" for room in BELOW | WORK} | {"selection.criteria.table", "selection.solvers.table"}
MAY_IMPORT = {
    "artifacts": set(),
    "console": {"artifacts"},
    "reference": set(),
    "models": {"artifacts"},
    "data": {"artifacts"},
    "selection": {"artifacts"},
    "recording": BELOW,
    "checkpoint": BELOW,
    "evaluation": BELOW,
    "serving": BELOW,
    "dense": BELOW | {"checkpoint"},
    "config": OPTIONS | {"artifacts.errors"},
    "report": {"artifacts", "selection"},
    "run": BELOW | WORK | {"config", "report"},
    "commands": BELOW | WORK | {"config", "run", "report"},
    "cli": {"artifacts", "console", "commands"},
    "__main__": {"cli"},
    "__init__": BELOW | WORK | {"run", "report", "commands"},
}
MOST_LINES, LEAST_LINES, MOST_FILES = 300, 30, 30
SHORT_BY_NATURE = (
    "*/__init__.py",
    "__main__.py",
    "*/options.py",
    "*/table.py",
    "serving/scripts/*",
    "artifacts/errors.py",
)
SELECTION_MAY_IMPORT = {"numpy", "scipy", "cvxpy", "osqp", "scs", "pydantic"}
HEAVY = {"torch", "transformers", "cvxpy", "wandb", "datasets", "matplotlib"}
TOP_LEVEL = {
    *("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"),
    *("moeprune", "configs", "experiments", "notebooks", "tests"),
}


def imported(path: Path) -> set[str]:
    """Dotted names of everything a file imports, at its top or inside a function; `from a import b` gives a.b."""
    package = ("moeprune", *path.relative_to(PACKAGE).with_suffix("").parts)[:-1]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = [*package[: len(package) + 1 - node.level], node.module] if node.level else [node.module]
            names |= {".".join(filter(None, [*source, alias.name])) for alias in node.names}
    return names


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def module_of(path: Path) -> str:
    parts = ("moeprune", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.AST) -> set[str]:
    """Names with one underscore that a test takes from the package: imported, as an attribute, or patched by name."""
    ours, names = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            source = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                if (source or alias.name).partition(".")[0] == "moeprune":
                    ours.add(alias.asname or alias.name.partition(".")[0])
                    names |= {alias.name} if private(alias.name) else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            names |= {node.attr} if isinstance(root, ast.Name) and root.id in ours else set()
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            words = [word.value for word in node.args[:2] if isinstance(word, ast.Constant)]
            names |= {str(word) for word in words if private(str(word).rpartition(".")[2])}
    return names


def breaks_the_rule(room: str, name: str) -> bool:
    """Whether a file of the room may not import this name of the package."""
    _, _, inside = name.partition("moeprune.")
    target = inside.split(".")[0]
    if target in (room, "reference", "__version__"):
        return False
    allowed = MAY_IMPORT[room]
    return not (target in allowed or any(f"{inside}.".startswith(f"{module}.") for module in allowed))


def modules_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after the statement."""
    code = f"{statement}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def lines_of(domain: str, part: str) -> list[bytes]:
    return gzip.decompress((DATA_DIR / f"{domain}.{part}.jsonl.gz").read_bytes()).splitlines()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    wrong = [name for name in imported(path) if name.startswith("moeprune.") and breaks_the_rule(room_of(path), name)]
    assert not wrong


@pytest.mark.parametrize(
    ("room", "name"),
    [
        ("selection", "moeprune.models.layers"),
        ("models", "moeprune.data.trajectories"),
        ("artifacts", "moeprune.selection"),
        ("models", "moeprune.checkpoint.prune"),
        ("recording", "moeprune.run.directory"),
        ("config", "moeprune.run.pipeline"),
        ("evaluation", "moeprune.record"),
    ],
)
def test_the_rule_catches_an_import_that_points_up(room, name):
    assert breaks_the_rule(room, name)


def test_selection_needs_no_model_code():
    allowed = SELECTION_MAY_IMPORT | set(sys.stdlib_module_names) | {"moeprune"}
    for path in (PACKAGE / "selection").rglob("*.py"):
        foreign = {name.partition(".")[0] for name in imported(path)} - allowed
        assert not foreign, f"{path}: {foreign}"
    assert not modules_after("import moeprune.selection.select") & (HEAVY - {"cvxpy"})


REPORTS = ("moeprune.report.run_report", "moeprune.report.grid_report")


@pytest.mark.parametrize("module", ["moeprune", "moeprune.cli", "moeprune.config.schema", *REPORTS])
def test_importing_it_is_light(module):
    assert not modules_after(f"import {module}") & HEAVY


def test_no_files_import_each_other_in_a_circle():
    """Imports inside functions and under TYPE_CHECKING count too: a circle is hard to read wherever it is written."""
    modules = {module_of(path): path for path in FILES}
    graph = {
        own: {name if name in modules else name.rpartition(".")[0] for name in imported(path)} & modules.keys() - {own}
        for own, path in modules.items()
    }
    list(graphlib.TopologicalSorter(graph).static_order())


def test_a_name_is_used_once():
    places = defaultdict(list)
    for path in FILES:
        if room_of(path) != "commands" and path.stem not in {"__init__", "options", "table"}:
            places[path.name].append(path.relative_to(PACKAGE).as_posix())
    assert not [paths for paths in places.values() if len(paths) > 1]


def test_no_file_or_folder_is_too_long_or_too_short():
    wrong = set()
    for path in FILES:
        here, lines = path.relative_to(PACKAGE).as_posix(), len(path.read_text().splitlines())
        short = lines < LEAST_LINES and not any(fnmatch.fnmatch(f"/{here}", f"*/{form}") for form in SHORT_BY_NATURE)
        wrong |= {here} if short or lines > MOST_LINES else set()
    assert not wrong
    assert all(len(list(folder.glob("*.py"))) <= MOST_FILES for folder in {path.parent for path in FILES})


def test_no_test_reaches_a_private_name():
    tests = {path.relative_to(ROOT).as_posix(): private_names(ast.parse(path.read_text())) for path in TESTS}
    assert not {file: names for file, names in tests.items() if names}


@pytest.mark.parametrize(
    "text",
    [
        "from moeprune.run.stages import _lost",
        "from moeprune.run import stages\nstages._lost(1)",
        "import moeprune.run.stages\nmoeprune.run.stages._lost(1)",
        "from moeprune.run import stages\nmonkeypatch.setattr(stages, '_lost', None)",
        "monkeypatch.setattr('moeprune.run.stages._lost', None)",
    ],
)
def test_the_rule_catches_a_private_name(text):
    assert private_names(ast.parse(text))


def test_no_module_is_a_drawer():
    assert not [path for path in FILES if path.stem in {"utils", "helpers", "base", "common"}]


def test_the_top_level_holds_what_the_design_lists():
    patterns = [line.strip().strip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line.strip()]
    names = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    extra = {name for name in names - TOP_LEVEL if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)}
    assert not extra


def test_the_reference_model_is_complete():
    names = {path.name for path in MODEL_DIR.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "chat_template.jinja"} <= names
    assert {"tokenizer.json", "tokenizer_config.json"} <= names
    assert (HERE / "README.md").stat().st_size > 1000
    assert {path.name for path in (HERE / "licenses").iterdir()} == {"PSF-2.0.txt", "PostgreSQL.txt", "freeglut.txt"}
    with safe_open(MODEL_DIR / "model.safetensors", "np") as weights:
        assert sum(".mlp.experts." in name for name in weights.keys()) == 4 * 32 * 3  # noqa: SIM118


@pytest.mark.parametrize("part", ["calibration", "heldout"])
@pytest.mark.parametrize("domain", DOMAINS)
def test_the_reference_data_are_complete(domain, part):
    records = [json.loads(line) for line in lines_of(domain, part)]
    keys = {"messages", "tools"} if domain == "agent" else {"text", "source", "name"}
    assert len(records) >= 5
    assert all(set(record) == keys for record in records)


def test_no_held_out_record_is_a_calibration_record():
    for domain in DOMAINS:
        assert not set(lines_of(domain, "calibration")) & set(lines_of(domain, "heldout")), domain
