"""Numbers as people read them: sensible digits, intervals, sizes."""

import math
import re
from collections.abc import Iterable


def interval(value: float, low: float | None = None, high: float | None = None) -> str:
    """`0.113 [0.104, 0.121]`, with as many digits as the interval's width supports; the value alone without one."""
    if low is None or high is None:
        return number(value)
    width = high - low
    places = _places(max(abs(value), abs(low), abs(high))) if width <= 0 else 1 + math.ceil(-math.log10(width))
    places = min(6, max(0, places, _places(value) - 1))
    return f"{_fixed(value, places)} [{_fixed(low, places)}, {_fixed(high, places)}]"


def number(value: float) -> str:
    """Three significant digits; whole numbers and large ones in full, very small ones with an exponent."""
    if value == 0:
        return "0"
    if float(value).is_integer() and abs(value) < 1e6:
        return f"{int(value):,}"
    if abs(value) < 1e-4:
        return _minus(f"{value:.2e}")
    return _fixed(value, _places(value))


def rough(value: float) -> str:
    """Two significant digits, for sentences."""
    return _fixed(value, max(0, _places(value) - 1))


def share(value: float, low: float | None = None, high: float | None = None) -> str:
    """A share between 0 and 1 with two decimals: `0.85 [0.71, 0.93]`."""
    return f"{value:.2f}" if low is None or high is None else f"{value:.2f} [{low:.2f}, {high:.2f}]"


def points(moved: float) -> str:
    """The difference of two shares, signed: `−0.15`."""
    text = _fixed(moved, 2)
    return f"+{text}" if moved > 0 and text != "0.00" else text


def percent(share: float, *, places: int = 0) -> str:
    """0.387 -> `39 %`."""
    return f"{_fixed(100 * share, places)} %"


def change(value: float, base: float) -> str:
    """The relative change from base, signed: `−39 %`."""
    if not base:
        return ""
    relative = (value - base) / base
    text = _fixed(100 * relative, 1 if abs(relative) < 0.1 else 0)
    return f"+{text} %" if relative > 0 else f"{text} %"


def amount(value: float) -> str:
    """3884416 -> `3.88 M`."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{_fixed(value / limit, _places(value / limit))} {unit}"
    return number(value)


def data_size(value: float) -> str:
    """7768832 -> `7.77 MB` (decimal units, as file systems and hubs count)."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= limit:
            return f"{_fixed(value / limit, _places(value / limit))} {unit}"
    return f"{int(value)} bytes"


def duration(seconds: float) -> str:
    """Seconds below two minutes, else minutes, else hours and minutes."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"


def _places(value: float) -> int:
    """Decimals that give three significant digits."""
    return max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0


def _fixed(value: float, places: int) -> str:
    return _minus(f"{value:,.{places}f}")


def _minus(text: str) -> str:
    """A real minus sign, and none before a zero."""
    digits = text.removeprefix("-")
    return digits if digits == text or not re.search("[1-9]", text) else f"−{digits}"


def listed(words: Iterable[str]) -> str:
    """`a, b and c`."""
    *most, last = [*words] or [""]
    return f"{', '.join(most)} and {last}" if most else last
