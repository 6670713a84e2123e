"""`dense:` in a run: the pruned model is compressed into the run's one checkpoint and measured as it loads again.

Experts go first: the prune stage writes `pruned/`, the dense stage makes `checkpoint/` of it and removes it. What is
measured is the checkpoint as stock transformers loads it, so float8 layers also round what comes in.
"""

import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from moeprune.artifacts.plan import PrunePlan
from moeprune.config.schema import RunConfig
from moeprune.console import progress, say
from moeprune.dense.compress import compress_checkpoint, need_data, require_plain
from moeprune.evaluation.agent import (
    OPEN_PROMPTS,
    OPEN_TOKENS,
    PROMPT_TOKENS,
    accuracy_metrics,
    agent_answers,
    agent_task,
    loop_metrics,
    loop_rate,
    open_outputs,
)
from moeprune.evaluation.code import code_metrics, code_task, code_warnings, solved
from moeprune.evaluation.decoding import end_tokens
from moeprune.evaluation.fidelity import bounded_batch_tokens, compare, logits_of, pruned_logits
from moeprune.evaluation.intervals import base_metrics
from moeprune.evaluation.loops import open_prompts
from moeprune.evaluation.options import CodeOptions
from moeprune.models.loading import (
    unpacked,
    without_bars,
)
from moeprune.models.options import ModelOptions
from moeprune.models.pruned import pruned
from moeprune.models.streaming.model import open_streamed
from moeprune.run.directory import Run, stage_key
from moeprune.run.opened import Inputs
from moeprune.run.stages import OWN, PRUNED, Entry, Measured, merge, stage, write_pruned
from moeprune.run.team import compared, streamed_comparison, unmeasured


def dense_key(inputs: Inputs, plan: PrunePlan) -> str:
    """Of the compressed checkpoint. Calibration enters only where a method looks at it."""
    config = inputs.config
    data = inputs.calibration_identity if need_data(config.dense) else None
    layers = plan.model_dump(mode="json", include={"layers"})
    return stage_key("dense", inputs.model_identity, data, config.checkpoint, list(config.dense), layers)


def require_compressible(inputs: Inputs) -> None:
    """Raises InputError for targets, orders and formats that would be refused when the experts are gone.

    One block of each kind is read for it, no more.
    """
    from moeprune.dense.drivers import foreseen_export

    require_plain(inputs.checkpoint)
    foreseen_export(inputs.streamed, inputs.checkpoint, inputs.config.dense, layout=inputs.config.checkpoint.layout)
    if inputs.device_type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps for itself is not free to those who ask what fits


def dense_stage(run: Run, inputs: Inputs, plan: PrunePlan, sizes: Entry) -> Entry:
    """The run's checkpoint: the pruned model with its weights compressed; `pruned/` is gone afterwards."""
    config = run.config
    source = run.directory / PRUNED

    def work() -> tuple[Entry, list[str]]:
        if not source.is_dir():  # an earlier call was stopped after removing it, or this stage is done again
            write_pruned(run, inputs, plan, source)
        tokens = inputs.calibration if need_data(config.dense) else None
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
        told = report.as_json()
        rows = [list(row.values()) for row in told["dense"]["coverage"]]
        run.tracker.table("dense", ["role", "methods", "weights", "parameters", "example"], rows)
        entry = {"checkpoint": "checkpoint", "parameters": sizes["parameters"], "bytes": report.bytes}
        entry |= {name: sizes[name] for name in ("parameters_base", "bytes_base")}
        # Not `metrics`: in an entry that names the file of the evaluate stage.
        entry |= {"coverage": told["dense"]["coverage"], "counts": told["dense"]["metrics"]}
        return {**entry, "reloaded": asdict(report.reloaded)}, [*unmixed(config), *report.warnings]

    return stage(run, "dense", dense_key(inputs, plan), work)


