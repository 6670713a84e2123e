"""Figures show the numbers they were given: read back from the drawn artists, not from the pixels."""

from io import BytesIO
from typing import get_args

import numpy as np
import pytest
from PIL import Image

from moeprune.artifacts.plan import LayerPlan
from moeprune.report import draw_run
from moeprune.report.draw_run import cluster_order, interaction_figure
from moeprune.report.run_record import Measure
from moeprune.report.style import DARK, LIGHT, method_name, method_names, method_style, png
from tests.report.example_run import statistics

CRITERIA = [
    "random",
    "frequency",
    "gate_sum",
    "ean",
    "man",
    "msan",
    "weighted_ean",
    "reap",
    "reap_l2",
    "ean_ca",
    "mone",
]
HOPES = [
    {"name": "hope", "product": product, "normalise": normalise, "pairwise": pairwise}
    for product in ("norms", "outputs")
    for normalise in ("all_tokens", "co_selected")
    for pairwise in (True, False)
]


def block_matrix(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A shuffled matrix of five blocks of four experts and two dead experts, and each expert's block."""
    source = np.random.default_rng(seed)
    block = np.repeat(np.arange(5), 4)
    matrix = np.zeros((22, 22))
    matrix[:20, :20] = np.where(block[:, None] == block[None, :], 0.8, 0.02) + 0.4 * np.eye(20)
    labels = np.concatenate([block, [-1, -1]])
    order = source.permutation(22)
    return matrix[np.ix_(order, order)], labels[order]


def plan(name: str, experts: int, kept: list[int]) -> LayerPlan:
    return LayerPlan(name=name, num_experts=experts, top_k=2, kept=tuple(kept))


@pytest.mark.parametrize("seed", range(5))
def test_cluster_order_puts_blocks_together_and_the_dead_last(seed: int) -> None:
    matrix, labels = block_matrix(seed)
    order = cluster_order(matrix)
    assert sorted(order) == list(range(22))
    seen = labels[order]
    assert list(seen[-2:]) == [-1, -1]
    assert np.count_nonzero(np.diff(seen[:20])) == 4  # five runs: every block in one piece


def test_interaction_figure_shows_the_ordered_matrix_and_marks_the_pruned() -> None:
    matrix, _ = block_matrix()
    order = cluster_order(matrix)
    layer = plan("model.layers.7.mlp", 22, list(range(0, 22, 2)))
    drawn = interaction_figure({layer.name: matrix}, {layer.name: order}, [layer], LIGHT, unit="u")
    axes = drawn.axes[0]
    assert axes.get_title(loc="left") == "layer 7"
    shown = np.asarray(axes.images[0].get_array())
    np.testing.assert_allclose(shown / shown.max(), matrix[np.ix_(order, order)] / matrix.max())
    colors = axes.collections[0].get_facecolor()
    pruned = np.isclose(colors, colors[int(np.flatnonzero(order % 2 == 1)[0])]).all(axis=1)
    np.testing.assert_array_equal(pruned, np.tile(order % 2 == 1, 2))


def test_kept_map_has_a_cell_for_every_expert_of_every_layer() -> None:
    plans = [plan("model.layers.0.mlp", 8, [0, 1, 5]), plan("model.layers.1.mlp", 6, [2, 3])]
    drawn = draw_run.kept_map(plans, {"model.layers.1.mlp": [4]}, LIGHT)
    axes = drawn.axes[0]
    cells = np.ma.filled(axes.collections[0].get_array().reshape(2, 8), -1)
    assert cells.tolist() == [[1, 1, 0, 0, 0, 1, 0, 0], [0, 0, 1, 1, 0, 0, -1, -1]]
    assert axes.collections[1].get_offsets().tolist() == [[4, 1]]
    counts = [label.get_text() for label in axes.child_axes[0].get_yticklabels()]
    assert counts == ["3 / 8", "2 / 6"]


@pytest.mark.parametrize("layers", [3, 14])
def test_frequency_figure_holds_every_expert_once(layers: int) -> None:
    seen = statistics(layers=layers, experts=16, tokens=400)
    sums = seen.mix()
    plans = [plan(name, 16, list(range(0, 16, 3))) for name in sums]
    drawn = draw_run.frequency_figure(sums, plans, DARK)
    points = {"kept": [], "pruned": []}
    for axes in drawn.axes:
        for collection in axes.collections:
            points[collection.get_label()].append(collection.get_offsets())
    assert len(points["kept"]) == (layers if layers <= draw_run.PANELS else 1)
    assert len(np.concatenate(points["kept"])) == 6 * layers
    assert len(np.concatenate(points["pruned"])) == 10 * layers
    if layers <= draw_run.PANELS:
        first = sums[plans[0].name]
        np.testing.assert_allclose(
            points["kept"][0][0], [100 * first.count[0] / first.tokens, first.gated_norm_sum[0] / first.count[0]]
        )


def test_kl_bars_have_the_length_of_the_values_and_whiskers_of_the_interval() -> None:
    bars = {"prose": {"HOPE": Measure(1.4, 1.3, 1.6)}, "agent": {"HOPE": Measure(0.1)}}
    bars["prose"]["REAP"] = Measure(1.2, 1.1, 1.3)
    styles = {name: method_style({"name": name.lower()}) for name in ("HOPE", "REAP")}
    drawn = draw_run.kl_bars(bars, styles, LIGHT, notes={"prose": "not in calibration"})
    prose, agent = drawn.axes
    assert [patch.get_width() for patch in prose.patches] == [1.4, 1.2]
    assert prose.get_title(loc="left") == "prose  (not in calibration)"
    segments = [c for c in prose.collections if c.get_segments()]
    np.testing.assert_allclose(segments[0].get_segments()[0][:, 0], [1.3, 1.6])
    assert [patch.get_width() for patch in agent.patches] == [0.1]
    assert any("not measured" in text.get_text() for text in agent.texts)


def test_a_bar_far_beyond_the_others_is_broken_off() -> None:
    values = {"HOPE": 0.02, "REAP": 0.07, "random": 3.3}
    bars = {"agent": {name: Measure(value) for name, value in values.items()}}
    styles = {name: method_style({"name": name.lower()}) for name in values}
    axes = draw_run.kl_bars(bars, styles, LIGHT, notes={}).axes[0]
    assert axes.get_xlim()[1] < 0.3
    texts = {text.get_text().strip(): text.get_position()[0] for text in axes.texts}
    assert texts["//"] == pytest.approx(0.14)
    assert texts["3.30"] < axes.get_xlim()[1]


def test_every_method_looks_different() -> None:
    styles = [method_style(criterion) for criterion in [*({"name": name} for name in CRITERIA), *HOPES]]
    assert len(set(styles)) == len(styles)
    colors_and_markers = [(style.color, style.marker) for style in styles]
    assert len(set(colors_and_markers)) >= len(styles) - 2


def test_the_criteria_of_the_package_have_styles() -> None:
    from moeprune.selection.criteria.table import AnyCriterion
    from moeprune.selection.options import SelectionOptions

    assert get_args(AnyCriterion)
    for name in CRITERIA:
        criterion = SelectionOptions.model_validate({"criterion": {"name": name}}).criterion
        assert method_style(criterion.model_dump()) == method_style({"name": name})


def test_method_names_are_short_where_they_can_be_and_distinct_always() -> None:
    assert method_names([{"name": "hope"}, {"name": "reap"}]) == ["HOPE", "REAP"]
    both = method_names([HOPES[0], HOPES[2], {"name": "reap"}])
    assert both == ["HOPE (norms, all_tokens)", "HOPE (norms, co_selected)", "REAP"]
    assert len(set(method_names([{"name": "random", "seed": 0}, {"name": "random", "seed": 1}]))) == 2
    assert len(set(method_names([{"name": "mine"}, {"name": "mine"}]))) == 2
    assert method_name({"name": "my_package.scores:Mine"}) == "my_package.scores:Mine"


def test_png_is_the_same_every_time_and_in_the_theme() -> None:
    plans = [plan("a", 4, [0, 1])]
    light = [png(lambda theme: draw_run.kept_map(plans, {}, theme), LIGHT) for _ in range(2)]
    dark = png(lambda theme: draw_run.kept_map(plans, {}, theme), DARK)
    assert light[0] == light[1]
    corners = [Image.open(BytesIO(data)).convert("RGB").getpixel((0, 0)) for data in (light[0], dark)]
    assert corners == [(255, 255, 255), (25, 28, 33)]
