"""Which files of a checkpoint hold its weights, and whether they can be read at all."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import read_json
from moeprune.checkpoint.headers import Entry
from moeprune.checkpoint.model_config import QUANTIZATION_KEYS, text_sections

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Formats whose companions keep whole experts apart, by name or by the first axis, so that experts can be cut exactly.
QUANTIZER_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
QUANTIZATION = ("fp8", "mxfp4", "compressed-tensors", "gptq", "awq", "modelopt", "auto-round", "fbgemm_fp8")


def quantization_method(directory: Path, config: Mapping[str, Any]) -> str | None:
    """What the weights were quantised with, by config.json or a quantiser's own file beside it; None: plain ones."""
    for _, section in text_sections(config):
        for key in QUANTIZATION_KEYS:
            if section.get(key):
                return str(section[key].get("quant_method") or section[key].get("quant_algo") or "an unnamed method")
    return next((method for file, method in QUANTIZER_FILES.items() if (directory / file).is_file()), None)


def require_known_quantization(directory: Path, method: str | None) -> None:
    if method is not None and method.lower() not in QUANTIZATION:
        raise InputError(
            f"{directory}: quantised with {method}, whose tensors may not be cut by expert; supported: "
            f"{', '.join(QUANTIZATION)}. Prune the unquantised checkpoint and quantise the result"
        )


def weight_files(directory: Path) -> tuple[list[str], Mapping[str, Any] | None]:
    """Names of the safetensors files that make up the model, and the index when there is one."""
    if (directory / INDEX).is_file():
        if (directory / SINGLE).is_file() and SINGLE not in (directory / INDEX).read_text(encoding="utf-8"):
            raise InputError(
                f"{directory}: has both {SINGLE} and {INDEX}, and which is the model is not clear; remove one"
            )
        index = read_json(directory / INDEX)
        if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict) or not index["weight_map"]:
            raise InputError(f"{directory / INDEX}: has no weight_map; download the checkpoint again")
        files = sorted(set(index["weight_map"].values()))
        missing = [file for file in files if not (directory / file).is_file()]
        if missing:
            raise InputError(
                f"{directory}: {missing[0]} is named in {INDEX} but is not there; download the checkpoint again"
            )
        return files, index
    if (directory / SINGLE).is_file():
        return [SINGLE], None
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in directory.glob(pattern))
    if others:
        raise InputError(
            f"{directory}: the weights are in {others[0]}, not in safetensors; convert them first, for example with "
            "transformers' save_pretrained"
        )
    raise InputError(f"{directory}: neither {SINGLE} nor {INDEX}; give the directory of a checkpoint")


def require_index_fits(directory: Path, index: Mapping[str, Any] | None, entries: list[tuple[str, Entry]]) -> None:
    found: dict[str, str] = {}
    for file, entry in entries:
        if entry.name in found:
            raise InputError(f"{directory}: {entry.name} is in {found[entry.name]} and again in {file}")
        found[entry.name] = file
    if index is None:
        return
    weight_map = index["weight_map"]
    for name in found.keys() | weight_map.keys():
        if found.get(name) != weight_map.get(name):
            raise InputError(
                f"{directory}: {name} is in {found.get(name, 'no file')}, but {INDEX} says "
                f"{weight_map.get(name, 'nothing')}"
            )