def _discard(directory: Path) -> None:
    """Remove a directory; a call that is killed here leaves it whole or absent, never half of it under its name."""
    gone = directory.with_name(f".{directory.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    directory.rename(gone)
    shutil.rmtree(gone)


def unmixed(config: RunConfig) -> list[str]:
    """What to say where a mix was asked for: weights learn from tokens as they come."""
    if not need_data(config.dense) or len({*config.selection.mix.values(), 1.0}) == 1:
        return []
    return [
        "dense: selection.mix decides about experts only; for dense weights every calibration token counts the same. "
        "Give a domain more tokens to give it more weight there"
    ]


def measure_written(inputs: Inputs, plans: Mapping[str, PrunePlan], directory: Path) -> Measured:
    """Like `stages.measure`, but the run's own model is the checkpoint in `directory`; baselines only lose experts."""
    if inputs.streaming:
        return _measure_streamed(inputs, plans, directory)
    options, tokens = inputs.config.evaluation, inputs.evaluation
    teacher, tokenizer = inputs.loaded.model, inputs.loaded.tokenizer
    student = load_written(directory, like=teacher)
    others = {label: plan for label, plan in plans.items() if label != OWN}
    logits = {OWN: logits_of(student)} | {label: pruned_logits(teacher, plan) for label, plan in others.items()}
    size = bounded_batch_tokens(teacher, inputs.config.runtime.batch_tokens)
    with progress("evaluating") as advance:
        comparisons = compare(logits_of(teacher), logits, tokens, batch_tokens=size, on_progress=advance)
    metrics = {label: comparison.metrics() for label, comparison in comparisons.items()}
    warnings = [*tokens.warnings, *comparisons[OWN].warnings]
    for task in options.tasks:
        say(f"evaluate: task {task}")
        questions, told = inputs.questions[task]
        warnings += told
        base = agent_answers(teacher, tokenizer, questions)
        own = accuracy_metrics(task, agent_answers(student, tokenizer, questions), base)
        merge(metrics, {OWN: own} | agent_task(teacher, tokenizer, questions, others, name=task, base=base))
    if options.code is not None:
        say(f"evaluate: programs of {options.code.problems}")
        merge(metrics, _programs(options.code, inputs, student, others))
        warnings += code_warnings(options.code)
    if options.loops:
        say("evaluate: loop rate")
        merge(metrics, _loops(inputs, student, others))
    if options.harness:
        say(f"evaluate: lm-eval {', '.join(options.harness)}")
        merge(metrics, _harness(inputs, student, others))
    if options.speed:
        say("evaluate: speed")
        from moeprune.evaluation.speed import compare_speed

        subjects: dict[str, tuple[Any, AbstractContextManager[Any]]] = {OWN: (student, nullcontext())}
        subjects |= {label: (teacher, pruned(teacher, plan)) for label, plan in others.items()}
        merge(metrics, compare_speed((teacher, nullcontext()), subjects, tokens))
        warnings.append("speed: transformers unpacks compressed weights, so speed and memory are those of plain ones")
    return metrics, warnings


def _measure_streamed(inputs: Inputs, plans: Mapping[str, PrunePlan], directory: Path) -> Measured:
    """Fidelity alone, with one layer of one model in memory at a time."""
    config = inputs.config
    others = {label: plan for label, plan in plans.items() if label != OWN}
    options = ModelOptions(path=str(directory), dtype=config.model.dtype)
    student = open_streamed(options, device=config.runtime.device, rounded=True)
    comparisons = {OWN: streamed_comparison(inputs, student)} | (compared(inputs, others) if others else {})
    metrics = {label: comparison.metrics() for label, comparison in comparisons.items()}
    warnings = [*inputs.evaluation.warnings, *comparisons[OWN].warnings]
    asked = config.evaluation
    if asked.tasks or asked.code or asked.loops or asked.harness or asked.speed:
        warnings.append(unmeasured(inputs))
    return metrics, warnings


def load_written(directory: Path, *, like: Any) -> Any:
    """The checkpoint as stock transformers loads it, on the device and in the dtype of `like`."""
    with without_bars():
        model = type(like).from_pretrained(directory, dtype="auto").eval()
    return unpacked(model, like.dtype).to(like.device)


def _programs(
    options: CodeOptions, inputs: Inputs, student: Any, others: Mapping[str, PrunePlan]
) -> dict[str, dict[str, float]]:
    teacher, tokenizer = inputs.loaded.model, inputs.loaded.tokenizer
    base = solved(teacher, tokenizer, options)
    own = code_metrics(options, solved(student, tokenizer, options), base)
    return {OWN: own} | code_task(teacher, tokenizer, options, others, base=base)


def _loops(inputs: Inputs, student: Any, others: Mapping[str, PrunePlan]) -> dict[str, dict[str, float]]:
    teacher, tokenizer = inputs.loaded.model, inputs.loaded.tokenizer
    chosen = open_prompts(
        inputs.evaluation,
        count=OPEN_PROMPTS,
        prompt_tokens=PROMPT_TOKENS,
        max_new_tokens=OPEN_TOKENS,
        end_ids=end_tokens(teacher, tokenizer),
    )
    base = open_outputs(teacher, tokenizer, chosen)
    own = loop_metrics(open_outputs(student, tokenizer, chosen), base)
    return {OWN: own} | loop_rate(teacher, tokenizer, inputs.evaluation, others, base=base)


def _harness(inputs: Inputs, student: Any, others: Mapping[str, PrunePlan]) -> dict[str, dict[str, float]]:
    from moeprune.evaluation.harness import harness, harness_metrics

    teacher, tokenizer, tasks = inputs.loaded.model, inputs.loaded.tokenizer, inputs.config.evaluation.harness
    base = harness_metrics(teacher, tokenizer, tasks)
    own = harness_metrics(student, tokenizer, tasks) | base_metrics(base)
    return {OWN: own} | harness(teacher, tokenizer, tasks, others, base=base)
