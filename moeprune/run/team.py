"""Recording, in memory or layer by layer, by one process or by all that torchrun started.

Of torchrun's processes the first leads: the others record their share of the tokens and end there.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.statistics import RoutingStatistics
from moeprune.console import progress, say, speak
from moeprune.recording.recorder import record
from moeprune.recording.streamed import record_streamed
from moeprune.run.run_data import Inputs


def recorded(inputs: Inputs, partial: Path, key: str) -> RoutingStatistics:
    """Routing statistics of the calibration tokens; `partial` holds what is finished on the way."""
    config, model, tokens, team = inputs.config, inputs.model, inputs.data.calibration, inputs.team
    if team is not None and team.leads:  # one decides for all: how much memory is free may differ between them
        team.tell("order", json.dumps({"key": key, "streaming": model.streaming}))
    options: dict[str, Any] = {
        "batch_tokens": config.runtime.batch_tokens,
        "statistics": config.calibration.statistics,
        "partial": partial,
        "team": team,
        "manifest": {
            "key": key,
            "model": {"path": config.model.path, "fingerprint": model.fingerprint},
            "calibration": config.calibration.model_dump(mode="json"),
            "warnings": [*model.checkpoint.warnings, *tokens.warnings],
        },
    }
    if not model.streaming:
        whole = model.loaded.model
        with progress("recording") as advance:
            return record(whole, tokens, on_progress=advance, **options)
    say(f"record: {model.weight_bytes / 1e9:,.1f} GB of weights are read layer by layer")
    streamed = model.streamed
    with progress("recording") as advance:
        return record_streamed(streamed, tokens, fingerprint=model.fingerprint, on_progress=advance, **options)


@contextmanager
def leading(inputs: Inputs) -> Iterator[None]:
    """Around the recording, whether it is made or reused: torchrun's other processes wait until it ends."""
    team = inputs.team
    if team is None:
        yield
        return
    with team.together():
        yield
        team.dismiss()


def assist(inputs: Inputs, partial: Path, key: str) -> None:
    """The work of torchrun's other processes: their share of the recording, if the leader records.

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
            inputs.model.streaming = order["streaming"]
            recorded(inputs, partial, key)
            team.wait_for("saved")
            shutil.rmtree(str(team.folder(partial)), ignore_errors=True)
        team.tell(f"left/{team.rank}")
