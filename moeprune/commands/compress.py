"""`moeprune compress`: dense weights alone, from a checkpoint to a checkpoint."""

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from moeprune.artifacts.errors import InputError
from moeprune.checkpoint.atomic_directory import Placement
from moeprune.checkpoint.options import Layout
from moeprune.config.load import read_yaml, validate
from moeprune.config.schema import CalibrationOptions, RuntimeOptions, Section
from moeprune.console import say, warn
from moeprune.data.options import Domain
from moeprune.data.trajectories import TokenSet, load_tokens
from moeprune.dense.compress import compress_checkpoint, need_data
from moeprune.dense.options import DenseOptions
from moeprune.models.loading import (
    load_tokenizer,
    local_directory,
)
from moeprune.models.options import ModelOptions
from moeprune.run.directory import commit

REFERENCE = Domain(name="agent", path="reference:agent", tokens=65536)


class WrittenOptions(Section):
    """`checkpoint:` of a compress config."""

    layout: Layout = "auto"


class CompressConfig(Section):
    """CONFIG of `moeprune compress`."""

    dense: tuple[DenseOptions, ...] = Field(min_length=1)
    calibration: CalibrationOptions | None = None
    checkpoint: WrittenOptions = WrittenOptions()
    runtime: RuntimeOptions = RuntimeOptions()

    @model_validator(mode="after")
    def _weights_are_here(self) -> "CompressConfig":
        if self.runtime.device_map is not None:
            raise ValueError("runtime.device_map is for pruning; what does not fit is read by runtime.streaming: on")
        return self


def compress_file(model: str, config: Path, output: Path, *, overwrite: bool) -> dict[str, Any]:
    """Write the checkpoint MODEL after the methods of CONFIG; resumes where a killed call was.

    Raises InputError before weights are loaded for a config, data or target that does not do.
    """
    value, lines = read_yaml(config)
    options = validate(CompressConfig, value, place=str(config), lines=lines)
    chosen = ModelOptions(path=model)
    source = local_directory(chosen)
    Placement(output, source=source, overwrite=overwrite)
    tokens = _tokens(options, model, source, config)
    report = compress_checkpoint(
        source,
        output,
        options.dense,
        tokens,
        dtype=chosen.dtype,
        device=options.runtime.device,
        batch_tokens=options.runtime.batch_tokens,
        layout=options.checkpoint.layout,
        streaming=options.runtime.streaming,
        overwrite=overwrite,
        provenance={"config": {"model": {"path": model}, **options.model_dump(mode="json")}, "commit": commit()},
    )
    warnings = [*(tokens.warnings if tokens is not None else ()), *report.warnings]
    for warning in warnings:
        warn(warning)
    say(
        f"dense: {report.bytes / 1e6:,.1f} of {report.bytes_base / 1e6:,.1f} MB; loaded again, "
        f"{report.reloaded.weights} weights equal"
    )
    return {"checkpoint": output, **report.as_json(), "warnings": warnings}


def _tokens(options: CompressConfig, model: str, source: Path, config: Path) -> TokenSet | None:
    """Calibration tokens; None where no method looks at data, whatever the config names."""
    hungry = need_data(options.dense)
    given = options.calibration
    if not hungry:
        if given is not None:
            warn("calibration is not read: no method of dense looks at data")
        return None
    if given is None or "domains" not in given.model_fields_set:
        if model != "reference":
            raise InputError(
                f"{config}: {', '.join(dict.fromkeys(hungry))} needs calibration data and the config names none; add "
                "calibration.domains, such as [{name: agent, path: traces.jsonl, tokens: 65536}]"
            )
        given = (given or CalibrationOptions()).model_copy(update={"domains": (REFERENCE,)})
    tokens = load_tokens(given.domains, load_tokenizer(source), given, part="all")
    say(f"calibration: {tokens.tokens:,} tokens of {', '.join(tokens.manifest)}")
    return tokens
