"""Figures of a grid show the numbers they were given, read back from the drawn artists."""

import numpy as np
import pytest

from moeprune.report import draw_grid as figures
from moeprune.report.run_record import Measure
from moeprune.report.style import DARK, LIGHT, method_style

STYLES = {"HOPE": method_style({"name": "hope"}), "REAP": method_style({"name": "reap"})}


def test_curves_pass_through_the_values_with_their_whiskers() -> None:
    hope = {0.25: Measure(0.1, 0.08, 0.13), 0.5: Measure(0.4, 0.3, 0.5)}
    reap = {0.25: Measure(0.2), 0.5: Measure(0.3)}
    panels = {"KL, prose": {("HOPE", ""): hope, ("REAP", ""): reap}}
    axes = figures.curves(panels, STYLES, LIGHT, logarithmic={"KL, prose": True}).axes[0]
    lines = {
        line.get_color(): line for line in axes.lines if len(line.get_xdata()) == 2 and line.get_linestyle() != "None"
    }
    assert lines[STYLES["HOPE"].color].get_ydata().tolist() == [0.1, 0.4]
    assert lines[STYLES["REAP"].color].get_ydata().tolist() == [0.2, 0.3]
    assert lines[STYLES["HOPE"].color].get_xdata() == pytest.approx([0.25, 0.5], abs=0.05)
    whiskers = [segment[:, 1].tolist() for bars in axes.collections for segment in bars.get_segments()]
    assert any(np.allclose(ends, [0.08, 0.13]) for ends in whiskers)
    assert axes.get_yscale() == "log"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["25 %", "50 %"]


def test_curves_of_two_settings_differ_in_dashes() -> None:
    panels = {"x": {("HOPE", ""): {0.5: Measure(1.0)}, ("HOPE", "tokens 9"): {0.5: Measure(2.0)}}}
    figure = figures.curves(panels, {"HOPE": STYLES["HOPE"]}, LIGHT, logarithmic={"x": False})
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["HOPE", "as in base", "tokens 9"]


def test_heat_map_frames_the_worst_domain_of_every_row() -> None:
    rows = {"a": {"prose": 2.0, "agent": 0.1}, "b": {"prose": 0.2, "agent": 3.0}, "c": {"agent": 0.0}}
    axes = figures.heat_map(rows, ["prose", "agent"], LIGHT).axes[0]
    frames = [(round(p.get_x() + p.get_width() / 2), round(p.get_y() + p.get_height() / 2)) for p in axes.patches]
    assert frames == [(0, 0), (1, 1), (1, 2)]
    values = np.ma.filled(axes.images[0].get_array(), -1.0)
    np.testing.assert_allclose(values, [[2.0, 0.1], [0.2, 3.0], [-1.0, 0.1]])  # 0 has no logarithm: the lowest colour
    assert len(axes.texts) == 5


def test_agreement_matrix_writes_every_known_value() -> None:
    table = np.array([[1.0, 0.6, np.nan], [0.6, 1.0, 0.7], [np.nan, 0.7, 1.0]])
    axes = figures.agreement_matrix(table, ["a", "b", "c"], DARK).axes[0]
    assert sorted(text.get_text() for text in axes.texts) == ["0.60", "0.60", "0.70", "0.70", "1.00", "1.00", "1.00"]


def test_scatter_has_a_mark_per_point_and_a_star_for_the_base() -> None:
    points = [figures.Point("HOPE", 4.6, Measure(0.85, 0.7, 0.95)), figures.Point("REAP", 4.6, Measure(0.8))]
    figure = figures.scatter(
        {"accuracy": points},
        STYLES,
        LIGHT,
        xlabel="MB",
        ylabels={"accuracy": "share"},
        logarithmic_y={"accuracy": False},
        base={"accuracy": figures.Point("", 7.8, Measure(1.0))},
    )
    marks = {
        (float(line.get_xdata()[0]), float(line.get_ydata()[0]))
        for line in figure.axes[0].lines
        if len(line.get_xdata())
    }
    assert marks == {(4.6, 0.85), (4.6, 0.8), (7.8, 1.0)}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["HOPE", "REAP", "unpruned"]
