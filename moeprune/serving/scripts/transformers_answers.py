"""Answers of transformers, as JSON. Runs in the current environment or in one with another release of transformers.

python transformers_answers.py REQUEST.json ANSWERS.json
"""

import json
import sys
import time
from pathlib import Path
from typing import Any


def main(request_path: str, answers_path: str) -> None:
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    started = time.monotonic()
    dtype = getattr(torch, request["dtype"])
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(request["model"])
    seconds = time.monotonic() - started
    answers = {
        "engine": "transformers",
        "version": transformers.__version__,
        "load_seconds": seconds,
        "answers": [_answer(torch, model, ids, request["new_tokens"]) for ids in request["prompts"]],
        "tokenized": [tokenizer(text)["input_ids"] for text in request["texts"]],
        "rendered": [_rendered(tokenizer, chat) for chat in request["chats"]],
    }
    Path(answers_path).write_text(json.dumps(answers), encoding="utf-8")


def _answer(torch: Any, model: Any, ids: list[int], new_tokens: int) -> dict[str, list[Any]]:
    prompt = torch.tensor([ids])
    with torch.no_grad():
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    tokens = output.sequences[0, len(ids) :].tolist()
    likely = [torch.log_softmax(step[0].double(), dim=-1)[token] for step, token in zip(output.logits, tokens)]
    return {"tokens": tokens, "log_probabilities": [float(value) for value in likely]}


def _rendered(tokenizer: Any, chat: dict[str, Any]) -> list[int]:
    messages = json.loads(json.dumps(chat["messages"]))
    for message in messages:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    output = tokenizer.apply_chat_template(
        messages, tools=chat["tools"], tokenize=True, add_generation_prompt=chat["add_generation_prompt"]
    )
    return list(output["input_ids"]) if hasattr(output, "keys") else list(output)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
