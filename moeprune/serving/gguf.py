"""What a GGUF file says about its experts, and whether that is what config.json says. Standard library only.

Format: magic, version, counts, then key-value pairs and tensor descriptions, little-endian; weights are not read.

A GGUF file, made by the user's own llama.cpp: its converter, and its quantiser where a quantised file is wanted.

The tokenizer is read by that converter from the checkpoint's own files; nothing here writes one.
"""

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from moeprune.artifacts.errors import InputError
from moeprune.models.engine_limits import router_groups, text_config
from moeprune.models.families import FAMILIES
from moeprune.serving.engines import HERE, EngineError, last_words

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
GATING = {"softmax": 1, "sigmoid": 2}  # llama.cpp's expert_gating_func
FILE_TYPES = {0: "float32", 1: "float16", 32: "bfloat16"}  # general.file_type; all others are quantised
SCALE_KEYS = ("routed_scaling_factor", "router_scaling_factor", "route_scale", "moe_router_scaling_factor")


@dataclass(frozen=True)
class Gguf:
    """The header of one file."""

    path: Path
    values: dict[str, Any]  # long arrays are left out
    tensors: dict[str, tuple[int, ...]]  # name -> dimensions, the fastest first

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture", ""))

    @property
    def dtype(self) -> str:
        """ "float32", "float16", "bfloat16" or "quantised"."""
        return FILE_TYPES.get(int(self.values.get("general.file_type", -1)), "quantised")

    def about_experts(self) -> dict[str, Any]:
        """The routing keys without the architecture's name before them."""
        prefix = f"{self.architecture}."
        return {
            key.removeprefix(prefix): value
            for key, value in self.values.items()
            if key.startswith(f"{prefix}expert_") and not isinstance(value, list)
        }

    def expert_counts(self) -> dict[str, int]:
        """Tensor -> its number of experts, for every tensor that holds all experts of a layer."""
        return {name: dims[-1] for name, dims in self.tensors.items() if "_exps.weight" in name and len(dims) == 3}


def read_gguf(path: Path) -> Gguf:
    """The header. Raises InputError for a file that is not GGUF or ends too early."""
    if not path.is_file():
        raise InputError(f"{path}: no such file; give a .gguf file")
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise InputError(f"{path}: is not a GGUF file; give one that llama.cpp's converter wrote")
            _, tensors, pairs = struct.unpack("<IQQ", file.read(20))
            values = {}
            for _ in range(pairs):
                key = _string(file)
                values[key] = _value(file, _number(file, "I"))
            shapes = {}
            for _ in range(tensors):
                name = _string(file)
                dims = struct.unpack(f"<{(n := _number(file, 'I'))}Q", file.read(8 * n))
                file.read(12)  # type and offset
                shapes[name] = tuple(dims)
    except (struct.error, UnicodeDecodeError, MemoryError, OverflowError) as error:
        raise InputError(f"{path}: the GGUF header is damaged ({error}); convert again") from error
    return Gguf(path, values, shapes)


def _number(file: BinaryIO, code: str) -> Any:
    return struct.unpack(f"<{code}", file.read(struct.calcsize(f"<{code}")))[0]


def _string(file: BinaryIO) -> str:
    return file.read(_number(file, "Q")).decode("utf-8")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        if kind not in _SCALARS:
            raise struct.error(f"value type {kind}")
        return _number(file, _SCALARS[kind])
    inner, length = _number(file, "I"), _number(file, "Q")
    if inner in _SCALARS:
        size = struct.calcsize(f"<{_SCALARS[inner]}")
        return list(struct.unpack(f"<{length}{_SCALARS[inner]}", file.read(size * length)))
    return [_value(file, inner) for _ in range(length)]


def differences(gguf: Gguf, config: Mapping[str, Any], *, count: int, top_k: int) -> tuple[list[str], list[str]]:
    """(problems, notes): where the file contradicts config.json, and what it leaves to the engine's own rule.

    A routing key that is absent contradicts nothing: for many architectures llama.cpp has the rule in code. Then only
    equal tokens show that it is the right one.
    """
    metadata, problems, notes = gguf.about_experts(), [], []
    for key, wanted in _expected(config, count, top_k).items():
        if key not in metadata:
            notes.append(f"{gguf.architecture}.{key} is absent, config.json means {wanted!r}; the engine decides")
        elif not _same(metadata[key], wanted):
            problems.append(f"{gguf.architecture}.{key} is {metadata[key]!r}, config.json means {wanted!r}")
    counts = gguf.expert_counts()
    wrong = {name: experts for name, experts in counts.items() if experts != count}
    if wrong:
        name = min(wrong)
        problems.append(f"{name} holds {wrong[name]} experts, config.json says {count}")
    if not counts:
        problems.append("the file has no tensor of experts; was another model converted?")
    return problems, notes


