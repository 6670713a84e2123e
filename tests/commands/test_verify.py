"""`moeprune verify` and `moeprune export` as people call them: transformers for real, and every kind of bad input."""

import json
import os
import subprocess
import sys
import venv

import pytest

from moeprune.artifacts.errors import InputError
from moeprune.checkpoint.prune import prune_checkpoint
from moeprune.cli import app
from moeprune.serving.engines import patience
from tests.checkpoint.sources import plan_for
from tests.tiny import save_tiny

ENVIRONMENT = os.environ | {"COLUMNS": "120"}


def moeprune(*words, cwd):
    command = [sys.executable, "-m", "moeprune", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=ENVIRONMENT, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """base/, its pruned/, other/ (another model), and what bad calls name."""
    folder = tmp_path_factory.mktemp("verify")
    save_tiny("qwen3_moe", folder / "base", dtype="bfloat16")
    save_tiny("qwen3_moe", folder / "other", seed=1)
    prune_checkpoint(folder / "base", plan_for(folder / "base"), folder / "pruned")
    venv.create(folder / "empty", with_pip=False, symlinks=True)
    (folder / "vllm").mkdir()  # a folder of that name is no engine
    (folder / "full").mkdir()
    (folder / "full" / "mine.txt").write_text("keep me")
    (folder / "no.gguf").write_text("not one")
    (folder / "llama.cpp").mkdir()
    (folder / "llama.cpp" / "convert_hf_to_gguf.py").write_text("raise SystemExit('Error: nothing is supported')\n")
    return folder


@pytest.mark.slow
def test_transformers_is_the_pruned_model_in_memory_and_the_checkpoint_says_so(folder):
    done = moeprune("verify", "pruned", "--against", "base", "--log", "logs/t.txt", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("pruned")
    record = json.loads((folder / "pruned" / "moeprune.json").read_text())
    proof = record["serving"]["transformers float32"]
    assert proof["passed"]
    assert proof["tokens_equal"] == proof["tokens"] > 50
    assert proof["difference_most"] < 1e-4
    assert proof["compared_with"] == "the base model pruned in memory"
    card = (folder / "pruned" / "README.md").read_text()
    assert card.count("## Verified in serving engines") == 1
    assert f"{proof['tokens']} of {proof['tokens']}" in card
    assert (folder / "logs" / "t.txt").is_file()


@pytest.mark.slow
def test_a_checkpoint_whose_weights_changed_does_not_pass(folder):
    """Two experts exchanged in one layer: it loads, it answers, and it is not the model the plan makes."""
    prune_checkpoint(folder / "base", plan_for(folder / "base"), folder / "spoiled")
    path = folder / "spoiled" / "model.safetensors"
    data = path.read_bytes()
    a, b = (f'"model.layers.0.mlp.experts.{i}.down_proj.weight"'.encode() for i in (0, 1))
    assert data.count(a) == data.count(b) == 1
    path.write_bytes(data.replace(a, b"@@first@@").replace(b, a).replace(b"@@first@@", b))
    done = moeprune("verify", "spoiled", "--against", "base", "--dtype", "bfloat16", "--json", cwd=folder)
    assert done.returncode == 1, done.stderr
    assert not json.loads(done.stdout)["passed"]
    assert "DIFFERENT" in (folder / "spoiled" / "README.md").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("verify",), "give the directory of a checkpoint"),
        (("verify", "nowhere"), "--against BASE"),
        (("verify", "./nowhere", "--against", "base"), "does not exist"),
        (("verify", "pruned"), "--against BASE"),
        (("verify", "pruned", "--against", "./nowhere"), "does not exist"),
        (("verify", "pruned", "--against", "other"), "another model"),
        (("verify", "base", "--against", "base"), "no plan"),
        (("verify", "pruned", "--engine", "tgi"), "transformers, vllm, llama.cpp"),
        (("verify", "pruned", "--engine", "vllm"), "--install vllm"),
        (("verify", "pruned", "--engine", "vllm", "--python", "empty/bin/python"), "has no module vllm"),
        (("verify", "pruned", "--engine", "vllm", "--python", "no.gguf"), "not an executable file"),
        (("verify", "pruned", "--engine", "vllm", "--gguf", "no.gguf"), "goes with --engine llama.cpp"),
        (("verify", "pruned", "--engine", "llama.cpp"), "--gguf FILE"),
        (("verify", "pruned", "--engine", "llama.cpp", "--gguf", "none.gguf"), "no such file"),
        (("verify", "pruned", "--engine", "llama.cpp", "--gguf", "no.gguf"), "not a GGUF file"),
        (("verify", "pruned", "--against", "base", "--dtype", "int4"), "float32, bfloat16, float16"),
        (("verify", "--install", "vllm"), "-o DIR"),
        (("verify", "--install", "tgi", "-o", "x"), "vllm, llama.cpp"),
        (("verify", "--install", "vllm", "-o", "full"), "did not make"),
        (("verify", "--install", "vllm", "-o", "empty"), "did not make"),  # an environment of the user's
        (("verify", "--install", "vllm", "-o", "no.gguf"), "did not make"),
        (("verify", "pruned", "--install", "vllm", "-o", "x"), "leave pruned out"),
        (("export", "pruned", "--llama-cpp", "vllm", "-o", "x.gguf"), "has no convert_hf_to_gguf.py"),
        (("export", "pruned", "--llama-cpp", "llama.cpp", "-o", "x.bin"), "ends in .gguf"),
        (("export", "pruned", "--llama-cpp", "llama.cpp", "-o", "no.gguf"), "--overwrite"),
        (("export", "pruned", "--llama-cpp", "llama.cpp", "-o", "x.gguf", "--format", "onnx"), "gguf"),
        (("export", "pruned", "--llama-cpp", "llama.cpp", "-o", "x.gguf", "--outtype", "q4"), "bf16"),
        (("export", "pruned", "--llama-cpp", "llama.cpp", "-o", "x.gguf", "--quantize", "Q4_K_M"), "llama-quantize"),
        (("export", "pruned", "--llama-cpp", "llama.cpp", "-o", "x.gguf", "--binary", "no.gguf"), "llama-server"),
        (("export", "pruned", "--llama-cpp", "llama.cpp", "-o", "x.gguf", "--python", "empty/bin/python"), "xllamacpp"),
        (("evaluate", "pruned", "--against", "base", "--speed", "--engine", "vllm"), "--install vllm"),
        (("evaluate", "pruned", "--against", "base", "--speed", "--engine", "tgi"), "transformers or vllm"),
        (("evaluate", "pruned", "--against", "base", "--engine", "vllm"), "--speed and --against"),
        (("evaluate", "pruned", "--against", "base", "--python", "x"), "goes with --engine vllm"),
        (("export", "./none", "--llama-cpp", "llama.cpp", "-o", "x.gguf"), "does not exist"),
    ],
)
def test_bad_input_is_explained_and_leaves_nothing(folder, monkeypatch, words, message):
    """In this process: the exit code of an InputError is what tests/test_cli.py is about."""
    monkeypatch.chdir(folder)
    before = sorted(path.name for path in folder.iterdir())
    record = (folder / "pruned" / "moeprune.json").read_bytes()
    with pytest.raises(InputError) as told:
        app(list(words), standalone_mode=False)
    assert message in str(told.value)
    assert sorted(path.name for path in folder.iterdir()) == before
    assert (folder / "pruned" / "moeprune.json").read_bytes() == record


def test_a_converter_that_refuses_is_quoted_and_leaves_nothing(folder):
    before = sorted(path.name for path in folder.iterdir())
    done = moeprune("export", "pruned", "--llama-cpp", "llama.cpp", "-o", "x.gguf", cwd=folder)
    assert done.returncode == 1, done.stderr
    assert "nothing is supported" in done.stderr
    done = moeprune("export", "pruned", "--llama-cpp", "vllm", "-o", "x.gguf", cwd=folder)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == before


def test_an_engine_that_stays_silent_is_ended():
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        with patience(process, 0.2) as late:
            assert process.stdout.readline() == ""
        assert late.is_set()
    with patience(process, 600) as late:
        pass
    assert not late.is_set()
