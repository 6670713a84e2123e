"""Checks that fail before the first stage, so that nothing expensive runs in vain and no directory is made."""

import math
import os
from collections.abc import Collection

from moeprune.artifacts.errors import InputError
from moeprune.config.schema import RunConfig
from moeprune.run.dense_stage import require_compressible
from moeprune.run.run_data import Inputs
from moeprune.run.select_stage import require_refinable
from moeprune.selection.budget import check_budget
from moeprune.selection.criteria.outside import Custom, PruneSetFile
from moeprune.selection.given_plan import plan_from_file


def require_model(inputs: Inputs) -> None:
    """Raises InputError for a model that cannot be pruned, before data is read or weights are loaded."""
    assert inputs.model.layers
    _require_device_map(inputs)


def require_config(inputs: Inputs) -> None:
    """Raises InputError for a model, a budget or a measure that cannot work, before data is read or weights loaded."""
    config, layers = inputs.config, inputs.model.layers
    check_budget(layers, config.selection.budget)
    for criterion in config.criteria:
        if isinstance(criterion, PruneSetFile):
            plan_from_file(criterion, layers, config.selection)
        elif isinstance(criterion, Custom):
            criterion.build()
    _require_mix(config)
    _require_device_map(inputs)
    if config.evaluation.harness:
        from moeprune.evaluation.harness import require_tasks

        require_tasks(config.evaluation.harness)
    if config.evaluation.code is not None:
        from moeprune.evaluation.code import require_code

        require_code(config.evaluation.code)


def require_stages(inputs: Inputs, stages: Collection[str]) -> None:
    """Raises InputError for what would stop one of these stages of a config that works; no weights are loaded."""
    if "select" in stages and inputs.config.refine:
        require_refinable(inputs)
    if "prune" in stages:
        _require_one_count(inputs)
    if "dense" in stages and inputs.config.dense:
        require_compressible(inputs)
    if "evaluate" in stages:
        _ = inputs.data.evaluation, inputs.data.questions  # read now, and kept


def _require_one_count(inputs: Inputs) -> None:
    """Raises InputError where a checkpoint is wanted of a plan that keeps other counts in other layers."""
    config, layers = inputs.config, inputs.model.layers
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


def _require_device_map(inputs: Inputs) -> None:
    config = inputs.config
    device_map, folder = config.runtime.device_map, config.runtime.offload_folder
    if device_map is None:
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            "runtime.device_map: torchrun's processes would each spread the model over all devices; start one "
            "process, or leave device_map out"
        )
    if config.dense:
        raise InputError(
            "runtime.device_map: dense methods change weights in place, and a spread model has some elsewhere; "
            "leave device_map out: runtime.streaming=on reads what does not fit layer by layer"
        )
    if config.evaluation.harness or config.evaluation.speed:
        raise InputError(
            "runtime.device_map: evaluation.harness and evaluation.speed are for a model on one device; set them "
            "to [] and false, or leave device_map out"
        )
    from moeprune.models.device_map import require_device_map, resolved
    from moeprune.models.layers import require_movable

    require_device_map(device_map, folder)
    if not isinstance(device_map, str):
        model = inputs.model.checkpoint.memory.model
        require_movable(model, resolved(model, device_map))


def _require_mix(config: RunConfig) -> None:
    mix, domains = config.selection.mix, [domain.name for domain in config.calibration.domains]
    for name, weight in mix.items():
        if name not in domains:
            raise InputError(f"selection.mix: unknown domain {name!r}; calibration.domains has {', '.join(domains)}")
        if not math.isfinite(weight) or weight < 0:
            raise InputError(f"selection.mix.{name}: {weight} is not a weight; give a finite number >= 0")
    if not any(mix.get(name, 1.0) for name in domains):
        raise InputError("selection.mix: every domain has weight 0; give at least one a weight above 0")
