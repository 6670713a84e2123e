"""`moeprune export`: a GGUF file by the user's own llama.cpp, checked against the checkpoint it was made from."""

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import existing_parent, read_json
from moeprune.commands.arguments import require_writable
from moeprune.commands.verify import verify_checkpoint
from moeprune.config.load import validate
from moeprune.config.schema import RunConfig
from moeprune.console import say, warn
from moeprune.run.opened import Inputs
from moeprune.serving.engines import EngineError, require_python
from moeprune.serving.gguf import (
    OUTPUT_TYPES,
    Gguf,
    convert,
    differences,
    quantise,
    read_gguf,
    require_converter,
    require_quantiser,
)
from moeprune.serving.llama_cpp import require_one_server

SERVERS = ("build/bin/llama-server", "bin/llama-server", "llama-server")


def export_file(
    checkpoint: str,
    output: Path,
    *,
    format: str,
    llama_cpp: Path,
    output_type: str,
    quantize: str | None,
    pre_tokenizer: str | None,
    converter_python: Path | None,
    python: Path | None,
    binary: Path | None,
    overwrite: bool,
) -> dict[str, Any]:
    """What was written and how it compares; the file is in place only when its routing says what config.json says."""
    if format != "gguf":
        raise InputError(f"--format {format}: gguf is the one there is; vLLM and SGLang serve the checkpoint itself")
    if output_type not in OUTPUT_TYPES:
        raise InputError(f"--outtype {output_type}: one of {', '.join(OUTPUT_TYPES)}")
    require_writable(output, ".gguf")
    if output.exists() and not overwrite:
        raise InputError(f"-o {output}: exists; give another name, or --overwrite to replace it")
    require_converter(llama_cpp)
    if converter_python is not None and not converter_python.is_file():
        raise InputError(f"--converter-python {converter_python}: no such file; give the bin/python of an environment")
    quantiser = require_quantiser(llama_cpp) if quantize else None
    require_one_server(python, binary)
    if python is not None:
        require_python("llama.cpp", python)
    inputs = Inputs(validate(RunConfig, {"model": {"path": checkpoint}}, place="export"))
    layer = inputs.layers[0]
    config = read_json(inputs.directory / "config.json")
    # Not in output.parent: a failure leaves no new folder.
    with tempfile.TemporaryDirectory(dir=existing_parent(output), prefix=f".{output.stem}.") as folder:
        made = Path(folder) / "plain.gguf"
        say(f"export: {llama_cpp / 'convert_hf_to_gguf.py'} writes {output_type}")
        convert(
            inputs.directory,
            made,
            llama_cpp=llama_cpp,
            output_type=output_type,
            pre_tokenizer=pre_tokenizer,
            python=converter_python,
        )
        notes = _checked(read_gguf(made), config, layer.num_experts, layer.top_k)
        if quantize and quantiser is not None:
            say(f"export: {quantiser} makes {quantize}")
            smaller = Path(folder) / "quantised.gguf"
            quantise(made, smaller, quantiser=quantiser, kind=quantize)
            notes = _checked(read_gguf(smaller), config, layer.num_experts, layer.top_k)
            made = smaller
        output.parent.mkdir(parents=True, exist_ok=True)
        made.replace(output)
    header = read_gguf(output)
    say(f"export: {output.stat().st_size / 1e6:,.1f} MB, {header.architecture}, {header.about_experts()}")
    for note in notes:
        warn(note)
    proof = _proof(checkpoint, output, llama_cpp, python=python, binary=binary)
    return {"gguf": output, "routing": header.about_experts(), "notes": notes, "proof": proof}


def _checked(gguf: Gguf, config: dict[str, Any], count: int, top_k: int) -> list[str]:
    problems, notes = differences(gguf, config, count=count, top_k=top_k)
    if problems:
        raise EngineError(f"the converted file is not this model: {'; '.join(problems)}; nothing was put in place")
    return notes


def _proof(
    checkpoint: str, gguf: Path, llama_cpp: Path, *, python: Path | None, binary: Path | None
) -> dict[str, Any] | None:
    """Tokens in llama.cpp, where there is one to ask: the given one, the checkout's own server, or xllamacpp here."""
    if python is None and binary is None:
        binary = next((llama_cpp / place for place in SERVERS if (llama_cpp / place).is_file()), None)
    if python is None and binary is None and importlib.util.find_spec("xllamacpp") is None:
        warn(
            "export: tokens were not compared, no llama-server was found; give --binary or --python, or run "
            f"`moeprune verify {checkpoint} --engine llama.cpp --gguf {gguf}` later"
        )
        return None
    return verify_checkpoint(
        checkpoint,
        against=None,
        engine="llama.cpp",
        python=python,
        binary=binary,
        gguf=gguf,
        dtype="float32",
        log=None,
    )
