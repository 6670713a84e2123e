"""`moeprune verify`: a checkpoint in a serving engine beside the pruned model in memory, on the engine's tokens."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

import typer

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import read_json
from moeprune.commands.arguments import Json, finish, open_model, start
from moeprune.console import say, warn

if TYPE_CHECKING:
    from moeprune.artifacts.plan import PrunePlan
    from moeprune.run.opened import Opened
    from moeprune.serving.answers import Answer, Score
    from moeprune.serving.gguf import Gguf

Precision = Literal["float32", "bfloat16", "float16"]
ITSELF, BASE = "the checkpoint in transformers", "the base model pruned in memory"


def verify(
    checkpoint: Annotated[str | None, typer.Argument(help="The directory of a pruned checkpoint.")] = None,
    against: Annotated[str | None, typer.Option(help="The base model; it is pruned in memory by the plan.")] = None,
    engine: Annotated[str, typer.Option(help="transformers, vllm or llama.cpp.")] = "transformers",
    python: Annotated[Path | None, typer.Option(help="The Python of the engine's environment.")] = None,
    binary: Annotated[Path | None, typer.Option(help="llama.cpp: a llama-server, in place of --python.")] = None,
    gguf: Annotated[Path | None, typer.Option(help="llama.cpp: the file that was exported.")] = None,
    dtype: Annotated[str, typer.Option(help="What the engine computes in: float32, bfloat16, float16.")] = "float32",
    log: Annotated[Path | None, typer.Option(help="Keep the engine's own output in this file.")] = None,
    install: Annotated[str | None, typer.Option(help="Make an environment instead: vllm or llama.cpp.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Where --install makes it.")] = None,
    as_json: Json = False,
) -> None:
    """Proof in a serving engine: its greedy tokens and log-probabilities beside the pruned model in memory."""
    start(as_json)
    if install is not None:
        environment = install_engine(install, output, checkpoint)
        finish({"python": environment}, environment, as_json=as_json)
        return
    if checkpoint is None:
        raise InputError("verify: give the directory of a checkpoint, or --install ENGINE")
    programs: dict[str, Any] = {"python": python, "binary": binary, "gguf": gguf}
    summary = verify_checkpoint(checkpoint, engine, against=against, dtype=dtype, log=log, **programs)
    finish(summary, summary["checkpoint"], as_json=as_json)
    if not summary["passed"]:
        raise typer.Exit(1)


def install_engine(engine: str, directory: Path | None, checkpoint: str | None) -> Path:
    """The Python of a new environment with the engine."""
    from moeprune.serving.install import install

    if directory is None:
        raise InputError("--install: give -o DIR, the directory of the new environment")
    if checkpoint is not None:
        raise InputError(f"--install: makes an environment and verifies nothing; leave {checkpoint} out")
    return install(engine, directory, say=say)


def verify_checkpoint(
    checkpoint: str,
    engine: str,
    *,
    against: str | None = None,
    python: Path | None = None,
    binary: Path | None = None,
    gguf: Path | None = None,
    dtype: str = "float32",
    log: Path | None = None,
) -> dict[str, Any]:
    """The proof as data; it is also in the checkpoint's record and card, where it has one.

    Raises InputError for wrong arguments before an engine starts.
    """
    header = _required(engine, python=python, binary=binary, gguf=gguf, dtype=dtype, against=against)
    from moeprune.checkpoint.record import keep_proof, require_record
    from moeprune.evaluation.students import Student
    from moeprune.serving.answers import compare, tolerance_of
    from moeprune.serving.engines import ask_script, require_python
    from moeprune.serving.gguf import differences
    from moeprune.serving.llama_cpp import ask_llama_cpp
    from moeprune.serving.questions import questions

    opened = open_model(checkpoint)
    base = opened if against is None else open_model(against)
    config = read_json(opened.directory / "config.json")
    record = require_record(opened.directory)
    plan = None if against is None else _plan(record, opened.directory, base, against)
    if binary is None:
        python = require_python(cast(Any, engine), python)
    prompts = questions(opened.tokenizer)
    # Engines compute a quantised checkpoint with other numbers than transformers, which unpacks it.
    packed = any(config.get(key) for key in ("quantization_config", "compression_config"))
    numbers = header.dtype if header is not None else f"{dtype}, quantised" if packed else dtype
    say(f"verify: asking {engine} for {len(prompts.prompts)} prompts in {numbers}")
    if header is not None:
        answers = ask_llama_cpp(header.path, prompts, python=python, binary=binary, log=log)
    else:
        assert python is not None
        answers = ask_script(cast(Any, engine), opened.directory, prompts, python=python, dtype=dtype, log=log)
    say(f"verify: {answers.engine} {answers.version} answered; scoring its tokens in memory")
    student = Student(base.loaded.model, plan)
    with student.inside():
        scores = score(student.model, prompts.prompts, answers.answers)
    tolerance, compared_with = tolerance_of(engine, numbers), ITSELF if plan is None else BASE
    proof = compare(prompts, answers, scores, dtype=numbers, tolerance=tolerance, compared_with=compared_with)
    summary = {**proof.as_json(), "when": datetime.now(UTC).isoformat(timespec="seconds")}
    if header is not None:
        layer = opened.layers[0]
        problems, notes = differences(header, config, count=layer.num_experts, top_k=layer.top_k)
        summary |= {"gguf": header.path.name, "routing": header.about_experts(), "routing_notes": notes}
        summary |= {"problems": [*summary["problems"], *problems], "passed": proof.passed and not problems}
    _show(summary)
    name = f"{engine} {numbers if header is None else header.path.name}"
    if record is not None:
        # An engine that answers NaN has failed; the record says so in words, since JSON has no number for it.
        keep_proof(opened.directory, name, json.loads(json.dumps(summary), parse_constant=str))
    else:
        warn(f"{checkpoint}: has no moeprune.json, so the result is only printed")
    return {"checkpoint": opened.directory, "record": None if record is None else name, **summary}


def _plan(record: Mapping[str, Any] | None, checkpoint: Path, base: "Opened", against: str) -> "PrunePlan":
    """The checkpoint's plan, to prune the base with. Raises InputError when the base is another model."""
    if record is None or not record.get("plan"):
        raise InputError(
            f"--against {against}: {checkpoint} has no plan in a moeprune.json to prune it with; leave --against "
            "out to compare the engine with the checkpoint in transformers"
        )
    if record.get("dense"):
        raise InputError(
            f"--against {against}: dense methods changed the checkpoint's weights too, so the base pruned by its plan "
            "is another model; leave --against out to compare the engine with the checkpoint in transformers"
        )
    from moeprune.artifacts.plan import PrunePlan

    plan = PrunePlan.parse(record["plan"], place=f"{checkpoint}/moeprune.json")
    plan.require_model(base.fingerprint, f"--against {against}")
    return plan


