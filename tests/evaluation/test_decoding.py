"""Generation: the same tokens whatever the batch, greedy by default, draws that follow the model's distribution."""

import pytest
import torch
import transformers

from moeprune.artifacts.errors import InputError
from moeprune.evaluation.decoding import GumbelNoise, end_tokens, generate
from tests.tiny import build, tiny_tokenizer

PROMPTS = [[10, 20, 30], [40, 41, 42, 43, 44, 45, 46, 47, 48], [50], [60, 61, 62, 63, 64]]


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3", "qwen3_next"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_batches_and_order_change_nothing(name: str, temperature: float) -> None:
    model = build(name)
    options = {"max_new_tokens": 8, "end_ids": [3], "temperature": temperature}
    alone = [generate(model, [prompt], **options)[0] for prompt in PROMPTS]
    assert generate(model, PROMPTS, **options) == alone
    assert generate(model, PROMPTS, batch_size=2, **options) == alone
    assert generate(model, PROMPTS[::-1], **options) == alone[::-1]


def test_greedy_is_the_argmax_of_a_whole_forward_pass() -> None:
    model, tokens = build("qwen3_moe"), list(PROMPTS[1])
    with torch.no_grad():
        for _ in range(6):
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    expected = tokens[len(PROMPTS[1]) :]
    assert generate(model, [PROMPTS[1]], max_new_tokens=6, end_ids=[3]) == [expected]
    # The end token is the last of an output that has one.
    position = expected.index(expected[2])
    assert generate(model, [PROMPTS[1]], max_new_tokens=6, end_ids=[expected[2]]) == [expected[: position + 1]]


def test_the_models_own_generation_config_is_ignored_and_kept() -> None:
    model = build("qwen3_moe")
    plain = generate(model, PROMPTS, max_new_tokens=8, end_ids=[3])
    own = transformers.GenerationConfig(
        do_sample=True, temperature=5.0, repetition_penalty=9.0, suppress_tokens=plain[0]
    )
    model.generation_config = own
    assert generate(model, PROMPTS, max_new_tokens=8, end_ids=[3]) == plain
    assert model.generation_config is own


def test_draws_follow_the_tempered_softmax() -> None:
    scores, draws = torch.tensor([2.0, 1.0, 0.0, -1.0]), 4000
    noise = GumbelNoise([[index] for index in range(draws)], 0.7, seed=0)
    picked = noise(torch.empty(0), scores.expand(draws, -1)).argmax(dim=-1)
    shares = torch.bincount(picked, minlength=4) / draws
    expected = (scores / 0.7).softmax(dim=-1)
    error = (expected * (1 - expected) / draws).sqrt()
    assert ((shares - expected).abs() < 4.5 * error).all()


def test_the_seed_changes_the_draws() -> None:
    model = build("qwen3_moe")
    options = {"max_new_tokens": 16, "end_ids": [3], "temperature": 2.0}
    assert generate(model, PROMPTS, seed=1, **options) != generate(model, PROMPTS, seed=2, **options)


def test_end_tokens_are_those_of_model_and_tokenizer() -> None:
    model, tokenizer = build("qwen3_moe"), tiny_tokenizer()
    model.generation_config.eos_token_id = [7, 4]
    assert end_tokens(model, tokenizer) == sorted({7, 4, tokenizer.eos_token_id})
    model.generation_config.eos_token_id = None
    assert end_tokens(model, tokenizer) == [tokenizer.eos_token_id]
    tokenizer.eos_token = None
    with pytest.raises(InputError, match="eos_token_id"):
        end_tokens(model, tokenizer)
