"""`moeprune generate`: the unpruned model answers prompts, so that calibration can see the model's own behaviour."""

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeprune.artifacts.errors import InputError
from moeprune.commands.arguments import Json, ModelPath, Values, finish, require_writable, start
from moeprune.console import progress, say, warn

if TYPE_CHECKING:
    from moeprune.config.schema import GenerateOptions
    from moeprune.data.traces import Prompt, TraceReport


def generate(
    model: ModelPath,
    prompts: Annotated[str, typer.Argument(help="A file or folder of prompts, or reference:agent.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The traces to write (.jsonl).")],
    tools: Annotated[str, typer.Option(help="reference (calculator and lookup, executed) or none.")] = "none",
    temperature: Annotated[float, typer.Option(help="0: the most likely token.")] = 0.7,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(help="Of one turn.")] = 256,
    turns: Annotated[int, typer.Option(help="Of the model, for one question.")] = 5,
    as_json: Json = False,
) -> None:
    """Trajectories of the model's own making, to calibrate on; a stopped call goes on where it was."""
    start(as_json)
    sampling = {"temperature": temperature, "seed": seed, "max_new_tokens": max_new_tokens}
    options = {"tools": tools, "turns": turns, **sampling}
    finish(generate_file(model, prompts, output, options=options), output, as_json=as_json)


def generate_file(model: str, prompts: str, output: Path, *, options: Values) -> dict[str, Any]:
    """Write one trace a prompt into `output`; goes on where a killed call with the same options was.

    prompts: a path, or `reference:NAME`. Raises InputError before the model is loaded for anything that cannot work.
    """
    require_writable(output, ".jsonl")
    if output.exists():
        raise InputError(f"-o {output}: is there already; give another name or remove it")
    from moeprune.config.load import validate
    from moeprune.config.schema import GenerateOptions
    from moeprune.data.options import Domain
    from moeprune.data.traces import load_prompts
    from moeprune.models.loading import local_directory
    from moeprune.models.options import ModelOptions

    chosen = validate(GenerateOptions, dict(options), place="generate")
    directory = local_directory(ModelOptions(path=model))
    questions, warnings = load_prompts(Domain(name="prompts", path=prompts))
    say(f"generate: {len(questions):,} prompts of {prompts}")
    settings = {
        "model": model,
        "files": sorted((file.name, file.stat().st_size) for file in directory.iterdir() if file.is_file()),
        "prompts": _digest(questions),
        **chosen.model_dump(mode="json", exclude={"tools", "turns"}),
    }
    report = _answer(model, questions, output, chosen, settings)
    if report.resumed:
        say(f"generate: {report.resumed:,} traces were there from a call that was stopped")
    say(f"generate: {report.traces:,} traces, {', '.join(f'{n:,} ended by {end}' for end, n in report.ends.items())}")
    warnings = [*warnings, *report.warnings]
    for warning in warnings:
        warn(warning)
    return {
        "traces": output,
        "count": report.traces,
        "resumed": report.resumed,
        "ends": dict(report.ends),
        "tokens": report.tokens,
        "warnings": warnings,
    }


def _answer(
    model: str, prompts: Sequence["Prompt"], output: Path, options: "GenerateOptions", settings: Values
) -> "TraceReport":
    from moeprune.data.traces import TraceOptions, write_traces
    from moeprune.evaluation import decoding
    from moeprune.models.loading import load_model
    from moeprune.models.options import ModelOptions

    loaded = load_model(ModelOptions(path=model))
    end_ids = decoding.end_tokens(loaded.model, loaded.tokenizer)
    reply = partial(
        decoding.generate,
        loaded.model,
        max_new_tokens=options.max_new_tokens,
        end_ids=end_ids,
        temperature=options.temperature,
        seed=options.seed,
    )
    with progress("answering", unit="prompts") as advance:
        return write_traces(
            reply,
            loaded.tokenizer,
            prompts,
            output,
            end_ids=end_ids,
            settings=settings,
            options=TraceOptions(tools=options.tools, turns=options.turns),
            on_progress=advance,
        )


def _digest(prompts: Sequence["Prompt"]) -> str:
    """16 hex digits of all prompts."""
    return hashlib.sha256("\n".join(map(repr, prompts)).encode()).hexdigest()[:16]
