"""Headers are read as the format says, and files that are not whole are refused."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.safetensors_files import header_bytes, read_header


def test_reading_what_the_formats_own_writer_wrote(tmp_path):
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.ones(5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
    }
    tensors |= {"fp8": torch.ones(3).to(torch.float8_e4m3fn), "scalar": torch.tensor(3)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt", "who": "é"})
    entries, metadata = read_header(tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    assert metadata == {"format": "pt", "who": "é"}
    assert {entry.name: entry.shape for entry in entries} == {name: tuple(t.shape) for name, t in tensors.items()}
    for entry in entries:
        assert data[entry.start : entry.stop] == bytes(tensors[entry.name].reshape(-1).view(torch.uint8))


def test_the_formats_own_reader_reads_what_is_written(tmp_path):
    head = header_bytes([("a", "F32", (2,), 8), ("none", "F32", (0,), 0), ("b", "U8", (3,), 3)], {"format": "pt"})
    assert len(head) % 8 == 0
    (tmp_path / "x.safetensors").write_bytes(head + struct.pack("<ff", 1.5, -2) + b"\1\2\3")
    found = load_file(tmp_path / "x.safetensors")
    assert found["a"].tolist() == [1.5, -2]
    assert found["b"].tolist() == [1, 2, 3]
    assert found["none"].shape == (0,)


@pytest.mark.parametrize("keep", [0, 4, 8, 40, -1])
def test_a_file_that_is_cut_short_is_refused(keep, tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(10)}, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"x\.safetensors"):
        read_header(path)


@pytest.mark.parametrize(
    "offsets",
    [[[0, 4], [8, 12]], [[0, 8], [4, 12]], [[0, 4], [4, 8]], [[4, 8], [8, 12]]],
    ids=("hole", "overlap", "tail", "lead"),
)
def test_holes_and_overlaps_are_refused(offsets, tmp_path):
    header = {name: {"dtype": "F32", "shape": [1], "data_offsets": at} for name, at in zip("ab", offsets)}
    text = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(12))
    with pytest.raises(InputError):
        read_header(tmp_path / "x.safetensors")


def test_something_else_is_refused(tmp_path):
    (tmp_path / "lfs").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\n")
    with pytest.raises(InputError, match="lfs"):
        read_header(tmp_path / "lfs")
