"""The byte-level BPE tokenizer of the reference model, and the corpus as token ids.

    python tokenizer.py corpus -o tokenizer
    python tokenizer.py corpus -o tokenizer --like moeprune/reference/model  # the ids of the first model

Trains on the beginning of each training file (1.5 M characters a text domain, 1,500 trajectories), writes the tokenizer
with its chat template, and beside the text corpus/DOMAIN.SPLIT.npy: uint16 ids, documents end with <|endoftext|>.
"""

import argparse
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from moeprune.reference import MODEL_DIR

END_OF_TEXT, PAD, TURN, TURN_END = "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [
    *(END_OF_TEXT, PAD, TURN, TURN_END),  # ids 0 to 3
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
]
TRAINING_CHARACTERS = 1_500_000  # a text domain
TRAINING_TRAJECTORIES = 1_500


def records(corpus: Path, domain: str, split: str) -> list[dict[str, Any]]:
    lines = (corpus / f"{domain}.{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def domains_of(corpus: Path) -> list[str]:
    """The domains in the corpus, by name."""
    return sorted(path.name.removesuffix(".train.jsonl") for path in corpus.glob("*.train.jsonl"))


def text_of(record: dict[str, Any]) -> str:
    """A text record's text; a trajectory through the chat template."""
    if "text" in record:
        return record["text"]
    return _renderer().apply_chat_template(record["messages"], tools=record["tools"], tokenize=False)


@cache
def _renderer() -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=chat_template())


def chat_template() -> str:
    return (MODEL_DIR / "chat_template.jinja").read_text(encoding="utf-8")


def training_texts(corpus: Path) -> Iterator[str]:
    for domain in domains_of(corpus):
        characters = 0
        for count, record in enumerate(records(corpus, domain, "train")):
            if characters > TRAINING_CHARACTERS or ("messages" in record and count == TRAINING_TRAJECTORIES):
                break
            text = text_of(record)
            characters += len(text) if "text" in record else 0
            yield text


def train_tokenizer(corpus: Path, vocabulary: int) -> Any:
    """A transformers tokenizer with `vocabulary` ids at most; every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(corpus), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PAD,
        extra_special_tokens=[TURN],
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
        chat_template=chat_template(),
    )


def encode(corpus: Path, tokenizer: Any) -> dict[str, int]:
    """Writes one .npy a domain and split; returns their token counts."""
    counts: dict[str, int] = {}
    for path in sorted(corpus.glob("*.jsonl")):
        domain, split = path.name.split(".")[:2]
        ids: list[int] = []
        for record in records(corpus, domain, split):
            ids += [*tokenizer.backend_tokenizer.encode(text_of(record)).ids, 0]
        np.save(corpus / f"{domain}.{split}.npy", np.array(ids, dtype=np.uint16))
        counts[f"{domain}.{split}"] = len(ids)
    return counts


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("tokenizer"))
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--like", type=Path, metavar="DIR", help="take the tokenizer of this model, train none")
    options = parser.parse_args(arguments)
    if options.like:
        tokenizer = AutoTokenizer.from_pretrained(options.like)
    else:
        tokenizer = train_tokenizer(options.corpus, options.vocabulary)
    tokenizer.save_pretrained(options.output)
    for name, count in encode(options.corpus, tokenizer).items():
        print(f"{name}: {count} tokens")
    print(options.output)


if __name__ == "__main__":
    main()
