"""A GGUF file, made by the user's own llama.cpp: its converter, and its quantiser where a quantised file is wanted.

The tokenizer is read by that converter from the checkpoint's own files; nothing here writes one.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from moeprune.artifacts.errors import InputError
from moeprune.serving.engines import HERE, EngineError, last_words

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
    found = shutil.which("llama-quantize")
    if found is None:
        raise InputError(
            f"--quantize: no llama-quantize in {llama_cpp} or on the search path; build it there (cmake -B build && "
            "cmake --build build --target llama-quantize), or leave --quantize out"
        )
    return Path(found)


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
            str(HERE / "convert_script.py"),
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
