"""How figures look: one colour and marker per method everywhere, light and dark, readable by the colour-blind."""

from collections.abc import Callable, Mapping, Sequence
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
