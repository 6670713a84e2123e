"""`moeprune verify` and `moeprune export`: a checkpoint in a real engine beside the pruned model in memory.

The pruned model in memory on an engine's tokens: their log-probabilities and those of its own choices.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast, get_args

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import read_json
from moeprune.artifacts.plan import PrunePlan
from moeprune.checkpoint.record import keep_proof, require_record
from moeprune.config.load import validate
from moeprune.config.schema import RunConfig
from moeprune.console import say, warn
from moeprune.run.opened import Inputs
from moeprune.serving.answers import Answer, Answers, Proof, Score, compare, tolerance_of
from moeprune.serving.engines import ENGINES, ask_script, require_python
from moeprune.serving.gguf import Gguf, differences, read_gguf
from moeprune.serving.llama_cpp import ask_llama_cpp, require_one_server
from moeprune.serving.questions import Questions, questions

Precision = Literal["float32", "bfloat16", "float16"]
ITSELF, BASE = "the checkpoint in transformers", "the base model pruned in memory"


def install_engine(engine: str, directory: Path | None, checkpoint: str | None) -> Path:
    """The Python of a new environment with the engine."""
    from moeprune.serving.install import install

    if directory is None:
        raise InputError("--install: give -o DIR, the directory of the new environment")
    if checkpoint is not None:
        raise InputError(f"--install: makes an environment and verifies nothing; leave {checkpoint} out")
    return install(engine, directory, say=say)


def verify_checkpoint(
    checkpoint: str | None,
    *,
    against: str | None,
    engine: str,
    python: Path | None,
    binary: Path | None,
    gguf: Path | None,
    dtype: str,
    log: Path | None,
) -> dict[str, Any]:
    """The proof as data; it is also in the checkpoint's record and card, where it has one.

    Everything that can be wrong with the arguments is said before an engine starts.
    """
    if checkpoint is None:
        raise InputError("verify: give the directory of a checkpoint, or --install ENGINE")
    header = _required(engine, python=python, binary=binary, gguf=gguf, dtype=dtype, against=against)
    inputs = _inputs(checkpoint)
    record = require_record(inputs.directory)
    plan = _plan(record, inputs, against)
    if engine != "llama.cpp":
        python = require_python(cast(Any, engine), python)
    elif binary is None:
        python = require_python("llama.cpp", python)
    asked = questions(inputs.tokenizer)
    if header is not None:
        dtype = header.dtype
    elif _is_quantised(inputs):
        dtype = f"{dtype}, quantised"
    say(f"verify: asking {engine} for {len(asked.prompts)} prompts in {dtype}")
    found = _ask(engine, inputs.directory, asked, python=python, binary=binary, header=header, dtype=dtype, log=log)
    say(f"verify: {found.engine} {found.version} answered; scoring its tokens in memory")
    proof = _judge(inputs, plan, asked, found, against=against, dtype=dtype, engine=engine)
    summary = {**proof.as_json(), "when": datetime.now(UTC).isoformat(timespec="seconds")}
    if header is not None:
        layer = inputs.layers[0]
        config = read_json(inputs.directory / "config.json")
        problems, notes = differences(header, config, count=layer.num_experts, top_k=layer.top_k)
        summary |= {"gguf": header.path.name, "routing": header.about_experts(), "routing_notes": notes}
        summary |= {"problems": [*summary["problems"], *problems], "passed": proof.passed and not problems}
    _tell(summary)
    name = f"{engine} {header.path.name if header is not None else dtype}"
    if record is not None:
        # An engine that answers NaN has failed; the record says so in words, since JSON has no number for it.
        keep_proof(inputs.directory, name, json.loads(json.dumps(summary), parse_constant=str))
    else:
        warn(f"{checkpoint}: has no moeprune.json, so the result is only printed")
    return {"checkpoint": inputs.directory, "record": None if record is None else name, **summary}


def _inputs(model: str) -> Inputs:
    return Inputs(validate(RunConfig, {"model": {"path": model}}, place="verify"))


def _plan(record: Mapping[str, Any] | None, inputs: Inputs, against: str | None) -> PrunePlan | None:
    """The plan to prune the base with, None when the checkpoint itself is the model in memory."""
    if against is None:
        return None
    if record is None or not record.get("plan"):
        raise InputError(
            f"--against {against}: {inputs.directory} has no plan in a moeprune.json to prune it with; leave --against "
            "out to compare the engine with the checkpoint in transformers"
        )
    if record.get("dense"):
        raise InputError(
            f"--against {against}: dense methods changed the checkpoint's weights too, so the base pruned by its plan "
            "is another model; leave --against out to compare the engine with the checkpoint in transformers"
        )
    plan = PrunePlan.parse(record["plan"], place=f"{inputs.directory}/moeprune.json")
    plan.require_model(_inputs(against).fingerprint, f"--against {against}")
    return plan


def _required(
    engine: str, *, python: Path | None, binary: Path | None, gguf: Path | None, dtype: str, against: str | None
) -> Gguf | None:
    """The GGUF's header. Raises InputError for arguments that do not go together."""
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


def _ask(
    engine: str,
    checkpoint: Path,
    asked: Questions,
    *,
    python: Path | None,
    binary: Path | None,
    header: Gguf | None,
    dtype: str,
    log: Path | None,
) -> Answers:
    if header is not None:
        return ask_llama_cpp(header.path, asked, python=python, binary=binary, log=log)
    assert python is not None
    name = cast(Literal["transformers", "vllm"], engine)
    return ask_script(name, checkpoint, asked, python=python, dtype=dtype.partition(",")[0], log=log)


def _is_quantised(inputs: Inputs) -> bool:
    """Whether engines compute with other numbers than transformers, which unpacks: many quantise activations too."""
    config = read_json(inputs.directory / "config.json")
    return any(config.get(key) for key in ("quantization_config", "compression_config"))


def _judge(
    inputs: Inputs,
    plan: PrunePlan | None,
    asked: Questions,
    found: Answers,
    *,
    against: str | None,
    dtype: str,
    engine: str,
) -> Proof:
    """The proof, against the base pruned by the plan or against the checkpoint as transformers loads it."""
    from moeprune.models.pruned import pruned

    model = (inputs if against is None else _inputs(against)).loaded.model
    with nullcontext() if plan is None else pruned(model, plan):
        scores = score(model, asked.prompts, found.answers)
    return compare(
        asked,
        found,
        scores,
        dtype=dtype,
        tolerance=tolerance_of(engine, dtype),
        compared_with=ITSELF if plan is None else BASE,
    )


def _tell(summary: Mapping[str, Any]) -> None:
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


def score(model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Answer]) -> list[Score]:
    """One score a prompt; `model` is a transformers causal language model in eval mode.

    Position by position along prompt and answer in one forward each, without a cache and without padding: as plain as
    it gets. What was generated last needs no forward of its own.
    """
    import torch

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
