"""`moeprune evaluate`: one model against its teacher, in memory or read layer by layer, of MoE and of dense models."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeprune.artifacts.errors import InputError
from moeprune.commands.arguments import Json, ModelPath, finish, name_and_value, require_writable, start
from moeprune.console import say, warn

if TYPE_CHECKING:
    from moeprune.data.trajectories import TokenSet
    from moeprune.evaluation.students import Student
    from moeprune.run.opened import Opened

METRICS = Path("metrics.json")


def evaluate(
    model: ModelPath,
    plan: Annotated[Path | None, typer.Option(help="Prune in memory by this plan; MODEL is the teacher.")] = None,
    against: Annotated[str | None, typer.Option(help="The unpruned teacher of a pruned checkpoint.")] = None,
    data: Annotated[list[str] | None, typer.Option(help="NAME=PATH; may be given again.")] = None,
    speed: Annotated[bool, typer.Option("--speed", help="Also measure prefill and decode speed.")] = False,
    engine: Annotated[str, typer.Option(help="Where --speed is measured: transformers or vllm.")] = "transformers",
    python: Annotated[Path | None, typer.Option(help="--engine vllm: the Python of its environment.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="The metrics to write (.json).")] = METRICS,
    as_json: Json = False,
) -> None:
    """Fidelity to the unpruned model on held-out data, worst domain first."""
    start(as_json)
    options: dict[str, Any] = {"plan": plan, "against": against, "speed": speed, "engine": engine, "python": python}
    finish(evaluate_model(model, output, data=data or [], **options), output, as_json=as_json)


def evaluate_model(
    model: str,
    output: Path,
    *,
    plan: Path | None = None,
    against: str | None = None,
    data: Sequence[str] = (),
    speed: bool = False,
    engine: str = "transformers",
    python: Path | None = None,
) -> dict[str, Any]:
    """Write metrics of a pruned model: MODEL pruned in memory by a plan, or the checkpoint MODEL against a teacher.

    What does not fit into memory is read layer by layer.
    """
    from moeprune.artifacts.files import save_metrics
    from moeprune.artifacts.plan import PrunePlan
    from moeprune.checkpoint.record import keep_results
    from moeprune.config.load import validate
    from moeprune.config.schema import RunConfig
    from moeprune.evaluation.measure import compared, measure
    from moeprune.evaluation.students import Student
    from moeprune.models.options import ModelOptions
    from moeprune.models.streaming.model import StreamedModel
    from moeprune.run.opened import AnyModel, Opened
    from moeprune.run.run_data import Data

    if (plan is None) == (against is None):
        raise InputError("evaluate: give --plan PLAN (MODEL is the teacher) or --against TEACHER (MODEL is pruned)")
    require_writable(output, ".json")
    _require_metrics(output)
    serving = _serving_python(engine, python, speed=speed, plan=plan)
    path = str(against) if plan is None else model
    domains = [{"name": name, "path": place} for name, place in map(name_and_value, data)] or _default_data(path)
    evaluation = {"domains": domains, "speed": speed and serving is None}
    config = validate(RunConfig, {"model": {"path": path}, "evaluation": evaluation}, place="evaluate")
    warnings: list[str] = []
    served: dict[str, float] = {}
    if plan is not None:
        teacher = Opened(config.model)
        chosen = PrunePlan.load(plan)
        chosen.require_model(teacher.fingerprint, model)
        tokens = Data(config, teacher).evaluation
        whole: Any = teacher.streamed if teacher.streaming else teacher.loaded.model
        student = Student(whole, chosen)
    else:
        teacher, smaller = AnyModel(config.model), AnyModel(ModelOptions(path=model))
        warnings += _one_vocabulary(teacher, smaller)
        tokens = Data(config, teacher).evaluation
        if serving is not None:  # before this process holds both models beside the engines
            served = _speed_in_vllm(teacher, smaller, tokens, serving)
        if teacher.identity[1:] == smaller.identity[1:]:
            warnings.append(f"evaluate: {model} and {against} are the same checkpoint; nothing was pruned")
        whole, student = _both_checkpoints(teacher, smaller)
    one, size = {"": student}, config.runtime.batch_tokens
    comparisons = compared(whole, one, tokens, fingerprint=teacher.fingerprint, batch_tokens=size)
    loaded = None if isinstance(whole, StreamedModel) else teacher.loaded
    measured, notes = measure(comparisons, tokens, config.evaluation, loaded=loaded, students=one, questions={})
    metrics, warnings = measured[""] | served, [*warnings, *notes]
    if config.evaluation.speed and loaded is None:
        warnings.append("speed: the model does not fit into memory; it was not measured")
    save_metrics(output, metrics)
    if plan is None and (unkept := keep_results(smaller.directory, metrics)):
        warnings.append(unkept)
    for warning in warnings:
        warn(warning)
    return {"metrics_file": output, "metrics": metrics, "warnings": warnings}


def _require_metrics(output: Path) -> None:
    """Refuse to write metrics over a file that holds something else."""
    from moeprune.artifacts.files import load_metrics

    if output.exists():
        try:
            load_metrics(output)
        except InputError as error:
            raise InputError(f"-o {output}: is there and holds no metrics; give another name") from error


def _one_vocabulary(teacher: "Opened", student: "Opened") -> list[str]:
    """A warning where the tokenizers differ. Raises InputError where the vocabularies have different sizes."""
    from moeprune.models.loading import load_config

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


def _speed_in_vllm(teacher: "Opened", student: "Opened", tokens: "TokenSet", python: Path) -> dict[str, float]:
    from moeprune.evaluation.speed import prompts_of
    from moeprune.models.loading import load_config
    from moeprune.serving.vllm_speed import vllm_speed

    sizes = (teacher.checkpoint.tensor_bytes, student.checkpoint.tensor_bytes)
    dtype = "float32" if teacher.device_type == "cpu" else "bfloat16"
    prompts = prompts_of(load_config(teacher.directory), tokens).tolist()
    say(f"evaluate: speed in vLLM, {dtype}, {len(prompts)} prompts of {len(prompts[0])} tokens")
    both = (teacher.directory, student.directory)
    return vllm_speed(*both, prompts, python=python, dtype=dtype, weight_bytes=sizes)


def _both_checkpoints(teacher: "Opened", student: "Opened") -> "tuple[Any, Student]":
    """Both models in memory where they fit together, else both with their weights on disk."""
    from moeprune.evaluation.students import Student
    from moeprune.models.loading import device_of, load_written
    from moeprune.models.memory import free_bytes

    both = teacher.weight_bytes + student.weight_bytes
    peak = max(teacher.loading_bytes, teacher.weight_bytes + student.loading_bytes)
    if peak > free_bytes(device_of(teacher.runtime.device)):
        say(f"evaluate: {both / 1e9:,.1f} GB of weights are read layer by layer")
        return teacher.streamed, Student(student.streamed)
    whole = teacher.loaded.model
    packed = student.checkpoint.quantization is not None
    return whole, Student(load_written(student.directory, like=whole) if packed else student.loaded.model)


def _default_data(teacher: str) -> list[dict[str, Any]]:
    if teacher != "reference":
        raise InputError("evaluate: give --data NAME=PATH with held-out trajectories")
    return [{"name": name, "path": f"reference:{name}", "tokens": 16384} for name in ("agent", "prose", "python")]
