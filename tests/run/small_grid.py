"""A grid of four small runs of the reference model, and what identifies its results."""

from pathlib import Path

BASE = """
calibration: {domains: [{name: agent, path: 'reference:agent', tokens: 3000}]}
checkpoint: {save: false}
evaluation: {domains: [{name: agent, path: 'reference:agent', tokens: 1500}]}
tracking: {wandb: disabled}
"""
AXES = """
base: base.yaml
axes:
  method:
    hope: {selection: {criterion: {name: hope, product: outputs}}}
    reap: {selection: {criterion: {name: reap}}}
  ratio:
    p25: {selection: {budget: {prune: 0.25}}}
    p50: {selection: {budget: {prune: 0.5}}}
"""


def write_grid(folder: Path) -> Path:
    """grid.yaml in the folder, beside its base.yaml."""
    (folder / "base.yaml").write_text(BASE)
    path = folder / "grid.yaml"
    path.write_text(AXES)
    return path


def results(directory: Path) -> dict[str, bytes]:
    """Plan and metrics of every run of a grid, to the byte."""
    return {
        f"{run.name}/{name}": (run / name).read_bytes()
        for run in sorted(directory.iterdir())
        if (run / "run.json").is_file()
        for name in ("plan.json", "metrics.json")
    }
