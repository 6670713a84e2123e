"""`moeprune export`: a GGUF file by the user's own llama.cpp, checked against the checkpoint it was made from."""

import importlib.util
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import existing_parent, read_json
from moeprune.commands.arguments import Json, finish, open_model, require_writable, start
from moeprune.commands.verify import verify_checkpoint
from moeprune.console import say, warn

if TYPE_CHECKING:
    from moeprune.serving.gguf import Gguf

SERVERS = ("build/bin/llama-server", "bin/llama-server", "llama-server")


def export(
    checkpoint: Annotated[str, typer.Argument(help="The directory of a pruned checkpoint.")],
    llama_cpp: Annotated[Path, typer.Option("--llama-cpp", help="A checkout of llama.cpp, with its converter.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write (.gguf).")],
    format: Annotated[str, typer.Option("--format", help="gguf.")] = "gguf",
    outtype: Annotated[str, typer.Option(help="auto, f32, f16, bf16 or q8_0; of the converter.")] = "auto",
    quantize: Annotated[str | None, typer.Option(help="What llama-quantize makes of it, e.g. Q4_K_M.")] = None,
    pre_tokenizer: Annotated[str | None, typer.Option(help="For a vocabulary the converter does not know.")] = None,
    converter_python: Annotated[Path | None, typer.Option(help="The converter's Python, if not this one.")] = None,
    python: Annotated[Path | None, typer.Option(help="A Python with xllamacpp, to compare tokens.")] = None,
    binary: Annotated[Path | None, typer.Option(help="A llama-server, to compare tokens.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
    as_json: Json = False,
) -> None:
    """A GGUF file by your own llama.cpp, its routing checked against config.json and its tokens in llama.cpp."""
    start(as_json)
    if format != "gguf":
        raise InputError(f"--format {format}: gguf is the one there is; vLLM and SGLang serve the checkpoint itself")
    options: dict[str, Any] = {"output_type": outtype, "quantize": quantize, "pre_tokenizer": pre_tokenizer}
    options |= {"converter_python": converter_python, "python": python, "binary": binary, "overwrite": overwrite}
    summary = export_file(checkpoint, output, llama_cpp, **options)
    finish(summary, output, as_json=as_json)
    if summary["proof"] is not None and not summary["proof"]["passed"]:
        raise typer.Exit(1)


def export_file(
    checkpoint: str,
    output: Path,
    llama_cpp: Path,
    *,
    output_type: str = "auto",
    quantize: str | None = None,
    pre_tokenizer: str | None = None,
    converter_python: Path | None = None,
    python: Path | None = None,
    binary: Path | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """What was written and how it compares; the file is put in place only when its routing agrees with config.json."""
    from moeprune.serving import gguf
    from moeprune.serving.engines import require_python
    from moeprune.serving.llama_cpp import require_one_server

    if output_type not in gguf.OUTPUT_TYPES:
        raise InputError(f"--outtype {output_type}: one of {', '.join(gguf.OUTPUT_TYPES)}")
    require_writable(output, ".gguf")
    if output.exists() and not overwrite:
        raise InputError(f"-o {output}: exists; give another name, or --overwrite to replace it")
    gguf.require_converter(llama_cpp)
    if converter_python is not None and not converter_python.is_file():
        raise InputError(f"--converter-python {converter_python}: no such file; give the bin/python of an environment")
    quantiser = gguf.require_quantiser(llama_cpp) if quantize else None
    require_one_server(python, binary)
    if python is not None:
        require_python("llama.cpp", python)
    opened = open_model(checkpoint)
    layer = opened.layers[0]
    config = read_json(opened.directory / "config.json")
    # Not in output.parent: a failure leaves no new folder.
    with tempfile.TemporaryDirectory(dir=existing_parent(output), prefix=f".{output.stem}.") as folder:
        file = Path(folder) / "plain.gguf"
        say(f"export: {llama_cpp / 'convert_hf_to_gguf.py'} writes {output_type}")
        gguf.convert(
            opened.directory,
            file,
            llama_cpp=llama_cpp,
            output_type=output_type,
            pre_tokenizer=pre_tokenizer,
            python=converter_python,
        )
        notes = _checked(gguf.read_gguf(file), config, layer.num_experts, layer.top_k)
        if quantize and quantiser is not None:
            say(f"export: {quantiser} makes {quantize}")
            smaller = Path(folder) / "quantised.gguf"
            gguf.quantise(file, smaller, quantiser=quantiser, kind=quantize)
            notes = _checked(gguf.read_gguf(smaller), config, layer.num_experts, layer.top_k)
            file = smaller
        output.parent.mkdir(parents=True, exist_ok=True)
        file.replace(output)
    header = gguf.read_gguf(output)
    say(f"export: {output.stat().st_size / 1e6:,.1f} MB, {header.architecture}, {header.about_experts()}")
    for note in notes:
        warn(note)
    proof = _proof(checkpoint, output, llama_cpp, python=python, binary=binary)
    return {"gguf": output, "routing": header.about_experts(), "notes": notes, "proof": proof}


def _checked(header: "Gguf", config: dict[str, Any], count: int, top_k: int) -> list[str]:
    """What differs from config.json without harm. Raises EngineError for what is another model."""
    from moeprune.serving.engines import EngineError
    from moeprune.serving.gguf import differences

    problems, notes = differences(header, config, count=count, top_k=top_k)
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
    return verify_checkpoint(checkpoint, "llama.cpp", python=python, binary=binary, gguf=gguf)
