"""`moeprune evaluate`: one model against its teacher, in memory or read layer by layer, of MoE and of dense models."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import load_metrics, save_metrics
from moeprune.artifacts.plan import PrunePlan
from moeprune.checkpoint.record import keep_results
from moeprune.commands.arguments import name_and_value, require_writable
from moeprune.config.load import validate
from moeprune.config.schema import RunConfig
from moeprune.console import progress, say, warn
from moeprune.evaluation.intervals import Comparison
from moeprune.models.loading import device_of, load_config, local_directory
from moeprune.models.memory import free_bytes
from moeprune.models.streaming.model import open_streamed
from moeprune.run.opened import Inputs
from moeprune.run.team import compared, streamed_comparison


class Evaluated(Inputs):
    """A model that is only run: it may be dense."""

    @cached_property
    def directory(self) -> Path:
        directory = local_directory(self.config.model)
        load_config(directory)
        return directory


def evaluate_model(
    model: str,
    output: Path,
    *,
    plan: Path | None,
    against: str | None,
    data: Sequence[str],
    speed: bool,
    engine: str = "transformers",
    python: Path | None = None,
) -> dict[str, Any]:
    """Write metrics of a pruned model: MODEL pruned in memory by a plan, or the checkpoint MODEL against a teacher.

    What does not fit into memory is read layer by layer.
    """
    if (plan is None) == (against is None):
        raise InputError("evaluate: give --plan PLAN (MODEL is the teacher) or --against TEACHER (MODEL is pruned)")
    require_writable(output, ".json")
    _require_metrics(output)
    serving = _serving_python(engine, python, speed=speed, plan=plan)
    teacher = str(against) if plan is None else model
    named = [{"name": name, "path": path} for name, path in map(name_and_value, data)] or _default_data(teacher)
    value = {"model": {"path": teacher}, "evaluation": {"domains": named}}
    engine_speed: dict[str, float] = {}
    said: list[str] = []
    if plan is not None:
        inputs = Inputs(validate(RunConfig, value, place="evaluate"))
        comparison, subject = _by_plan(inputs, model, PrunePlan.load(plan))
    else:
        inputs = Evaluated(validate(RunConfig, value, place="evaluate"))
        other = Evaluated(validate(RunConfig, {"model": {"path": model}}, place="evaluate"))
        said += _one_vocabulary(inputs, other)
        if serving is not None:  # before this process holds both models beside the engines
            engine_speed = _speed_in_vllm(inputs, other, serving)
        if inputs.model_identity[1:] == other.model_identity[1:]:
            said.append(f"evaluate: {model} and {against} are the same checkpoint; nothing was pruned")
        comparison, subject = _by_checkpoint(inputs, other)
    metrics, warnings = comparison.metrics(), [*said, *inputs.evaluation.warnings, *comparison.warnings]
    metrics |= engine_speed
    if speed and serving is None and subject is None:
        warnings.append("speed: the model does not fit into memory; it was not measured")
    elif speed and serving is None and subject is not None:
        from moeprune.evaluation.speed import compare_speed

        metrics |= compare_speed((inputs.loaded.model, nullcontext()), {"": subject}, inputs.evaluation)[""]
    save_metrics(output, metrics)
    if plan is None and (unkept := keep_results(other.directory, metrics)):
        warnings.append(unkept)
    for warning in warnings:
        warn(warning)
    return {"metrics_file": output, "metrics": metrics, "warnings": warnings}


def _require_metrics(output: Path) -> None:
    """Refuse to write metrics over a file that holds something else."""
    if output.exists():
        try:
            load_metrics(output)
        except InputError as error:
            raise InputError(f"-o {output}: is there and holds no metrics; give another name") from error


def _one_vocabulary(teacher: Inputs, student: Inputs) -> list[str]:
    """A warning where the tokenizers differ. Raises InputError where the vocabularies have different sizes."""
    sizes = [load_config(one.directory).get_text_config().vocab_size for one in (teacher, student)]
    if sizes[0] != sizes[1]:
        raise InputError(
            f"evaluate: {student.directory} has a vocabulary of {sizes[1]:,} tokens and {teacher.directory} one of "
            f"{sizes[0]:,}; give --against the model that it was made from"
        )
    try:
        own = student.tokenizer.get_vocab()
    except InputError:  # it has none, and needs none here
        return []
    if teacher.tokenizer.get_vocab() == own:
        return []
    return [
        f"evaluate: the tokenizers of {student.directory} and {teacher.directory} differ, so one token means "
        "two things; both read the teacher's"
    ]


def _serving_python(engine: str, python: Path | None, *, speed: bool, plan: Path | None) -> Path | None:
    """vLLM's Python, None when speed is measured in transformers. InputError for options that do not go together."""
    from moeprune.serving.engines import require_python

    if engine not in ("transformers", "vllm"):
        raise InputError(f"--engine {engine}: speed is measured in transformers or vllm")
    if engine == "transformers":
        if python is not None:
            raise InputError(f"--python {python}: goes with --engine vllm")
        return None
    if not speed or plan is not None:
        raise InputError("--engine vllm: goes with --speed and --against, for it measures checkpoints")
    return require_python("vllm", python)


