"""The real engines, where there are any; .ci/run makes their environments and names them in the environment.

MOEPRUNE_VLLM and MOEPRUNE_XLLAMACPP: the Python that has the engine. MOEPRUNE_LLAMA_CPP: a checkout with the converter.
"""

import json
import os
from pathlib import Path

import pytest

from moeprune.checkpoint.prune import prune_checkpoint
from moeprune.commands.export import export_file
from moeprune.commands.verify import verify_checkpoint
from moeprune.reference import MODEL_DIR
from tests.checkpoint.sources import plan_for

HALF = tuple(range(0, 32, 2))


def place(name):
    """The path that the environment variable names; without it the test is skipped with the reason."""
    value = os.environ.get(name)
    if not value:
        pytest.skip(f"{name} is not set: no such engine here")
    assert Path(value).exists(), f"{name}={value} does not exist"
    return Path(value)


@pytest.fixture
def half(tmp_path):
    """The reference model with every second expert."""
    prune_checkpoint(MODEL_DIR, plan_for(MODEL_DIR, HALF), tmp_path / "half")
    return tmp_path / "half"


def proofs(directory):
    return json.loads((directory / "moeprune.json").read_text())["serving"]


def exported(checkpoint, file, output_type):
    """What `moeprune export` tells of a GGUF file of this type."""
    return export_file(
        str(checkpoint),
        file,
        place("MOEPRUNE_LLAMA_CPP"),
        output_type=output_type,
        pre_tokenizer="smollm",
        python=place("MOEPRUNE_XLLAMACPP"),
    )


@pytest.mark.slow
def test_llama_cpp_generates_what_the_pruned_model_in_memory_does(half):
    python = place("MOEPRUNE_XLLAMACPP")
    file = half.parent / "half.gguf"
    export = exported(half, file, "f32")
    assert export["routing"]["expert_count"] == 16
    assert export["proof"]["passed"], export["proof"]["problems"]
    proof = verify_checkpoint(str(half), "llama.cpp", against="reference", python=python, gguf=file)
    assert proof["passed"], proof["problems"]
    assert proof["tokens_equal"] == proof["tokens"]
    assert proof["tokenizer"] == "equal"
    assert set(proof["chats"].values()) == {"equal"}
    assert proofs(half)["llama.cpp half.gguf"]["passed"]
    # Weights rounded to 8 bits are another model: measured, not required to be equal.
    small = half.parent / "small.gguf"
    export = exported(half, small, "q8_0")
    assert small.stat().st_size < file.stat().st_size / 2
    assert export["proof"]["dtype"] == "quantised"
    assert export["proof"]["difference_mean"] > proof["difference_mean"]


@pytest.mark.slow
def test_vllm_generates_what_the_pruned_model_in_memory_does(half):
    python = place("MOEPRUNE_VLLM")
    proof = verify_checkpoint(str(half), "vllm", against="reference", python=python, log=half.parent / "log.txt")
    assert proof["passed"], proof["problems"]
    assert proof["tokens_equal"] == proof["tokens"] > 50
    assert set(proof["chats"].values()) == {"equal"}
    assert proofs(half)["vllm float32"]["passed"]
