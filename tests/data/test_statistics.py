"""What the files look like does not reach the statistics: batch size, file order and padding change nothing."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeprune.artifacts.statistics import RoutingStatistics
from moeprune.data.options import Domain, Intake
from moeprune.data.trajectories import load_tokens
from moeprune.models.loading import LoadedModel
from moeprune.recording.recorder import record
from tests.data.test_trajectories import reference_records


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    """Chats and texts of 4 to about 900 tokens; the end-of-turn token, which others pad with, stands in all chats."""
    long = {"input_ids": [(7 * i) % 4096 for i in range(900)]}
    return [*reference_records("agent")[:12], {"text": "It is so."}, {"input_ids": [3, 1, 0, 3]}, long]


def measured(reference: LoadedModel, path: str, batch_tokens: int, count: Any) -> RoutingStatistics:
    intake = Intake(sequence_length=1024)
    tokens = load_tokens([Domain(name="d", path=path, count=count)], reference.tokenizer, intake)
    return record(reference.model, tokens, batch_tokens=batch_tokens)


@pytest.mark.parametrize("count", ["all", "assistant"])
def test_batch_size_and_file_order(
    reference: LoadedModel, write: Callable[..., str], tmp_path: Path, records: list[Any], count: Any
) -> None:
    one = measured(reference, write(records, "one.jsonl"), 1, count)  # every sequence alone: no padding at all
    shuffled = list(records)
    random.Random(1).shuffle(shuffled)
    write(shuffled[:4], "many/b.jsonl")
    write(shuffled[4:], "many/a.jsonl")
    for path, batch_tokens in [("one.jsonl", 8192), ("many", 8192), ("many", 700)]:
        other = measured(reference, str(tmp_path / path), batch_tokens, count)
        for layer in one.layers:
            mine, theirs = one.domains["d"][layer.name], other.domains["d"][layer.name]
            assert mine.tokens == theirs.tokens
            assert np.array_equal(mine.co_count, theirs.co_count)
            for name in ("norm_product", "gate_sum", "norm_sum", "gated_norm_sum"):
                np.testing.assert_allclose(getattr(mine, name), getattr(theirs, name), rtol=1e-5, atol=1e-9)


def test_counted_is_what_is_measured(reference: LoadedModel, write: Callable[..., str], records: list[Any]) -> None:
    path = write(records)
    for count in ("all", "assistant", "tool"):
        statistics = measured(reference, path, 8192, count)
        counted = statistics.manifest["domains"]["d"]["counted"]
        assert all(int(statistics.domains["d"][layer.name].tokens) == counted for layer in statistics.layers)
