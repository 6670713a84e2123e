"""The comparison: equal answers pass, and every way to differ is found and named."""

import math

import pytest
import torch

from moeprune.commands.verify import score
from moeprune.models.loading import LoadedModel
from moeprune.serving.answers import TOLERANCES, Answer, Answers, Score, compare, tolerance_of
from moeprune.serving.questions import questions
from tests.tiny import build, tiny_tokenizer

TOKENS = 8


@pytest.fixture(scope="module")
def asked():
    return questions(tiny_tokenizer())


@pytest.fixture(scope="module")
def model():
    return build("qwen3_moe", vocab_size=128)


def greedy(model, prompt):
    """Token by token, one whole forward each: the naive loop."""
    ids, tokens, chosen = list(prompt), [], []
    for _ in range(TOKENS):
        with torch.no_grad():
            likely = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0, -1].double(), dim=-1)
        token = int(likely.argmax())
        tokens.append(token)
        chosen.append(float(likely[token]))
        ids.append(token)
    return Answer(tuple(tokens), tuple(chosen))


@pytest.fixture(scope="module")
def right(asked, model):
    """What an engine without fault answers."""
    return Answers(
        engine="naive",
        version="1",
        answers=tuple(greedy(model, prompt) for prompt in asked.prompts),
        tokenized=asked.text_ids,
        rendered=tuple(chat.ids for chat in asked.chats),
    )


def proof(asked, found, model, *, dtype="float32"):
    scores = score(model, asked.prompts, found.answers)
    return compare(asked, found, scores, dtype=dtype, tolerance=TOLERANCES[dtype], compared_with="the model")


def test_there_are_texts_chats_tools_and_a_result(asked):
    assert [chat.name for chat in asked.chats] == ["a chat", "a chat with tools", "a tool's result"]
    assert len(asked.prompts) == len(asked.names) == 7
    assert asked.warnings == ()


def test_an_engine_without_fault_passes(asked, right, model):
    found = proof(asked, right, model)
    assert found.passed
    assert found.tokens == found.tokens_equal == 7 * TOKENS
    assert found.ties == found.outliers == 0
    assert found.difference_most < 1e-5
    assert set(found.chats.values()) == {"equal"}


def test_another_models_tokens_do_not_pass(asked, right):
    other = build("qwen3_moe", vocab_size=128, seed=1)
    for dtype in TOLERANCES:
        found = proof(asked, right, other, dtype=dtype)
        assert not found.passed
        assert found.tokens_equal < found.tokens / 2


def test_a_permuted_expert_is_seen_in_16_bits_too(asked, right):
    swapped = build("qwen3_moe", vocab_size=128)
    for module in swapped.modules():
        if type(module).__name__.endswith("Experts"):
            with torch.no_grad():
                module.down_proj[:2] = module.down_proj[[1, 0]]
    assert not proof(asked, right, swapped, dtype="bfloat16").passed


def change(right, index=0, **fields):
    first = right.answers[index]
    changed = Answer(**({"tokens": first.tokens, "log_probabilities": first.log_probabilities} | fields))
    answers = [*right.answers]
    answers[index] = changed
    return Answers(right.engine, right.version, tuple(answers), right.tokenized, right.rendered)


def test_one_wrong_token_is_named(asked, right, model):
    tokens = [*right.answers[0].tokens]
    tokens[-1] = (tokens[-1] + 1) % 100
    found = proof(asked, change(right, tokens=tuple(tokens)), model)
    assert not found.passed
    assert f"text 1: 1 of {TOKENS}" in found.problems[0]
    assert f"token {TOKENS} ({tokens[-1]})" in found.problems[0]


def test_log_probabilities_that_drift_are_found(asked, right, model):
    moved = tuple(value - 0.01 for value in right.answers[0].log_probabilities)
    found = proof(asked, change(right, log_probabilities=moved), model)
    assert not found.passed
    assert found.difference_most == pytest.approx(0.01, abs=1e-4)
    assert proof(asked, change(right, log_probabilities=moved), model, dtype="bfloat16").passed


