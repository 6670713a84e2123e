"""lm-eval on models in memory: a local task against a naive loop, the reference tasks, and bad input."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from moeprune.artifacts.errors import InputError
from moeprune.evaluation.harness import harness_metrics, require_tasks
from moeprune.evaluation.students import Student, pruned_students, with_base
from moeprune.models.loading import LoadedModel
from tests.evaluation.material import random_plan
from tests.tiny import build, tiny_tokenizer

pytest.importorskip("lm_eval")

DOCUMENTS = [
    {"question": question, "choices": choices, "answer": index % 2}
    for index, (question, choices) in enumerate(
        [
            ("one and", ["two", "ten"]),
            ("red or", ["blue", "green"]),
            ("up", ["down", "away"]),
            ("a b", ["c", "d"]),
            ("x", ["y", "zz"]),
        ]
    )
]


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    return write_task(tmp_path, data)


def write_task(directory: Path, data: Path, extra: str = "") -> Path:
    path = directory / "small.yaml"
    path.write_text(
        f"""
task: small
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {directory / "cache"}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
{extra}
"""
    )
    return path


def naive_accuracy(model: Any, tokenizer: Any) -> float:
    right = 0
    for document in DOCUMENTS:
        context = tokenizer(document["question"])["input_ids"]
        likelihoods = []
        for choice in document["choices"]:
            ids = context + tokenizer(" " + choice)["input_ids"]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            likelihoods.append(sum(float(logits[i - 1, ids[i]]) for i in range(len(context), len(ids))))
        right += likelihoods.index(max(likelihoods)) == document["answer"]
    return right / len(DOCUMENTS)


def test_a_local_task_equals_a_naive_loop_for_base_and_pruned(task_file: Path) -> None:
    tokenizer, small = tiny_tokenizer(), build("qwen3_moe")
    plan = random_plan(small, 4)
    tokenizer.pad_token = None  # lm-eval would set one
    measure = partial(harness_metrics, tokenizer=tokenizer, tasks=[str(task_file)], batch_size=2)
    metrics = with_base(measure, small, {"p": Student(small, plan)})["p"]
    assert metrics["harness/small/acc/base"] == pytest.approx(naive_accuracy(small, tokenizer))
    from moeprune.models.pruned import pruned

    with pruned(small, plan):
        assert metrics["harness/small/acc"] == pytest.approx(naive_accuracy(small, tokenizer))
    assert "harness/small/acc_stderr" in metrics
    assert tokenizer.pad_token is None


def test_reference_tasks_need_no_network_and_see_the_damage(reference: LoadedModel) -> None:
    tasks = ["reference_agent_call", "reference_agent_answer", "reference_json"]
    plans = {"random": random_plan(reference.model, 16)}
    measure = partial(harness_metrics, tokenizer=reference.tokenizer, tasks=tasks, limit=4)
    metrics = with_base(measure, reference.model, pruned_students(reference.model, plans))["random"]
    assert metrics["harness/reference_agent_call/exact_match/base"] == 1
    assert metrics["harness/reference_agent_answer/exact_match/base"] == 1
    assert metrics["harness/reference_agent_call/exact_match"] < 1
    bits = "harness/reference_json/bits_per_byte"
    assert 0.2 < metrics[f"{bits}/base"] < 1 < metrics[bits]


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean reference_prose"):
        require_tasks(["referense_prose"])


def test_files_that_are_no_tasks(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such task file"):
        require_tasks([str(tmp_path / "missing.yaml")])
    path = tmp_path / "x.yaml"
    path.write_text("a: 1\n")
    with pytest.raises(InputError, match="neither `task` nor `group`"):
        require_tasks([str(path)])
    path.write_text("a: [1\n")
    with pytest.raises(InputError, match="not a YAML file"):
        require_tasks([str(path)])


def test_data_that_cannot_be_had(tmp_path: Path) -> None:
    path = write_task(tmp_path, tmp_path / "missing.jsonl")
    with pytest.raises(InputError, match="cannot be had here"):
        harness_metrics(build("qwen3_moe"), tiny_tokenizer(), [str(path)])


def test_tasks_that_run_generated_code_are_refused(task_file: Path) -> None:
    write_task(task_file.parent, task_file.parent / "data.jsonl", "unsafe_code: true")
    with pytest.raises(InputError, match="code that the model writes"):
        harness_metrics(build("qwen3_moe"), tiny_tokenizer(), [str(task_file)])
