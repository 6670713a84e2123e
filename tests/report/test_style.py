"""Numbers read well: digits follow the interval, signs are real, nothing prints a minus before a zero."""

import pytest

from moeprune.report.style import amount, change, data_size, duration, interval, listed, number, percent, points


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0.1134, 0.1042, 0.1213), "0.113 [0.104, 0.121]"),
        ((1.4234, 1.3511, 1.4960), "1.42 [1.35, 1.50]"),
        ((0.0021, 0.0019, 0.0023), "0.00210 [0.00190, 0.00230]"),
        ((164.2, 148.3, 181.9), "164 [148, 182]"),
        ((-0.021, -0.035, 0.002), "−0.021 [−0.035, 0.002]"),
        ((0.5, 0.5, 0.5), "0.500 [0.500, 0.500]"),
        ((0.25, None, None), "0.250"),
    ],
)
def test_interval(arguments: tuple[float, float | None, float | None], text: str) -> None:
    assert interval(*arguments) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12, "12"), (34.42, "34.4"), (-0.5, "−0.500"), (3.2e-7, "3.20e-07"), (123456.7, "123,457")],
)
def test_number(value: float, text: str) -> None:
    assert number(value) == text


def test_units() -> None:
    assert amount(3884416) == "3.88 M"
    assert amount(235e9) == "235 B"
    assert data_size(7768832) == "7.77 MB"
    assert data_size(512) == "512 bytes"
    assert (duration(0.42), duration(58), duration(600), duration(7500)) == ("0.4 s", "58 s", "10 min", "2 h 5 min")


def test_changes() -> None:
    assert change(60, 100) == "−40 %"
    assert change(102.3, 100) == "+2.3 %"
    assert change(5, 0) == ""
    assert percent(0.387) == "39 %"
    assert (points(-0.15), points(0.02), points(-0.001)) == ("−0.15", "+0.02", "0.00")


def test_listed() -> None:
    assert [listed([]), listed(["a"]), listed("ab"), listed("abc")] == ["", "a", "a and b", "a, b and c"]