def _required(
    engine: str, *, python: Path | None, binary: Path | None, gguf: Path | None, dtype: str, against: str | None
) -> "Gguf | None":
    """The GGUF's header. Raises InputError for arguments that do not go together."""
    from moeprune.serving.engines import ENGINES
    from moeprune.serving.gguf import read_gguf
    from moeprune.serving.llama_cpp import require_one_server

    if engine not in ENGINES:
        raise InputError(f"--engine {engine}: one of {', '.join(ENGINES)}")
    if dtype not in get_args(Precision):
        raise InputError(f"--dtype {dtype}: one of {', '.join(get_args(Precision))}")
    if engine != "llama.cpp":
        for name, value in (("--gguf", gguf), ("--binary", binary)):
            if value is not None:
                raise InputError(f"{name} {value}: goes with --engine llama.cpp, not {engine}")
        if engine == "transformers" and against is None and python is None:
            raise InputError(
                "--engine transformers: give --against BASE, the model it was pruned from, or --python PATH of an "
                "environment with another release; otherwise transformers would be compared with itself"
            )
        return None
    if gguf is None:
        raise InputError("--engine llama.cpp: give --gguf FILE, as `moeprune export` writes it")
    require_one_server(python, binary)
    return read_gguf(gguf)


def _show(summary: Mapping[str, Any]) -> None:
    say(
        f"verify: {summary['tokens_equal']} of {summary['tokens']} greedy tokens equal, {summary['ties']} within the "
        f"tolerance; log-probabilities differ by {summary['difference_mean']:.2g} nats on average, "
        f"{summary['difference_most']:.2g} at most"
    )
    for name, how in summary["chats"].items():
        say(f"verify: {name}: {how}")
    for text in [*summary["warnings"], *summary.get("routing_notes", [])]:
        warn(text)
    for text in summary["problems"]:
        warn(f"NOT as in memory: {text}")


def score(model: Any, prompts: Sequence[Sequence[int]], answers: Sequence["Answer"]) -> list["Score"]:
    """One score a prompt; `model` is a transformers causal language model in eval mode.

    One forward for each prompt with its answer, without a cache and without padding. The last token of an answer is
    scored by the forward of those before it.
    """
    import torch

    from moeprune.serving.answers import Score

    scores = []
    with torch.no_grad():
        for prompt, answer in zip(prompts, answers, strict=True):
            if not answer.tokens:
                scores.append(Score((), ()))
                continue
            ids = torch.tensor([[*prompt, *answer.tokens[:-1]]], device=model.device)
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 :].double()
            likely = torch.log_softmax(logits, dim=-1)
            chosen = likely.gather(1, torch.tensor(answer.tokens, device=model.device)[:, None])[:, 0]
            scores.append(Score(tuple(chosen.tolist()), tuple(likely.max(dim=-1).values.tolist())))
    return scores
