"""lm-eval on a model in memory: standard task names, local task files, and the offline tasks of the reference data.

The task files in harness_tasks/ name the functions here that make documents of the held-out reference data.
"""

import copy
import difflib
import importlib.util
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.data.options import Domain
from moeprune.data.trajectories import load_records
from moeprune.evaluation.agent import final_answer, tool_call
from moeprune.models.loading import load_tokenizer
from moeprune.reference import MODEL_DIR

TASKS = Path(__file__).parent / "harness_tasks"
BOOTSTRAP = 1000  # resamples of lm-eval's standard errors, where no formula exists
QUESTIONS = 200  # of the reference data
CHARACTERS = 4000  # of each reference text: its beginning


def harness_metrics(
    model: Any, tokenizer: Any, tasks: Sequence[str], *, limit: int | None = None, batch_size: int = 8
) -> dict[str, float]:
    """`harness/<task>/<metric>` of `model` as it is; a metric of a filter is `<metric>.<filter>`.

    Standard errors are `<metric>_stderr`. `limit` takes the first so many documents of each task.
    Raises InputError as `require_tasks` does, when a data set cannot be had and when a task would run generated code.
    """
    require_tasks(tasks)
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    with _quiet():
        try:
            results = simple_evaluate(
                # A copy of the tokenizer, because lm-eval sets its padding.
                model=HFLM(
                    pretrained=model, tokenizer=copy.deepcopy(tokenizer), backend="causal", batch_size=batch_size
                ),
                tasks=list(tasks),
                task_manager=_task_manager(tasks),
                limit=limit,
                bootstrap_iters=BOOTSTRAP,
                log_samples=False,
            )
        except OSError as error:
            raise InputError(
                f"evaluation.harness: the data of {', '.join(tasks)} cannot be had here ({error}); use a machine with "
                "a network or a local task file"
            ) from error
        except ValueError as error:
            if "marked as unsafe" not in str(error):
                raise
            raise InputError(
                f"evaluation.harness: one of {', '.join(tasks)} runs code that the model writes; moeprune does not"
            ) from error
    return _flat(results["results"])


def require_tasks(tasks: Sequence[str]) -> None:
    """Raises InputError unless lm-eval is installed and every task is a known name or a task file."""
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError("evaluation.harness: lm-eval is not installed; pip install 'moeprune[eval]'")
    files, names = _by_kind(tasks)
    for file in files:
        _require_task_file(file)
    known = None
    for name in names:
        known = known or set(_task_manager(tasks).all_tasks)
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else "; `lm_eval ls tasks` lists them"
            raise InputError(f"evaluation.harness: lm-eval has no task {name!r}{hint}")


def _by_kind(tasks: Sequence[str]) -> tuple[list[str], list[str]]:
    files = [task for task in tasks if task.endswith((".yaml", ".yml"))]
    return files, [task for task in tasks if task not in files]


def _require_task_file(file: str) -> None:
    from lm_eval.tasks._yaml_loader import load_yaml

    if not Path(file).is_file():
        raise InputError(f"evaluation.harness: {file}: no such task file")
    from yaml import YAMLError

    try:
        task = load_yaml(Path(file), resolve_func=False)
    except YAMLError as error:
        raise InputError(f"evaluation.harness: {file}: not a YAML file ({error})") from error
    if not isinstance(task, dict) or not {"task", "group"} & set(task):
        raise InputError(f"evaluation.harness: {file}: not an lm-eval task file; it has neither `task` nor `group`")


def _task_manager(tasks: Sequence[str]) -> Any:
    """lm-eval's index of tasks; its own 14,000 take seconds to read, so they are read only when one is named."""
    from lm_eval.tasks import TaskManager

    local = TaskManager(include_path=str(TASKS), include_defaults=False)
    if set(_by_kind(tasks)[1]) <= set(local.all_tasks):
        return local
    return TaskManager(include_path=str(TASKS))


def _flat(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for task, values in results.items():
        for key, value in values.items():
            metric, comma, filtered = key.partition(",")
            if not comma or not isinstance(value, int | float) or not math.isfinite(value):
                continue  # names and counts, and standard errors that do not exist
            suffix = "" if filtered == "none" else f".{filtered}"
            metrics[f"harness/{task}/{metric}{suffix}"] = float(value)
    return metrics


@contextmanager
def _quiet() -> Iterator[None]:
    """Errors of lm-eval alone are logged, and it forks no processes (it would fork this one, with the model in it)."""
    logger, name = logging.getLogger("lm_eval"), "DISABLE_MULTIPROC"
    level, own = logger.level, os.environ.get(name)
    logger.setLevel(logging.ERROR)
    os.environ[name] = "1"
    try:
        yield
    finally:
        logger.setLevel(level)
        if own is None:
            del os.environ[name]
        else:
            os.environ[name] = own


def text(*, domain: str, **_: Any) -> dict[str, Any]:
    """A data set with one split: the beginnings of a domain's held-out texts."""
    from datasets import Dataset

    records = load_records(Domain(name=domain, path=f"reference:{domain}"), part="heldout")
    return {"test": Dataset.from_list([{"text": record["text"][:CHARACTERS]} for record in records])}


def agent(*, turn: str, **_: Any) -> dict[str, Any]:
    """A data set with one split: the `turn` ("call" or "answer") of the first questions, rendered by the template.

    A call is what stands between the tags of the first reply where it calls a tool; an answer is the integer of the
    last reply, and its context holds the tool's results.
    """
    from datasets import Dataset

    records = load_records(Domain(name="agent", path="reference:agent"), part="heldout")[:QUESTIONS]
    tokenizer = load_tokenizer(MODEL_DIR)
    documents = [document for record in records if (document := _turn(record, tokenizer, turn)) is not None]
    return {"test": Dataset.from_list(documents)}


def perplexities(document: Mapping[str, Any], results: Sequence[float]) -> dict[str, tuple[float, int]]:
    """(log-likelihood, length) of one text for each of the three measures."""
    (likelihood,) = results
    words, size = len(re.split(r"\s+", document["text"])), len(document["text"].encode())
    return {
        "word_perplexity": (likelihood, words),
        "byte_perplexity": (likelihood, size),
        "bits_per_byte": (likelihood, size),
    }


def _turn(record: Mapping[str, Any], tokenizer: Any, turn: str) -> dict[str, str] | None:
    messages = record["messages"]
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    end = users[1] if len(users) > 1 else len(messages)
    last = users[0] + 1 if turn == "call" else end - 1
    context = _render(tokenizer, record, last, generate=True)
    if turn == "answer":
        return {"context": context, "target": str(final_answer(messages[last]["content"]))}
    if not messages[last].get("tool_calls"):
        return None
    whole = _render(tokenizer, record, last + 1, generate=False)
    # Between the tags: lm-eval drops special tokens from what a model writes, and the tags are special ones.
    return {"context": context, "target": str(tool_call(whole[len(context) :]))}


def _render(tokenizer: Any, record: Mapping[str, Any], count: int, *, generate: bool) -> str:
    return str(
        tokenizer.apply_chat_template(
            record["messages"][:count], tools=record.get("tools"), add_generation_prompt=generate, tokenize=False
        )
    )
