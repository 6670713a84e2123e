"""Prune experts from Mixture-of-Experts language models, and trust the result.

    import moeprune as mp

    loaded = mp.load_model(mp.ModelOptions(path="reference"))
    agent = mp.Domain(name="agent", path="reference:agent", tokens=16384)
    statistics = mp.record(loaded.model, mp.load_tokens([agent], loaded.tokenizer, part="calibration"))
    plan = mp.select(statistics, mp.SelectionOptions.parse({"criterion": {"name": "hope"}, "budget": {"prune": 0.5}}))
    heldout = mp.load_tokens([agent], loaded.tokenizer, part="heldout")
    print(mp.evaluate(loaded.model, {"hope": plan}, heldout)["hope"]["fidelity/kl/agent"])
    mp.prune(loaded.path, plan, "my-smaller-model")

Names are imported when they are used, so `import moeprune` stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moeprune.artifacts.errors import InputError as InputError
    from moeprune.artifacts.plan import LayerPlan as LayerPlan
    from moeprune.artifacts.plan import PrunePlan as PrunePlan
    from moeprune.artifacts.statistics import Layer as Layer
    from moeprune.artifacts.statistics import LayerStatistics as LayerStatistics
    from moeprune.artifacts.statistics import RoutingStatistics as RoutingStatistics
    from moeprune.checkpoint.prune import prune_checkpoint as prune  # noqa: F401
    from moeprune.data.options import Domain as Domain
    from moeprune.data.options import Intake as Intake
    from moeprune.data.trajectories import TokenSet as TokenSet
    from moeprune.data.trajectories import load_records as load_records
    from moeprune.data.trajectories import load_tokens as load_tokens
    from moeprune.evaluation.agent import agent_questions as agent_questions
    from moeprune.evaluation.agent import agent_task as agent_task
    from moeprune.evaluation.fidelity import fidelity as evaluate  # noqa: F401
    from moeprune.models.loading import ModelOptions as ModelOptions
    from moeprune.models.loading import load_model as load_model
    from moeprune.models.pruned import pruned as pruned
    from moeprune.recording.recorder import record as record
    from moeprune.report.draw_run import cluster_order as cluster_order
    from moeprune.report.results import jaccard as jaccard
    from moeprune.selection.criteria.hope import interaction as interaction
    from moeprune.selection.options import SelectionOptions as SelectionOptions
    from moeprune.selection.select import select as select

__version__ = "0.1.0"

_PLACES = {
    "InputError": ("moeprune.artifacts.errors", "InputError"),
    "LayerPlan": ("moeprune.artifacts.plan", "LayerPlan"),
    "PrunePlan": ("moeprune.artifacts.plan", "PrunePlan"),
    "Layer": ("moeprune.artifacts.statistics", "Layer"),
    "LayerStatistics": ("moeprune.artifacts.statistics", "LayerStatistics"),
    "RoutingStatistics": ("moeprune.artifacts.statistics", "RoutingStatistics"),
    "prune": ("moeprune.checkpoint.prune", "prune_checkpoint"),
    "Domain": ("moeprune.data.options", "Domain"),
    "Intake": ("moeprune.data.options", "Intake"),
    "TokenSet": ("moeprune.data.trajectories", "TokenSet"),
    "load_tokens": ("moeprune.data.trajectories", "load_tokens"),
    "load_records": ("moeprune.data.trajectories", "load_records"),
    "agent_questions": ("moeprune.evaluation.agent", "agent_questions"),
    "agent_task": ("moeprune.evaluation.agent", "agent_task"),
    "cluster_order": ("moeprune.report.draw_run", "cluster_order"),
    "jaccard": ("moeprune.report.results", "jaccard"),
    "interaction": ("moeprune.selection.criteria.hope", "interaction"),
    "evaluate": ("moeprune.evaluation.fidelity", "fidelity"),
    "ModelOptions": ("moeprune.models.options", "ModelOptions"),
    "load_model": ("moeprune.models.loading", "load_model"),
    "pruned": ("moeprune.models.pruned", "pruned"),
    "record": ("moeprune.recording.recorder", "record"),
    "SelectionOptions": ("moeprune.selection.options", "SelectionOptions"),
    "select": ("moeprune.selection.select", "select"),
}
__all__ = sorted(["__version__", *_PLACES])


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'moeprune' has no attribute {name!r}")
    module, attribute = _PLACES[name]
    return getattr(import_module(module), attribute)
