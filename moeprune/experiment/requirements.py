"""What would stop a run, found before its first stage: nothing is recorded, and no directory is made, in vain."""

from collections.abc import Collection

from moeprune.artifacts.errors import InputError
from moeprune.experiment import compress_run
from moeprune.experiment.inputs import Inputs
from moeprune.selection.from_file import plan_from_file
from moeprune.selection.prune_set import PruneSetFile

ON_THE_SPOT = {"select", "dense"}  # stages whose requirements depend on the machine that does the work


def require(inputs: Inputs, left: Collection[str]) -> None:
    """Raises InputError for what would stop one of these stages, of inspected inputs; no weights are loaded for it."""
    if "select" in left and inputs.config.refine:
        require_refinable(inputs)
    if "prune" in left:
        require_one_count(inputs)
    if "dense" in left and inputs.config.dense:
        compress_run.require_compressible(inputs)
    if "evaluate" in left:
        require_ruler(inputs)


def require_refinable(inputs: Inputs) -> None:
    """Raises InputError where plans could not be measured, or could not lend one another their sets."""
    if inputs.config.selection.budget.scope == "global":
        raise InputError(
            "refine: plans of selection.budget.scope: global keep different numbers of experts in a layer, so one set "
            "cannot stand for the other; set scope: layer"
        )
    if not inputs.fits:
        raise InputError(
            "refine: plans are measured on the model in memory, and its weights do not fit; leave `refine` out, or run "
            "on a machine with more memory"
        )


def require_one_count(inputs: Inputs) -> None:
    """Raises InputError where a checkpoint is wanted of a plan that keeps other counts in other layers."""
    config, layers = inputs.config, inputs.layers
    if not config.checkpoint.save or len(layers) == 1:
        return
    criterion = config.selection.criterion
    if isinstance(criterion, PruneSetFile):
        plans, _ = plan_from_file(criterion, layers, config.selection)
        uneven, who = len({len(plan.kept) for plan in plans}) > 1, str(criterion.path)
    else:
        uneven, who = config.selection.budget.scope == "global", "selection.budget.scope: global"
    if uneven:
        memory = "" if config.dense else "set checkpoint.save=false to measure the plan in memory, or "
        raise InputError(
            f"{who} keeps different numbers of experts in {layers[0].name} .. {layers[-1].name}, and a checkpoint's "
            f"config holds one count for all; {memory}give every layer the same count (scope: layer)"
        )


def require_ruler(inputs: Inputs) -> None:
    """Raises InputError where the evaluation's data or questions cannot be read; what is read is kept."""
    _ = inputs.evaluation, inputs.questions
