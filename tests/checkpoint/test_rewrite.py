"""Tokenizer, templates, remote code and whatever else is there arrive byte for byte, from any kind of source (R39)."""

import json
import os
import stat

import pytest
from transformers import AutoTokenizer

from moeprune.artifacts.errors import InputError
from moeprune.checkpoint.card import split_front_matter
from moeprune.checkpoint.prune import prune_checkpoint
from moeprune.checkpoint.record import name_and_revision
from tests.checkpoint.sources import files, plan_for
from tests.tiny import save_tiny

CHAT = [
    {"role": "user", "content": "what is 2 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]},
    {"role": "tool", "content": "4"},
]
MADE = {"README.md", "moeprune.json", "config.json"}


@pytest.fixture
def source(tmp_path):
    source = save_tiny("qwen3_moe", tmp_path / "models--org--tiny-moe" / "snapshots" / "abc123")
    (source / "modeling_custom.py").write_text("# remote code\n")
    (source / "tokenizer.model").write_bytes(bytes(range(256)))
    (source / "sub" / "deep").mkdir(parents=True)
    (source / "sub" / "deep" / "preprocessor_config.json").write_text('{"a": 1}')
    (source / "empty.txt").write_bytes(b"")
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    for name in (".git", ".cache", "__pycache__"):
        (source / name).mkdir()
        (source / name / "junk").write_text("x")
    return source


def others(directory):
    return {
        name: data
        for name, data in files(directory).items()
        if name not in MADE and not name.endswith(".safetensors") and not name.startswith((".", "__"))
    }


def test_every_other_file_is_carried_over(source, tmp_path):
    report = prune_checkpoint(source, plan_for(source), tmp_path / "out")
    assert others(tmp_path / "out") == others(source)
    assert set(report.copied) == set(others(source))
    assert {name for name in files(tmp_path / "out") if name.startswith((".", "__"))} == set()
    record = json.loads((tmp_path / "out" / "moeprune.json").read_text())
    assert set(record["hashes"]) == {*others(source), "config.json", "model.safetensors#header"}


@pytest.mark.parametrize("template", ["file", "tokenizer_config", "none"])
def test_the_chat_template_is_there_if_it_was(template, source, tmp_path):
    text = (source / "chat_template.jinja").read_text()
    if template != "file":
        (source / "chat_template.jinja").unlink()
        config = json.loads((source / "tokenizer_config.json").read_text())
        config |= {"chat_template": text} if template == "tokenizer_config" else {}
        (source / "tokenizer_config.json").write_text(json.dumps(config))
    prune_checkpoint(source, plan_for(source), tmp_path / "out")
    before, after = (AutoTokenizer.from_pretrained(path) for path in (source, tmp_path / "out"))
    assert (after.chat_template is None) == (template == "none")
    if template != "none":
        tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
        render = [t.apply_chat_template(CHAT, tools=tools, tokenize=False) for t in (before, after)]
        assert render[0] == render[1] != ""


def test_a_hub_cache_of_read_only_links(source, tmp_path):
    """In the hub's cache every file is a link to a read-only blob."""
    expected = others(source)
    blobs = tmp_path / "models--org--tiny-moe" / "blobs"
    blobs.mkdir()
    for number, path in enumerate(p for p in sorted(source.rglob("*")) if p.is_file()):
        blob = blobs / str(number)
        path.rename(blob)
        blob.chmod(0o444)
        path.symlink_to(os.path.relpath(blob, path.parent))
    old = os.umask(0o027)
    try:
        prune_checkpoint(source, plan_for(source), tmp_path / "out")
    finally:
        os.umask(old)
    assert others(tmp_path / "out") == expected
    found = [tmp_path / "out", *(tmp_path / "out").rglob("*")]
    assert not any(path.is_symlink() for path in found)
    assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_file()} == {0o640}
    assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_dir()} == {0o750}


def test_links_to_directories_are_followed_and_loops_end(source, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "vocab.txt").write_text("v")
    (source / "linked").symlink_to(tmp_path / "elsewhere")
    (source / "sub" / "loop").symlink_to(source)
    prune_checkpoint(source, plan_for(source), tmp_path / "out")
    assert (tmp_path / "out" / "linked" / "vocab.txt").read_text() == "v"
    assert not (tmp_path / "out" / "sub" / "loop").exists()


def test_a_link_that_leads_nowhere(source, tmp_path):
    (source / "merges.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(InputError, match=r"merges\.txt"):
        prune_checkpoint(source, plan_for(source), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_card_names_the_base_model_and_keeps_its_card(source, tmp_path):
    (source / "README.md").write_text(
        "---\r\nlicense: mit\r\nlanguage: [en]\r\ntags: [chat]\r\nmodel-index: {}\r\n---\r\n# Tiny\r\nAbout it.\r\n",
        newline="",
    )
    plan = plan_for(source)
    prune_checkpoint(
        source, plan, tmp_path / "out", provenance={"config": {"model": {"path": "tiny"}}, "commit": "c0ffee"}
    )
    text = (tmp_path / "out" / "README.md").read_text()
    front, body = split_front_matter(text)
    assert front["base_model"] == "org/tiny-moe"
    assert front["license"] == "mit"
    assert set(front["tags"]) == {"chat", "moe", "moeprune", "expert-pruning"}
    assert "6 of 8" in body
    assert "`hope (product=norms)`" in body
    head, _, below = body.partition("\n---\n")
    assert below.endswith("# Tiny\nAbout it.\n")
    assert "path: tiny" in head
    record = json.loads((tmp_path / "out" / "moeprune.json").read_text())
    assert record["plan"] == plan.model_dump(mode="json")
    assert record["base_model"] | {"config_sha256": "", "moeprune": None} == {
        "name": "org/tiny-moe",
        "revision": "abc123",
        "model_type": "qwen3_moe",
        "fingerprint": plan.model_fingerprint,
        "config_sha256": "",
        "moeprune": None,
    }
    assert record["commit"] == "c0ffee"
    assert record["sizes"]["parameters"] < record["sizes"]["parameters_base"]
    assert {"python", "torch", "transformers", "moeprune"} <= set(record["versions"])


@pytest.mark.parametrize("text", ["---\n: : :\n  - ]\n---\nbody", "---\njust a word\n---\nbody", "body", ""])
def test_odd_front_matter_is_no_obstacle(text):
    front, body = split_front_matter(text)
    assert front == {}
    assert body == text.rpartition("\n")[2]


def test_the_name_of_a_plain_directory(tmp_path):
    assert name_and_revision(tmp_path / "Some-MoE") == ("Some-MoE", None)
