"""`moeprune compress`: dense weights alone, from a checkpoint to a checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeprune.artifacts.errors import InputError
from moeprune.commands.arguments import Checkpoint, Json, ModelPath, Overwrite, finish, start
from moeprune.console import say, warn

if TYPE_CHECKING:
    from moeprune.config.schema import CompressConfig
    from moeprune.data.trajectories import TokenSet

REFERENCE = {"name": "agent", "path": "reference:agent", "tokens": 65536}


def compress(
    model: ModelPath,
    config: Annotated[Path, typer.Argument(help="YAML with `dense:` and, if a method needs data, `calibration:`.")],
    output: Checkpoint,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """A checkpoint with sparse or quantised weights, of a MoE or of a dense model."""
    start(as_json)
    finish(compress_file(model, config, output, overwrite=overwrite), output, as_json=as_json)


def compress_file(model: str, config: Path, output: Path, *, overwrite: bool) -> dict[str, Any]:
    """Write the checkpoint MODEL after the methods of CONFIG; resumes where a killed call was.

    Raises InputError before weights are loaded for a config, data or target that does not do.
    """
    from moeprune.artifacts.run import commit
    from moeprune.checkpoint.atomic_directory import AtomicDirectory
    from moeprune.config.load import read_yaml, validate
    from moeprune.config.schema import CompressConfig
    from moeprune.dense.compress import compress_checkpoint
    from moeprune.models.loading import local_directory
    from moeprune.models.options import ModelOptions

    value, lines = read_yaml(config)
    options = validate(CompressConfig, value, place=str(config), lines=lines)
    chosen = ModelOptions(path=model)
    source = local_directory(chosen)
    AtomicDirectory(output, source=source, overwrite=overwrite)
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


def _tokens(options: "CompressConfig", model: str, source: Path, config: Path) -> "TokenSet | None":
    """Calibration tokens; None where no method looks at data, whatever the config names."""
    from moeprune.config.schema import CalibrationOptions
    from moeprune.data.options import Domain
    from moeprune.data.trajectories import load_tokens
    from moeprune.dense.compress import need_data
    from moeprune.models.loading import load_tokenizer

    methods = need_data(options.dense)
    given = options.calibration
    if not methods:
        if given is not None:
            warn("calibration is not read: no method of dense looks at data")
        return None
    if given is None or "domains" not in given.model_fields_set:
        if model != "reference":
            raise InputError(
                f"{config}: {', '.join(dict.fromkeys(methods))} needs calibration data and the config names none; add "
                "calibration.domains, such as [{name: agent, path: traces.jsonl, tokens: 65536}]"
            )
        given = (given or CalibrationOptions()).model_copy(update={"domains": (Domain.model_validate(REFERENCE),)})
    tokens = load_tokens(given.domains, load_tokenizer(source), given, part="all")
    say(f"calibration: {tokens.tokens:,} tokens of {', '.join(tokens.manifest)}")
    return tokens
