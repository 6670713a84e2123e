"""A report as a document: a Markdown template with holes, and that Markdown as a self-contained HTML page.

What a template puts into a hole is data: it is escaped, except for `code`, *marks* and **strong** in it. Tables,
pictures and code blocks bring their own Markdown.
"""

import base64
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeprune.artifacts.files import whole_file, write_text
from moeprune.report.style import DPI, THEMES, Theme, png

if TYPE_CHECKING:
    from jinja2 import Template
    from markdown_it import MarkdownIt
    from markupsafe import Markup
    from matplotlib.figure import Figure

PAGE_DPI = 120  # a figure of the full width fills the page's column


@dataclass(frozen=True)
class Table:
    """Columns whose name starts with "#" hold numbers: they are aligned to the right and lose the "#"."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def markdown(self) -> str:
        names = [column.removeprefix("#") for column in self.columns]
        marks = ["---:" if column.startswith("#") else ":---" for column in self.columns]
        rows = [[re.sub(r"(?<!\\)\|", r"\|", inline(cell)) for cell in row] for row in (names, *self.rows)]
        return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], marks, *rows[1:]))


@dataclass(frozen=True)
class Picture:
    """A figure: its file stem, how it is drawn, and what it shows in words. Drawn when first needed."""

    stem: str
    draw: "Callable[[Theme], Figure]"
    alt: str

    @property
    def markdown(self) -> str:
        return f"![{inline(self.alt)}](figures/{self.stem}.png)"

    @cached_property
    def images(self) -> dict[str, bytes]:
        """PNG bytes by theme."""
        return {theme.name: png(self.draw, theme) for theme in THEMES}

    @property
    def html(self) -> str:
        """The images of both themes inside the page, no wider than drawn: a small figure is not blown up."""
        light, dark = (f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in self.images.values())
        width = round(int.from_bytes(self.images["light"][16:20], "big") / DPI * PAGE_DPI)
        return (
            f'<picture><source media="screen and (prefers-color-scheme: dark)" srcset="{dark}">'
            f'<img src="{light}" alt="{escape(self.alt)}" style="max-width: {width}px"></picture>'
        )


@dataclass(frozen=True)
class Code:
    text: str
    language: str = ""

    @property
    def markdown(self) -> str:
        """A fenced block; the fence is longer than any in the text."""
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", self.text)), default=0))
        return f"{fence}{self.language}\n{self.text.rstrip()}\n{fence}"


Block = Table | Picture | Code


@dataclass(frozen=True)
class Report:
    """A Markdown template of this folder and the values of its holes; pictures are known by their stems."""

    template: str
    title: str
    values: Mapping[str, Any]
    pictures: Mapping[str, Picture]

    @cached_property
    def markdown(self) -> str:
        template = _template(self.template, finalize=_filled)
        return template.render(title=self.title, pictures=self.pictures, **self.values).rstrip() + "\n"

    @property
    def html(self) -> str:
        """The Markdown in the page's frame, a section for every heading; HTML in the Markdown is shown, not obeyed."""
        renderer = _renderer(self.pictures)
        tokens = renderer.parse(self.markdown)
        heads = [i for i, token in enumerate(tokens) if token.type == "heading_open" and token.tag == "h2"]
        parts = [renderer.renderer.render(tokens[a:b], renderer.options, {}) for a, b in pairwise([0, *heads, None])]
        titles = [re.sub(r"\\(.)", r"\1", tokens[head + 1].content) for head in heads]
        sections = [(re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-"), title) for title in titles]
        page = _template("page.html", autoescape=True)
        return page.render(title=self.title, top=_narrow(parts[0]), sections=[*zip(sections, map(_narrow, parts[1:]))])

    def save(self, directory: Path, *, formats: Collection[str]) -> list[Path]:
        """The paths of report.html and report.md, as asked for; Markdown brings figures/*.png and removes others."""
        if "md" in formats:
            for picture in self.pictures.values():
                with whole_file(directory / "figures" / f"{picture.stem}.png") as beside:
                    beside.write_bytes(picture.images["light"])
            for old in (directory / "figures").glob("*.png"):
                if old.stem not in self.pictures:
                    old.unlink()
        written = []
        for name, text in {"html": lambda: self.html, "md": lambda: self.markdown}.items():
            if name in formats:
                written.append(directory / f"report.{name}")
                write_text(written[-1], text())
        return written


def best(text: str) -> str:
    """A table cell that is the best of its column."""
    return f"**{text}**"


def bad(text: str) -> str:
    """A table cell to worry about."""
    return f"*{text}*"


def inline(text: str) -> str:
    """One line of Markdown; characters that would start other markup outside `code` are escaped."""
    pieces = re.split(r"(`[^`]+`)", " ".join(text.split()))
    special = r"([\\<>|\[\]_]|&(?=#?\w+;))"
    return "".join(piece if piece.startswith("`") else re.sub(special, r"\\\1", piece) for piece in pieces)


def _filled(value: Any) -> str:
    return value.markdown if isinstance(value, Block) else inline(str(value))


def _template(name: str, **options: Any) -> "Template":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    folder = PackageLoader("moeprune.report", ".")
    environment = Environment(loader=folder, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, **options)
    return environment.get_template(name)


def _renderer(pictures: Mapping[str, Picture]) -> "MarkdownIt":
    """CommonMark with tables; tables and figures scroll sideways on their own where the screen is narrow."""
    from markdown_it import MarkdownIt

    def image(self: Any, tokens: Sequence[Any], index: int, *_: Any) -> str:
        stem = tokens[index].attrs["src"].removeprefix("figures/").removesuffix(".png")
        return pictures[stem].html

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    markdown.add_render_rule("image", image)
    markdown.add_render_rule("table_open", lambda *_: '<div class="wide" tabindex="0"><table>')
    markdown.add_render_rule("table_close", lambda *_: "</table></div>")
    return markdown


def _narrow(html: str) -> "Markup":
    """The section, safe for the page, with the interval of a cell on a line of its own so that tables stay narrow."""
    from markupsafe import Markup

    return Markup(re.sub(r" (\[[^\[\]<]*\])(</strong>)?</td>", r'<span class="interval"> \1</span>\2</td>', html))
