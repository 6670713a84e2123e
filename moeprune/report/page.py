"""The parts a report is made of, and their two written forms: a self-contained HTML page and Markdown."""

import base64
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, ClassVar

from moeprune.report.style import DPI, THEMES, Theme, png

if TYPE_CHECKING:
    from matplotlib.figure import Figure


PAGE_DPI = 120  # a figure of the full width fills the page's column


@dataclass(frozen=True)
class Cell:
    """A table cell; `look` is "best" (the lowest or highest of its column), "bad", "note" or empty."""

    text: str
    look: str = ""


@dataclass(frozen=True)
class Paragraph:
    kind: ClassVar[str] = "paragraph"
    text: str  # `code` and **strong** as in Markdown


@dataclass(frozen=True)
class Bullets:
    kind: ClassVar[str] = "bullets"
    items: Sequence[str]


@dataclass(frozen=True)
class Tiles:
    """The few figures to see first: (name, value, what it means)."""

    kind: ClassVar[str] = "tiles"
    items: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Table:
    """Columns whose name starts with "#" hold numbers and are aligned to the right, without the "#"."""

    kind: ClassVar[str] = "table"
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    note: str = ""

    @property
    def headers(self) -> list[tuple[str, bool]]:
        return [(column.removeprefix("#"), column.startswith("#")) for column in self.columns]

    @property
    def cells(self) -> list[list[Cell]]:
        return [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in self.rows]


@dataclass(frozen=True)
class Picture:
    """A figure: its file stem, how it is drawn, what it shows in words, how to read it. Drawn when first asked for."""

    kind: ClassVar[str] = "picture"
    stem: str
    draw: "Callable[[Theme], Figure]"
    alt: str
    caption: str

    @cached_property
    def images(self) -> dict[str, bytes]:
        """PNG bytes by theme."""
        return {theme.name: png(self.draw, theme) for theme in THEMES}

    @property
    def pixels_wide(self) -> int:
        """The width at which the page shows it, so that small figures are not blown up."""
        return round(int.from_bytes(self.images["light"][16:20], "big") / DPI * PAGE_DPI)

    def data_uri(self, theme: str) -> str:
        return "data:image/png;base64," + base64.b64encode(self.images[theme]).decode()


@dataclass(frozen=True)
class Code:
    kind: ClassVar[str] = "code"
    text: str
    language: str = ""


Part = Paragraph | Bullets | Tiles | Table | Picture | Code


@dataclass(frozen=True)
class Section:
    title: str
    parts: Sequence[Part] = field(default_factory=tuple)

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


@dataclass(frozen=True)
class Report:
    """A verdict in one sentence, then sections."""

    title: str
    subtitle: str
    verdict: str
    sections: Sequence[Section]

    @property
    def pictures(self) -> list[Picture]:
        return [part for section in self.sections for part in section.parts if isinstance(part, Picture)]


def render(report: Report, template: str) -> str:
    """The report through `report.html.jinja` or `report.md.jinja`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("moeprune.report"),
        autoescape=lambda name: bool(name and name.endswith(".html.jinja")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "inline": _inline_html,
        "html_cell": _html_cell,
        "md": _inline_md,
        "md_cell": _markdown_cell,
    }
    return environment.get_template(template).render(report=report, themes=[theme.name for theme in THEMES])


def _inline_html(text: str) -> str:
    """Escaped text with `code` and **strong** as HTML, marked safe for the template."""
    from markupsafe import Markup

    html = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))
    return Markup(re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", html))


def _html_cell(cell: Cell) -> str:
    """The cell's text, with an interval on a line of its own so that tables stay narrow."""
    from markupsafe import Markup

    return Markup(re.sub(r" (\[[^\[\]]*\])$", r'<span class="interval"> \1</span>', str(_inline_html(cell.text))))


def _inline_md(text: str) -> str:
    """One line of Markdown; characters that would start markup outside `code` are escaped."""
    pieces = re.split(r"(`[^`]+`)", " ".join(text.split()))
    return "".join(p if p.startswith("`") else re.sub(r"([<>|\[\]_])", r"\\\1", p) for p in pieces)


def _markdown_cell(cell: Cell) -> str:
    text = _inline_md(cell.text)
    return f"**{text}**" if cell.look == "best" and text else text
