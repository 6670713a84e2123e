"""The two passes that need the model, recording and fidelity: with all weights in memory or read layer by layer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeprune.artifacts.plan import PrunePlan
from moeprune.artifacts.statistics import RoutingStatistics
from moeprune.evaluation.fidelity import compare_plans
from moeprune.evaluation.intervals import Comparison
from moeprune.evaluation.streamed import compare_streamed
from moeprune.experiment.console import progress, say
from moeprune.experiment.inputs import Inputs
from moeprune.recording.recorder import record
from moeprune.recording.streamed import record_streamed


def recorded(inputs: Inputs, partial: Path, key: str) -> RoutingStatistics:
    """Routing statistics of the inputs' calibration tokens; `partial` holds what is committed on the way."""
    options, tokens = inputs.config, inputs.calibration
    common: dict[str, Any] = {
        "batch_tokens": options.runtime.batch_tokens,
        "statistics": options.calibration.statistics,
        "partial": partial,
        "manifest": {
            "key": key,
            "model": {"path": options.model.path, "fingerprint": inputs.fingerprint},
            "calibration": options.calibration.model_dump(mode="json"),
            "warnings": list(tokens.warnings),
        },
    }
    if not inputs.streaming:
        model = inputs.loaded.model
        with progress("recording") as advance:
            return record(model, tokens, on_progress=advance, **common)
    say(f"record: {inputs.weight_bytes / 1e9:,.1f} GB of weights are read layer by layer")
    streamed, fingerprint = inputs.streamed, inputs.fingerprint
    with progress("recording") as advance:
        return record_streamed(streamed, tokens, fingerprint=fingerprint, on_progress=advance, **common)


def compared(inputs: Inputs, plans: Mapping[str, PrunePlan]) -> dict[str, Comparison]:
    """Label -> fidelity of every plan to the unpruned model, on the inputs' evaluation tokens."""
    tokens, size = inputs.evaluation, inputs.config.runtime.batch_tokens
    if not inputs.streaming:
        model = inputs.loaded.model
        with progress("evaluating") as advance:
            return compare_plans(model, plans, tokens, batch_tokens=size, on_progress=advance)
    streamed, fingerprint = inputs.streamed, inputs.fingerprint
    with progress("evaluating") as advance:
        return compare_streamed(
            streamed, plans, tokens, fingerprint=fingerprint, batch_tokens=size, on_progress=advance
        )


def unmeasured(inputs: Inputs) -> str:
    """Why a model that does not fit into memory was measured for fidelity alone."""
    return (
        "evaluation: tasks, loops, harness and speed generate token by token and need the model in memory, which takes "
        f"{inputs.weight_bytes / 1e9:,.1f} GB; they were not measured. Measure the pruned checkpoint where it fits"
    )
