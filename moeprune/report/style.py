"""How figures look: one colour and marker per method everywhere, light and dark, readable by the colour-blind.

Numbers as people read them: sensible digits, intervals, sizes.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 7.6  # inches; at the page's width one point of type is about 1.7 pixels
DPI = 200

# Okabe & Ito's colours, which stay apart under every common colour blindness.
BLUE, SKY, VERMILLION, ORANGE = "#0072B2", "#56B4E9", "#D55E00", "#E69F00"
GREEN, PURPLE, YELLOW, GREY = "#009E73", "#CC79A7", "#F0E442", "#8C8C8C"
VIOLET, SLATE = "#7B68C8", "#6A8CAF"  # for the variants of HOPE, beside its blues


@dataclass(frozen=True)
class Theme:
    """Colours of a figure's ground and writing."""

    name: str
    paper: str
    ink: str
    faint: str
    kept: str
    pruned: str


LIGHT = Theme("light", "#ffffff", "#1c1f24", "#c9ced6", "#47566b", "#DD8F00")
DARK = Theme("dark", "#191c21", "#e4e7eb", "#454b55", "#9fb0c6", "#B8780E")
THEMES = (LIGHT, DARK)


@dataclass(frozen=True)
class MethodStyle:
    """How one method is drawn, in every figure."""

    color: str
    marker: str
    hatch: str = ""


_STYLES = {
    "reap": MethodStyle(VERMILLION, "s"),
    "frequency": MethodStyle(GREEN, "^"),
    "random": MethodStyle(GREY, "X"),
    "reap_l2": MethodStyle(PURPLE, "D"),
    "ean": MethodStyle(ORANGE, "v"),
    "gate_sum": MethodStyle(GREEN, "<", "///"),
    "man": MethodStyle(ORANGE, ">", "///"),
    "msan": MethodStyle(ORANGE, "d", "xxx"),
    "weighted_ean": MethodStyle(YELLOW, "v"),
    "ean_ca": MethodStyle(YELLOW, "p", "///"),
    "mone": MethodStyle(PURPLE, "h", "///"),
    "file": MethodStyle(GREY, "*", "///"),
}
_HOPE_STYLES = {
    ("norms", "all_tokens"): MethodStyle(BLUE, "o"),
    ("norms", "co_selected"): MethodStyle(SKY, "o"),
    ("outputs", "all_tokens"): MethodStyle(VIOLET, "P", "///"),
    ("outputs", "co_selected"): MethodStyle(VIOLET, "H", "xxx"),
}
_DIAGONAL = dict(zip(_HOPE_STYLES, "Dsdp", strict=True))  # markers
_OTHERS = (MethodStyle(PURPLE, "8", "..."), MethodStyle(GREEN, "H", "..."), MethodStyle(VERMILLION, "d", "..."))
_NAMES = {"reap": "REAP", "reap_l2": "REAP-L2", "ean": "EAN", "man": "MAN", "msan": "MSAN", "ean_ca": "EAN-CA"}
_NAMES |= {"hope": "HOPE", "mone": "MoNE", "weighted_ean": "weighted EAN", "gate_sum": "gate sum", "file": "given set"}


def method_style(criterion: Mapping[str, Any]) -> MethodStyle:
    """The style of a criterion (its options as in a plan); the same in every report."""
    name = str(criterion.get("name", ""))
    if name == "hope":
        kind = _hope_kind(criterion)
        return _HOPE_STYLES[kind] if criterion.get("pairwise", True) else MethodStyle(SLATE, _DIAGONAL[kind], "...")
    return _STYLES.get(name) or _OTHERS[sum(map(ord, name)) % len(_OTHERS)]


def method_name(criterion: Mapping[str, Any], *, variant: bool = False) -> str:
    """A criterion's name for people; with its variant when several of a kind stand side by side."""
    name = str(criterion.get("name", "unknown"))
    shown = _NAMES.get(name, name)
    if not variant:
        return shown
    if name == "hope":
        product, normalise = _hope_kind(criterion)
        diagonal = "" if criterion.get("pairwise", True) else ", diagonal only"
        return f"{shown} ({product}, {normalise}{diagonal})"
    if name == "portfolio":
        return f"{shown} of {', '.join(criterion.get('criteria', ()))}"
    options = ", ".join(f"{key}={value}" for key, value in criterion.items() if key != "name")
    return f"{shown} ({options})" if options else shown


def method_names(criteria: Sequence[Mapping[str, Any]]) -> list[str]:
    """One distinct name for each: short where that tells them apart, with the variant where it does not."""
    short = [method_name(criterion) for criterion in criteria]
    names = [method_name(c, variant=short.count(s) > 1) for c, s in zip(criteria, short, strict=True)]
    seen: dict[str, int] = {}
    for index, name in enumerate(names):
        seen[name] = seen.get(name, 0) + 1
        names[index] = name if seen[name] == 1 else f"{name} #{seen[name]}"
    return names


def _hope_kind(criterion: Mapping[str, Any]) -> tuple[str, str]:
    return str(criterion.get("product", "norms")), str(criterion.get("normalise", "all_tokens"))


def styled(theme: Theme) -> AbstractContextManager[None]:
    """A context in which matplotlib draws with this theme, whatever the user's own matplotlibrc says."""
    import matplotlib
    from matplotlib import rc_context

    settings: dict[str, Any] = {
        "figure.facecolor": theme.paper,
        "axes.facecolor": theme.paper,
        "savefig.facecolor": theme.paper,
        "text.color": theme.ink,
        "axes.labelcolor": theme.ink,
        "axes.edgecolor": theme.faint,
        "xtick.color": theme.faint,
        "ytick.color": theme.faint,
        "xtick.labelcolor": theme.ink,
        "ytick.labelcolor": theme.ink,
        "grid.color": theme.faint,
        "grid.linewidth": 0.6,
        "axes.linewidth": 0.8,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 9.5,
        "axes.titleweight": "bold",
        "axes.labelsize": 9,
        "font.family": ["DejaVu Sans"],
        "font.size": 9,
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "legend.fontsize": 8.5,
        "legend.frameon": False,
        "hatch.linewidth": 0.6,
        "hatch.color": theme.paper,
    }
    defaults = {key: value for key, value in matplotlib.rcParamsDefault.items() if not key.startswith("backend")}
    every: dict[Any, Any] = {**defaults, **settings}
    return rc_context(every)


def png(draw: Callable[[Theme], "Figure"], theme: Theme) -> bytes:
    """The figure as a PNG with 256 colours (a third of the size); the same bytes for the same input."""
    from PIL import Image

    with styled(theme):
        figure = draw(theme)
        drawn, packed = BytesIO(), BytesIO()
        figure.savefig(drawn, format="png", dpi=DPI, metadata={"Software": None})
    picture = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    picture.save(packed, format="png", optimize=True)
    return packed.getvalue()


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
