"""`moeprune generate`: the unpruned model answers prompts, so that calibration can see the model's own behaviour."""

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moeprune.artifacts.errors import InputError
from moeprune.commands.arguments import Values, require_writable
from moeprune.config.load import validate
from moeprune.console import progress, say, warn
from moeprune.data.options import Domain
from moeprune.data.traces import Prompt, TraceOptions, TraceReport, load_prompts, write_traces
from moeprune.models.loading import (
    load_model,
    local_directory,
)
from moeprune.models.options import ModelOptions


class GenerateOptions(BaseModel):
    """What decides the words beside the model and the prompts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tools: Literal["reference", "none"] = "none"  # reference: calculator and lookup are offered and executed
    temperature: float = Field(default=0.7, ge=0, allow_inf_nan=False)  # 0: the most likely token
    seed: int = Field(default=0, ge=0, lt=2**63)
    max_new_tokens: int = Field(default=256, ge=1)  # of one turn
    turns: int = Field(default=5, ge=1)  # of the model, for one question


def generate_file(model: str, prompts: str, output: Path, *, options: Values) -> dict[str, Any]:
    """Write one trace a prompt into `output`; goes on where a killed call with the same options was.

    prompts: a path, or `reference:NAME`. Raises InputError before the model is loaded for anything that cannot work.
    """
    require_writable(output, ".jsonl")
    if output.exists():
        raise InputError(f"-o {output}: is there already; give another name or remove it")
    chosen = validate(GenerateOptions, dict(options), place="generate")
    directory = local_directory(ModelOptions(path=model))
    asked, warnings = load_prompts(Domain(name="prompts", path=prompts))
    say(f"generate: {len(asked):,} prompts of {prompts}")
    settings = {
        "model": model,
        "files": sorted((file.name, file.stat().st_size) for file in directory.iterdir() if file.is_file()),
        "prompts": _digest(asked),
        **chosen.model_dump(mode="json", exclude={"tools", "turns"}),
    }
    report = _answer(model, asked, output, chosen, settings)
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
    model: str, asked: Sequence[Prompt], output: Path, chosen: GenerateOptions, settings: Values
) -> TraceReport:
    from moeprune.evaluation.decoding import end_tokens, generate

    loaded = load_model(ModelOptions(path=model))
    end_ids = end_tokens(loaded.model, loaded.tokenizer)
    reply = partial(
        generate,
        loaded.model,
        max_new_tokens=chosen.max_new_tokens,
        end_ids=end_ids,
        temperature=chosen.temperature,
        seed=chosen.seed,
    )
    with progress("answering", unit="prompts") as advance:
        return write_traces(
            reply,
            loaded.tokenizer,
            asked,
            output,
            end_ids=end_ids,
            settings=settings,
            options=TraceOptions(tools=chosen.tools, turns=chosen.turns),
            on_progress=advance,
        )


def _digest(prompts: Sequence[Prompt]) -> str:
    """16 hex digits of everything that is asked."""
    return hashlib.sha256("\n".join(map(repr, prompts)).encode()).hexdigest()[:16]