def _expected(config: Mapping[str, Any], count: int, top_k: int) -> dict[str, Any]:
    text = text_config(config)
    family = FAMILIES.get(str(text.get("model_type"))) or FAMILIES.get(str(config.get("model_type")))
    wanted: dict[str, Any] = {"expert_count": count, "expert_used_count": top_k}
    if family is not None and family.routing.startswith("sigmoid"):
        wanted["expert_gating_func"] = GATING["sigmoid"]
    if "norm_topk_prob" in text:
        wanted["expert_weights_norm"] = bool(text["norm_topk_prob"])
    scale = next((text[key] for key in SCALE_KEYS if text.get(key) is not None), None)
    if scale is not None:
        wanted["expert_weights_scale"] = float(scale)
    groups, used = router_groups(config)
    if groups > 1:
        wanted |= {"expert_group_count": groups, "expert_group_used_count": used}
    return wanted


def _same(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, float):
        return abs(float(value) - wanted) <= 1e-6 * abs(wanted)
    return bool(value == wanted)


CONVERTER = "convert_hf_to_gguf.py"
OUTPUT_TYPES = ("auto", "f32", "f16", "bf16", "q8_0")
QUANTISERS = ("build/bin/llama-quantize", "bin/llama-quantize", "llama-quantize", "quantize")
UNKNOWN_VOCABULARY = "BPE pre-tokenizer was not recognized"


def require_converter(llama_cpp: Path) -> Path:
    """The converter in a llama.cpp checkout. Raises InputError when it is not there."""
    path = llama_cpp / CONVERTER
    if not path.is_file():
        raise InputError(f"--llama-cpp {llama_cpp}: has no {CONVERTER}; give a checkout of llama.cpp")
    return path


def require_quantiser(llama_cpp: Path) -> Path:
    """llama-quantize of the checkout, or of the search path. Raises InputError when there is none."""
    for place in QUANTISERS:
        if os.access(llama_cpp / place, os.X_OK) and (llama_cpp / place).is_file():
            return llama_cpp / place
    quantiser = shutil.which("llama-quantize")
    if quantiser is None:
        raise InputError(
            f"--quantize: no llama-quantize in {llama_cpp} or on the search path; build it there (cmake -B build && "
            "cmake --build build --target llama-quantize), or leave --quantize out"
        )
    return Path(quantiser)


def convert(
    checkpoint: Path,
    target: Path,
    *,
    llama_cpp: Path,
    output_type: str,
    pre_tokenizer: str | None = None,
    python: Path | None = None,
) -> str:
    """The converter's output. Writes `target` beside itself and renames it, so that a killed call leaves no half file.

    `python` runs it, this one by default. Raises InputError where the tokenizer is one that the converter does not know
    or a package of its requirements is missing, EngineError for anything else it refuses.
    """
    arguments = [str(checkpoint.absolute()), "--outtype", output_type]
    if pre_tokenizer is None:
        command = [str(python or sys.executable), str(require_converter(llama_cpp))]
    else:
        command = [
            str(python or sys.executable),
            str(HERE / "scripts/gguf_conversion.py"),
            str(llama_cpp.absolute()),
            pre_tokenizer,
        ]
    partial = _beside(target)
    try:
        done = _run([*command, *arguments, "--outfile", str(partial.absolute())])
        if not partial.is_file() and UNKNOWN_VOCABULARY in last_words(done):
            raise InputError(
                f"{checkpoint}: the converter does not know this BPE vocabulary's pre-tokenizer; name the one it works "
                "like with --pre-tokenizer (for example qwen2, llama-bpe, smollm or gpt-2), and compare tokens with "
                "`moeprune verify --engine llama.cpp`"
            )
        if not partial.is_file() and "ModuleNotFoundError" in done:
            raise InputError(
                f"{CONVERTER}: {last_words(done)}; install what {llama_cpp}/requirements.txt names, or give an "
                "environment that has it with --converter-python"
            )
        if not partial.is_file():
            raise EngineError(f"{CONVERTER}: {last_words(done)}")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return done


def quantise(source: Path, target: Path, *, quantiser: Path, kind: str) -> str:
    """llama-quantize's output; `target` is whole or absent."""
    partial = _beside(target)
    try:
        done = _run([str(quantiser), str(source), str(partial), kind])
        if not partial.is_file():
            raise EngineError(f"llama-quantize {kind}: {last_words(done)}")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return done


def _beside(target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    return target.with_name(f".{target.stem}.{os.getpid()}.partial.gguf")


def _run(command: Sequence[str]) -> str:
    environment = {"HF_HUB_OFFLINE": "1"} | dict(os.environ)
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        check=False,
    )
    return done.stdout
