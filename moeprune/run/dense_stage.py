"""`dense:` in a run: the pruned model is compressed into the run's one checkpoint and measured as it loads again.

Experts go first: the prune stage writes `pruned/`, the dense stage makes `checkpoint/` of it and removes it. What is
measured is the checkpoint as stock transformers loads it, so float8 layers also round what comes in.
"""

import shutil
from dataclasses import asdict
from pathlib import Path

import torch

from moeprune.artifacts.plan import PrunePlan
from moeprune.config.schema import RunConfig
from moeprune.console import say
from moeprune.dense.compress import compress_checkpoint, need_data, require_plain
from moeprune.run.directory import Run, stage_key
from moeprune.run.run_data import Inputs
from moeprune.run.stages import PRUNED, Entry, stage, write_pruned


def dense_key(inputs: Inputs, plan: PrunePlan) -> str:
    """Key of the compressed checkpoint. Calibration data enter it only where a method reads them."""
    config = inputs.config
    data = inputs.data.calibration_identity if need_data(config.dense) else None
    layers = plan.model_dump(mode="json", include={"layers"})
    return stage_key("dense", inputs.model.identity, data, config.checkpoint, list(config.dense), layers)


def require_compressible(inputs: Inputs) -> None:
    """Raises InputError for targets, orders and formats that would be refused after the experts are pruned.

    Reads one block of each kind, no more.
    """
    from moeprune.dense.drivers import foreseen_export

    require_plain(inputs.model.checkpoint)
    config, model = inputs.config, inputs.model
    foreseen_export(model.streamed, model.checkpoint, config.dense, layout=config.checkpoint.layout)
    if model.device_type == "cuda":
        torch.cuda.empty_cache()  # memory that torch caches does not count as free when the next check asks what fits


def dense_stage(run: Run, inputs: Inputs, plan: PrunePlan, sizes: Entry) -> Entry:
    """The run's checkpoint: the pruned model with its weights compressed; `pruned/` is removed afterwards."""
    config = run.config
    source = run.directory / PRUNED

    def work() -> tuple[Entry, list[str]]:
        if not source.is_dir():  # an earlier call was stopped after removing it, or this stage is done again
            write_pruned(run, inputs, plan, source)
        tokens = inputs.data.calibration if need_data(config.dense) else None
        report = compress_checkpoint(
            source,
            run.directory / "checkpoint",
            config.dense,
            tokens,
            dtype=config.model.dtype,
            device=config.runtime.device,
            batch_tokens=config.runtime.batch_tokens,
            layout=config.checkpoint.layout,
            streaming=config.runtime.streaming,
            overwrite=True,  # the run's own directory
            provenance={"config": config.model_dump(mode="json"), "commit": run.record.commit},
        )
        _discard(source)
        say(f"dense: {report.bytes / 1e6:,.1f} of {sizes['bytes_base'] / 1e6:,.1f} MB")
        record = report.as_json()["dense"]
        rows = [list(row.values()) for row in record["coverage"]]
        run.tracker.table("dense", ["role", "methods", "weights", "parameters", "example"], rows)
        entry = {"checkpoint": "checkpoint", "parameters": sizes["parameters"], "bytes": report.bytes}
        entry |= {name: sizes[name] for name in ("parameters_base", "bytes_base")}
        # Not `metrics`: in an entry that names the file of the evaluate stage.
        entry |= {"coverage": record["coverage"], "counts": record["metrics"]}
        return {**entry, "reloaded": asdict(report.reloaded)}, [*unmixed(config), *report.warnings]

    return stage(run, "dense", dense_key(inputs, plan), work)


def _discard(directory: Path) -> None:
    """Remove a directory; a call that is killed here leaves it whole or absent, never half of it under its name."""
    hidden = directory.with_name(f".{directory.name}.gone")
    shutil.rmtree(hidden, ignore_errors=True)
    directory.rename(hidden)
    shutil.rmtree(hidden)


def unmixed(config: RunConfig) -> list[str]:
    """A warning where a mix is set: for dense weights all calibration tokens count the same."""
    if not need_data(config.dense) or len({*config.selection.mix.values(), 1.0}) == 1:
        return []
    return [
        "dense: selection.mix decides about experts only; for dense weights every calibration token counts the same. "
        "Give a domain more tokens to give it more weight there"
    ]