def _speed_in_vllm(teacher: Inputs, student: Inputs, python: Path) -> dict[str, float]:
    from moeprune.evaluation.speed import prompts_of
    from moeprune.serving.vllm_speed import vllm_speed

    both = (teacher.checkpoint, student.checkpoint)
    sizes = [one.tensor_bytes for one in both]
    dtype = "float32" if teacher.device_type == "cpu" else "bfloat16"
    prompts = prompts_of(load_config(teacher.directory), teacher.evaluation).tolist()
    say(f"evaluate: speed in vLLM, {dtype}, {len(prompts)} prompts of {len(prompts[0])} tokens")
    return vllm_speed(
        teacher.directory,
        student.directory,
        prompts,
        python=python,
        dtype=dtype,
        weight_bytes=(sizes[0], sizes[1]),
    )


Subject = tuple[Any, Any]  # (model, context in which it is measured)


def _by_plan(inputs: Inputs, model: str, plan: PrunePlan) -> tuple[Comparison, Subject | None]:
    from moeprune.models.pruned import pruned

    plan.require_model(inputs.fingerprint, model)
    comparison = compared(inputs, {"": plan})[""]
    if inputs.streaming:
        return comparison, None
    return comparison, (inputs.loaded.model, pruned(inputs.loaded.model, plan))


def _by_checkpoint(teacher: Inputs, student: Inputs) -> tuple[Comparison, Subject | None]:
    both = teacher.weight_bytes + student.weight_bytes
    peak = max(teacher.loading_bytes, teacher.weight_bytes + student.loading_bytes)
    if peak > free_bytes(device_of(teacher.config.runtime.device)):
        say(f"evaluate: {both / 1e9:,.1f} GB of weights are read layer by layer")
        options, device = student.config.model, student.config.runtime.device
        return streamed_comparison(teacher, open_streamed(options, device=device, rounded=True)), None
    from moeprune.evaluation.fidelity import bounded_batch_tokens, compare, logits_of
    from moeprune.run.dense_stage import load_written

    whole, tokens = teacher.loaded.model, teacher.evaluation
    packed = student.checkpoint.quantization is not None
    smaller = load_written(student.directory, like=whole) if packed else student.loaded.model
    size, logits = bounded_batch_tokens(whole, teacher.config.runtime.batch_tokens), {"": logits_of(smaller)}
    with progress("evaluating") as advance:
        comparison = compare(logits_of(whole), logits, tokens, batch_tokens=size, on_progress=advance)[""]
    return comparison, (smaller, nullcontext())


def _default_data(teacher: str) -> list[dict[str, Any]]:
    if teacher != "reference":
        raise InputError("evaluate: give --data NAME=PATH with held-out trajectories")
    return [{"name": name, "path": f"reference:{name}", "tokens": 16384} for name in ("agent", "prose", "python")]
