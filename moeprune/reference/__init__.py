"""The embedded reference MoE, its text of six domains and its agent trajectories; see README.md beside this file."""

from pathlib import Path

HERE = Path(__file__).parent
MODEL_DIR = HERE / "model"
DATA_DIR = HERE / "data"
DOMAINS = ("prose", "python", "c", "json", "math", "agent")


def named(path: Path) -> Path:
    """The embedded model's directory where `path` is its name, `reference`, and nothing of that name lies there."""
    return MODEL_DIR if str(path) == "reference" and not path.exists() else path
