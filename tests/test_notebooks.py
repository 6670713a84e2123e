"""Every notebook runs from a clean kernel, shows what it made, and needs nothing but public names."""

import ast
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
MOST_BYTES = 300_000


def cells(path, kind="code"):
    return [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == kind]


def code(path):
    return "\n".join(
        line for cell in cells(path) for line in cell.source.splitlines() if not line.lstrip().startswith("%")
    )


def words(outputs):
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def test_there_are_three():
    assert [path.stem for path in NOTEBOOKS] == ["choosing-a-ratio", "interaction-matrix", "tour"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_uses_public_names_alone(path):
    for node in ast.walk(ast.parse(code(path))):
        if isinstance(node, ast.Import):
            assert [alias.name for alias in node.names if alias.name.startswith("moeprune.")] == []
        if isinstance(node, ast.ImportFrom):
            assert not (node.module or "").startswith("moeprune")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_committed_with_small_clean_outputs(path):
    assert path.stat().st_size < MOST_BYTES
    outputs = [output for cell in cells(path) for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert all(output.output_type in ("stream", "display_data") for output in outputs)
    assert all(output.name == "stdout" for output in outputs if output.output_type == "stream")
    assert "/home/" not in path.read_text()
    assert "site-packages" not in path.read_text()
    assert [cell.execution_count for cell in cells(path)] == list(range(1, len(cells(path)) + 1))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_and_says_the_same(path, tmp_path):
    notebook = nbformat.read(path, 4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert list(tmp_path.iterdir()) == []  # a notebook leaves nothing behind
    for told, again in zip(cells(path), (c for c in notebook.cells if c.cell_type == "code"), strict=True):
        drawn = [
            ["image/png" in o.get("data", {}) for o in c.outputs if o.output_type != "stream"] for c in (told, again)
        ]
        assert drawn[0] == drawn[1]
        # Figures in the last place may differ between processors, words and lines do not.
        assert [_letters(line) for line in words(told.outputs).splitlines()] == [
            _letters(line) for line in words(again.outputs).splitlines()
        ]


def _letters(line):
    return [word for word in line.split() if word.strip("[],:%").isalpha()]
