"""The evaluate stage: the run's plan, or the checkpoint that `dense` made of it, and its baselines on held-out data."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moeprune.artifacts.files import read_json, save_metrics
from moeprune.artifacts.plan import PrunePlan
from moeprune.evaluation import measure as measures
from moeprune.evaluation.students import Student, pruned_students
from moeprune.models.loading import load_written
from moeprune.models.options import ModelOptions
from moeprune.models.streaming.model import open_streamed
from moeprune.run.directory import Run, stage_key
from moeprune.run.run_data import Inputs
from moeprune.run.stages import OWN, SIZES, Entry, stage


def evaluation_key(inputs: Inputs, plans: Mapping[str, PrunePlan], checkpoint: Entry) -> str:
    kept = [plan.model_dump(mode="json", include={"layers"}) for plan in plans.values()]
    compressed = [checkpoint["key"]] if inputs.config.dense else []
    read = (inputs.model.identity, inputs.data.evaluation_identity, inputs.config.calibration)
    return stage_key("evaluate", *read, kept, *compressed)


def evaluate_stage(
    run: Run,
    inputs: Inputs,
    plans: Mapping[str, PrunePlan],
    checkpoint: Entry,
    *,
    measuring: Callable[[Inputs, Mapping[str, PrunePlan]], measures.Measured] | None = None,
) -> dict[str, float]:
    """metrics.json: the run's plan and its baselines against the unpruned model, on held-out data.

    checkpoint: the entry of the stage that made the checkpoint (prune or dense), with its sizes and own metrics.
    measuring: where the measurements come from (default: `measure`); a grid measures several runs at once.
    """
    path = run.directory / "metrics.json"

    def work() -> tuple[Entry, list[str]]:
        measured, warnings = (measuring or measure)(inputs, plans)
        metrics = dict(measured[OWN])
        for label, values in measured.items():
            if label != OWN:
                metrics |= {f"baseline/{label}/{name}": value for name, value in values.items()}
        metrics |= {f"size/{name.replace('_', '/')}": checkpoint[name] for name in SIZES}
        metrics |= checkpoint.get("counts", {})
        stability = [layer.stability["jaccard"] for layer in plans[OWN].layers if layer.stability]
        if stability:
            metrics["stability/jaccard"] = sum(stability) / len(stability)
        save_metrics(path, metrics)
        return {"metrics": "metrics.json", "recorded": inputs.data.recorded}, warnings

    stage(run, "evaluate", evaluation_key(inputs, plans, checkpoint), work)
    return dict(read_json(path))


def measure(inputs: Inputs, plans: Mapping[str, PrunePlan], written: Path | None = None) -> measures.Measured:
    """Label -> metrics of every plan, all measured on the same tokens and questions; and what readers must know.

    written: the run's checkpoint where `dense` made it; it is measured as it loads, in place of the run's own plan.
    """
    model, data, options = inputs.model, inputs.data, inputs.config.evaluation
    teacher: Any = model.streamed if model.streaming else model.loaded.model
    students = pruned_students(teacher, plans)
    if written is not None:
        students[OWN] = Student(_opened_again(inputs, written, teacher))
    comparisons = measures.compared(
        teacher,
        students,
        data.evaluation,
        fingerprint=model.fingerprint,
        batch_tokens=inputs.config.runtime.batch_tokens,
    )
    in_memory = options.needs_generation and (model.fits if written is None else not model.streaming)
    if in_memory and model.streaming:
        students = pruned_students(model.loaded.model, plans)
    metrics, warnings = measures.measure(
        comparisons,
        data.evaluation,
        options,
        loaded=model.loaded if in_memory else None,
        students=students,
        questions=data.questions,
    )
    if options.needs_generation and not in_memory:
        warnings.append(_fidelity_alone(inputs))
    if in_memory and options.speed and written is not None:
        warnings.append("speed: transformers unpacks compressed weights, so speed and memory are those of plain ones")
    return metrics, warnings


def _opened_again(inputs: Inputs, directory: Path, teacher: Any) -> Any:
    """The checkpoint in the way the teacher is open: in memory, or with its weights on disk."""
    if not inputs.model.streaming:
        return load_written(directory, like=teacher)
    options = ModelOptions(path=str(directory), dtype=inputs.config.model.dtype)
    return open_streamed(options, device=inputs.config.runtime.device, rounded=True)


def _fidelity_alone(inputs: Inputs) -> str:
    """Why a model that is not loaded into memory was measured for fidelity alone."""
    if inputs.model.fits:
        return (
            "evaluation: with runtime.streaming: on and dense, fidelity alone is measured, layer by layer; tasks, "
            "code, loops, harness and speed need the model in memory, where it would fit: set streaming to auto"
        )
    return (
        "evaluation: tasks, code, loops, harness and speed generate token by token and need the model in memory, "
        f"which takes {inputs.model.weight_bytes / 1e9:,.1f} GB; they were not measured. Measure the checkpoint where "
        "it fits"
    )
