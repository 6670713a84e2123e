"""The two passes that need the model, recording and fidelity: with all weights in memory or read layer by layer.

torchrun's processes share the recording; the others but the first leave when it is over.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.plan import PrunePlan
from moeprune.artifacts.statistics import RoutingStatistics
from moeprune.console import progress, say, speak
from moeprune.evaluation.fidelity import compare_plans
from moeprune.evaluation.fidelity_streamed import compare_streamed, compare_two_streamed
from moeprune.evaluation.intervals import Comparison
from moeprune.models.streaming.model import StreamedModel
from moeprune.recording.recorder import record
from moeprune.recording.streamed import record_streamed
from moeprune.run.opened import Inputs


def recorded(inputs: Inputs, partial: Path, key: str) -> RoutingStatistics:
    """Routing statistics of the inputs' calibration tokens; `partial` holds what is committed on the way."""
    options, tokens, team = inputs.config, inputs.calibration, inputs.team
    if team is not None and team.leads:  # one decides for all: how much memory is free may differ between them
        team.tell("order", json.dumps({"key": key, "streaming": inputs.streaming}))
    common: dict[str, Any] = {
        "batch_tokens": options.runtime.batch_tokens,
        "statistics": options.calibration.statistics,
        "partial": partial,
        "team": team,
        "manifest": {
            "key": key,
            "model": {"path": options.model.path, "fingerprint": inputs.fingerprint},
            "calibration": options.calibration.model_dump(mode="json"),
            "warnings": [*inputs.checkpoint.warnings, *tokens.warnings],
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


@contextmanager
def leading(inputs: Inputs) -> Iterator[None]:
    """Around the recording, whether it is made or reused: torchrun's other processes wait for the end of this."""
    team = inputs.team
    if team is None:
        yield
        return
    with team.together():
        yield
        team.dismiss()


@contextmanager
def telling(inputs: Inputs) -> Iterator[None]:
    """Around what the leader does before the recording: torchrun's other processes end with its error."""
    if inputs.team is None:
        yield
        return
    with inputs.team.telling():
        yield


def assist(inputs: Inputs, partial: Path, key: str) -> None:
    """What torchrun's other processes do: their share of the recording, if the leader records.

    Raises InputError when this process sees another model or other data than the leader.
    """
    team = inputs.team
    assert team is not None
    speak(quiet=True)
    with team.together():
        order = json.loads(team.wait_for("order"))
        if order is not None:
            if order["key"] != key:
                raise InputError(
                    f"rank {team.rank} would record {key}, rank 0 records {order['key']}: they see other models, data "
                    "or options; give all machines the same files"
                )
            inputs.streaming = order["streaming"]
            recorded(inputs, partial, key)
            team.wait_for("saved")
            shutil.rmtree(str(team.folder(partial)), ignore_errors=True)
        team.tell(f"left/{team.rank}")


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


def streamed_comparison(teacher: Inputs, student: StreamedModel) -> Comparison:
    """A checkpoint against its teacher, one layer of one of them in memory at a time."""
    tokens, size = teacher.evaluation, teacher.config.runtime.batch_tokens
    with progress("evaluating") as advance:
        return compare_two_streamed(teacher.streamed, student, tokens, batch_tokens=size, on_progress=advance)


def unmeasured(inputs: Inputs) -> str:
    """Why a model that is not loaded into memory was measured for fidelity alone."""
    if inputs.fits:
        return (
            "evaluation: with runtime.streaming: on and dense, fidelity alone is measured, layer by layer; tasks, "
            "code, loops, harness and speed need the model in memory, where it would fit: set streaming to auto"
        )
    return (
        "evaluation: tasks, code, loops, harness and speed generate token by token and need the model in memory, "
        f"which takes {inputs.weight_bytes / 1e9:,.1f} GB; they were not measured. Measure the checkpoint where it fits"
    )
