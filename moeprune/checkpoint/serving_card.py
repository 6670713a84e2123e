"""The part of a model card that says how to load, serve and upload the checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

from moeprune.models.shipping import Note, notes, parallel_sizes, serve_flags


def serving_section(config: Mapping[str, Any], count: int, *, top_k: int, chat_template: str | None, name: str) -> str:
    """Markdown; `config` is the pruned config.json, `count` the experts of every layer, `name` what to call it."""
    sizes = parallel_sizes(config, count)
    flags = serve_flags(config, chat_template)
    parallel = [f"--tensor-parallel-size {sizes.tensor[0]}"] if sizes.tensor else []
    if sizes.tensor and sizes.tensor[0] in sizes.expert:
        parallel.append("--enable-expert-parallel")
    alone = " ".join(["vllm serve .", *flags])
    shared = " ".join([alone, *parallel])
    commands = f"{alone}\n{shared}    # over {sizes.tensor[0]} devices\n" if parallel else f"{alone}\n"
    return (
        "## Use\n\nThe layout is the base model's, so whatever serves that serves this:\n\n"
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained(".", dtype="auto", device_map="auto")\n'
        'tokenizer = AutoTokenizer.from_pretrained(".")\n```\n\n'
        f"```bash\n{commands}```\n\n"
        f"Tensor parallelism can split it over {_listed(sizes.tensor)} devices. "
        f"Expert parallelism can split {count} experts {_by(sizes.expert)}.\n\n"
        f"{_notes(notes(config, [count], top_k=top_k))}"
        "To check it in the engine you serve with, and to upload it:\n\n"
        f"```bash\nmoeprune verify . --engine vllm --python PATH/bin/python\nhf upload YOUR-NAME/{name} . .\n```\n"
    )


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) if sizes else "no power of two of"


def _by(sizes: Sequence[int]) -> str:
    small = [n for n in sizes if n <= 16]
    return f"by {', '.join(map(str, small))}" if small else "evenly by none of 2, 4, 8, 16"


def _notes(found: Sequence[Note]) -> str:
    return "".join(f"- {note}\n" for note in found) + "\n" if found else ""
