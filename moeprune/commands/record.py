"""`moeprune record`: one statistics file from a model and trajectories; resumes where a killed call was."""

from pathlib import Path
from typing import Annotated

import typer

from moeprune.artifacts.errors import InputError
from moeprune.commands.arguments import Json, ModelPath, finish, name_and_value, require_writable, start
from moeprune.console import say, warn


def record(
    model: ModelPath,
    domains: Annotated[list[str], typer.Argument(metavar="NAME=PATH...", help="Domains and their trajectories.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The statistics file to write (.safetensors).")],
    count: Annotated[str, typer.Option(help="Tokens that enter: all, assistant, completion, tool.")] = "all",
    tokens: Annotated[int | None, typer.Option(help="Tokens read of each domain.")] = None,
    sequence_length: Annotated[int, typer.Option()] = 512,
    overflow: Annotated[str, typer.Option(help="split, truncate or skip.")] = "split",
    batch_tokens: Annotated[int, typer.Option()] = 8192,
    statistics: Annotated[
        str, typer.Option(help="default, all (adds output_sum) or samples (adds a token sample too).")
    ] = "default",
    streaming: Annotated[str, typer.Option(help="auto, on or off.")] = "auto",
    as_json: Json = False,
) -> None:
    """Routing statistics of a model on trajectories."""
    start(as_json)
    require_writable(output, ".safetensors")
    from moeprune.artifacts.statistics import RoutingStatistics
    from moeprune.config.load import validate
    from moeprune.config.schema import RunConfig
    from moeprune.run.directory import stage_key
    from moeprune.run.requirements import require_model
    from moeprune.run.run_data import Inputs
    from moeprune.run.stages import partial_of, record_to
    from moeprune.run.team import assist, leading

    named = [
        {"name": name, "path": path, "count": count, "tokens": tokens} for name, path in map(name_and_value, domains)
    ]
    value = {
        "model": {"path": model},
        "calibration": {
            "sequence_length": sequence_length,
            "overflow": overflow,
            "statistics": statistics,
            "domains": named,
        },
        "runtime": {"batch_tokens": batch_tokens, "streaming": streaming},
    }
    config = validate(RunConfig, value, place="record")
    # Everything the user names is calibration: nothing is held out for an evaluation.
    evaluation = config.evaluation.model_copy(update={"domains": list(config.calibration.domains)})
    inputs = Inputs(config.model_copy(update={"evaluation": evaluation}))
    require_model(inputs)
    key = stage_key("record", inputs.model.identity, inputs.data.calibration_identity)
    if inputs.team is not None and not inputs.team.leads:
        assist(inputs, partial_of(output), key)
        raise SystemExit(0)
    with leading(inputs):
        if not output.is_file():
            record_to(output, inputs, key)
        elif RoutingStatistics.load(output).key == key:
            say(f"record: {output} already holds exactly this recording, reused")
        else:
            raise InputError(f"-o {output}: holds another recording; give another name, or remove the file")
    recorded = RoutingStatistics.load(output)
    for warning in recorded.manifest["warnings"]:
        warn(warning)
    entries = {name: recorded.manifest[name] for name in ("domains", "warnings")}
    finish({"statistics": output, "key": recorded.key, **entries}, output, as_json=as_json)
