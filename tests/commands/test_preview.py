"""What a person is shown holds what was counted."""

from io import StringIO
from typing import Any

import pytest

from moeprune.commands.preview import COUNTED, describe, example
from moeprune.data.options import Domain, Intake
from moeprune.data.trajectories import load_tokens
from moeprune.models.loading import load_tokenizer
from moeprune.reference import MODEL_DIR


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(MODEL_DIR)


def test_the_example_sets_apart_exactly_what_counts(tokenizer: Any) -> None:
    token_set = load_tokens([Domain(name="a", path="reference:agent", count="assistant", tokens=2000)], tokenizer)
    text = example(token_set, tokenizer, "a", tokens=10_000)
    shown = "".join(text.plain[span.start : span.end] for span in text.spans if span.style == COUNTED)
    plain = text.plain.replace("⟦", "").replace("⟧", "")
    whole = next(s for s in token_set.sequences if tokenizer.decode(s.ids.tolist()) == plain)
    assert shown == tokenizer.decode(whole.ids[whole.counted].tolist())
    assert text.plain.count("⟦") == text.plain.count("<|im_start|>assistant")


def test_an_example_where_all_counts_is_the_text(tokenizer: Any) -> None:
    token_set = load_tokens([Domain(name="p", path="reference:prose", tokens=2000)], tokenizer)
    text = example(token_set, tokenizer, "p", tokens=50)
    assert text.plain == tokenizer.decode(token_set.sequences[0].ids[:50].tolist()) + " …"


def test_the_table_names_every_domain_and_its_counts(tokenizer: Any) -> None:
    from rich.console import Console

    domains = [Domain(name=name, path=f"reference:{name}", tokens=3000) for name in ("agent", "prose")]
    out = StringIO()
    Console(file=out, width=200).print(describe(load_tokens(domains, tokenizer, Intake())))
    shown = out.getvalue()
    assert all(word in shown for word in ("agent", "prose", "3,000", "assistant", "of 1,025", "text 100%"))
