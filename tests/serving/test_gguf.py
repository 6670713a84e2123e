"""The GGUF reader against files written here byte by byte, and the comparison with config.json."""

import struct

import pytest

from moeprune.artifacts.errors import InputError
from moeprune.serving.gguf import differences, read_gguf

QWEN = {"model_type": "qwen3_moe", "norm_topk_prob": True}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 2,
    "topk_group": 1,
}
SAID = {
    "expert_count": 6,
    "expert_used_count": 2,
    "expert_gating_func": 2,
    "expert_weights_norm": True,
    "expert_weights_scale": 2.5,
    "expert_group_count": 2,
    "expert_group_used_count": 1,
}


def text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def pair(key, value):
    if isinstance(value, bool):
        return text(key) + struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return text(key) + struct.pack("<II", 4, value)
    if isinstance(value, float):
        return text(key) + struct.pack("<If", 6, value)
    if isinstance(value, list):
        return text(key) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    return text(key) + struct.pack("<I", 8) + text(value)


def write(path, values, tensors):
    data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    data += b"".join(pair(key, value) for key, value in values.items())
    for name, dims in tensors.items():
        data += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, 0, 0)
    path.write_bytes(data)
    return path


def made(folder, said, *, experts=6, file_type=0):
    values = {"general.architecture": "deepseek2", "general.file_type": file_type, "tokenizer.ggml.tokens": ["a", "é"]}
    values |= {f"deepseek2.{key}": value for key, value in said.items()}
    tensors = {"blk.1.ffn_up_exps.weight": (32, 16, experts), "token_embd.weight": (32, 128)}
    return read_gguf(write(folder / "m.gguf", values, tensors))


def test_every_kind_of_value_and_the_tensors_are_read(tmp_path):
    gguf = made(tmp_path, SAID, file_type=32)
    assert gguf.architecture == "deepseek2"
    assert gguf.dtype == "bfloat16"
    assert gguf.values["tokenizer.ggml.tokens"] == ["a", "é"]
    assert gguf.about_experts() == SAID
    assert gguf.expert_counts() == {"blk.1.ffn_up_exps.weight": 6}
    assert made(tmp_path, SAID, file_type=15).dtype == "quantised"


def test_a_file_that_says_the_same_has_no_problem(tmp_path):
    assert differences(made(tmp_path, SAID), DEEPSEEK, count=6, top_k=2) == ([], [])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", 8),
        ("expert_used_count", 1),
        ("expert_gating_func", 1),
        ("expert_weights_norm", False),
        ("expert_weights_scale", 1.0),
        ("expert_group_count", 1),
        ("expert_group_used_count", 2),
    ],
)
def test_each_routing_key_that_differs_is_a_problem(tmp_path, key, value):
    problems, _ = differences(made(tmp_path, {**SAID, key: value}), DEEPSEEK, count=6, top_k=2)
    assert len(problems) == 1
    assert f"deepseek2.{key} is {value!r}" in problems[0]


def test_a_rule_that_the_file_leaves_open_is_a_note_not_a_problem(tmp_path):
    said = {key: value for key, value in SAID.items() if key != "expert_weights_norm"}
    problems, notes = differences(made(tmp_path, said), DEEPSEEK, count=6, top_k=2)
    assert problems == []
    assert "expert_weights_norm is absent" in notes[0]


def test_tensors_count_more_than_keys(tmp_path):
    problems, _ = differences(made(tmp_path, SAID, experts=8), DEEPSEEK, count=6, top_k=2)
    assert problems == ["blk.1.ffn_up_exps.weight holds 8 experts, config.json says 6"]


@pytest.mark.parametrize("cut", [2, 10, 60])
def test_files_that_are_not_gguf_or_end_early_are_bad_input(tmp_path, cut):
    made(tmp_path, SAID)
    path = tmp_path / "m.gguf"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(InputError, match=r"m\.gguf"):
        read_gguf(path)
    with pytest.raises(InputError, match="no such file"):
        read_gguf(tmp_path / "none.gguf")