def test_log_probabilities_that_are_no_numbers_do_not_pass(asked, right, model):
    for value in (math.nan, -math.inf):
        broken = (value,) * TOKENS
        for dtype in TOLERANCES:
            assert not proof(asked, change(right, log_probabilities=broken), model, dtype=dtype).passed
    nothing = [Score((math.nan,) * TOKENS, (math.nan,) * TOKENS) for _ in right.answers]
    found = compare(asked, right, nothing, dtype="float32", tolerance=TOLERANCES["float32"], compared_with="NaN")
    assert not found.passed


def test_a_token_without_a_log_probability_is_judged_by_its_rank(asked, right, model):
    told = (None, *right.answers[0].log_probabilities[1:])
    assert proof(asked, change(right, log_probabilities=told), model).passed


def test_other_tokens_of_a_text_and_of_a_chat_are_problems(asked, right, model):
    split = Answers(right.engine, "1", right.answers, ((1, 2), *right.tokenized[1:]), right.rendered)
    assert "other tokens: text 1 is 2 tokens" in proof(asked, split, model).problems[0]
    shown = Answers(right.engine, "1", right.answers, right.tokenized, ((1, 2), *right.rendered[1:]))
    assert proof(asked, shown, model).problems == ("naive renders a chat differently",)


def test_a_template_that_the_engine_refuses_is_a_warning(asked, right, model):
    refused = Answers(right.engine, "1", right.answers, right.tokenized, ("no filter x", *right.rendered[1:]))
    found = proof(asked, refused, model)
    assert found.passed
    assert found.chats["a chat"] == "refused: no filter x"
    assert "does not render a chat" in found.warnings[0]


def test_an_engine_that_says_nothing_does_not_pass(asked, model):
    silent = Answers("mute", "1", (Answer((), ()),) * 7, asked.text_ids, tuple(chat.ids for chat in asked.chats))
    assert "no token" in proof(asked, silent, model).problems[0]


def test_one_prompt_without_an_answer_is_named(asked, right, model):
    answers = (Answer((), ()), *right.answers[1:])
    found = proof(asked, Answers(right.engine, "1", answers, right.tokenized, right.rendered), model)
    assert found.passed
    assert f"generated no token for {asked.names[0]};" in found.warnings[-1]


def test_a_quantised_file_is_measured_and_nothing_is_required(asked, right):
    other = build("qwen3_moe", vocab_size=128, seed=1)
    scores = score(other, asked.prompts, right.answers)
    tolerance = tolerance_of("llama.cpp", "quantised")
    found = compare(asked, right, scores, dtype="quantised", tolerance=tolerance, compared_with="the model")
    assert found.passed
    assert found.difference_mean > 0.1


def test_scores_are_those_of_a_forward_a_token(asked, right, model):
    for prompt, answer, found in zip(asked.prompts, right.answers, score(model, asked.prompts, right.answers)):
        assert found == Score(
            pytest.approx(answer.log_probabilities, abs=1e-5), pytest.approx(answer.log_probabilities, abs=1e-5)
        ), prompt
        assert all(map(math.isfinite, found.best))


def test_a_tokenizer_without_a_template_is_compared_on_text():
    bare = tiny_tokenizer()
    bare.chat_template = None
    found = questions(bare)
    assert found.chats == ()
    assert "no chat template" in found.warnings[0]


def test_a_template_that_knows_no_tools_leaves_them_out():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no tools') if tools else messages[1].content }}"
    found = questions(tokenizer)
    assert [chat.name for chat in found.chats] == ["a chat"]
    assert sum("no tools" in warning for warning in found.warnings) == 2


def test_reference_prompts_fit_its_context(reference: LoadedModel):
    assert questions(reference.tokenizer).longest < 256
