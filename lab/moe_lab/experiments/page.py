"""Pages of results."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moe_lab.files import atomic_file, write_json, write_text
from moe_lab.markdown import markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Plot(NamedTuple):
    """The plot of a page, and what it shows."""

    shows: str
    figure: "Figure"


class Claims(NamedTuple):
    """The claims of a page: their table with the verdicts, and their data for JSON."""

    table: str
    data: Sequence[Any]


class Command(NamedTuple):
    lines: str


Part = str | Plot | Claims | Command  # a text is Markdown; empty ones are left out


@dataclass(frozen=True)
class Page:
    """A page of results, with at most one `Plot` and at most one `Claims`."""

    title: str
    parts: Sequence[Part]

    def part(self, kind: type[Any]) -> Any:
        """Returns the first part of a kind, or None."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def as_markdown(self, name: str) -> str:
        """Formats the page of the file NAME.md."""

        def text_of(part: Part) -> str:
            match part:
                case Plot(shows, _):
                    return f"![{shows}]({name}.png)"
                case Claims(table, _):
                    return table
                case Command(lines):
                    return f"```\n{lines}\n```"
            return part

        texts = [text_of(part).strip("\n") for part in self.parts]
        return "\n\n".join([f"# {self.title}", *filter(None, texts)]) + "\n"


def page_of_template(module: str, **fields: Any) -> Page:
    """Makes a page from the Markdown file next to a module file, with fields as in `str.format`.

    The first line is the title. Text in [[name: text]] is left out if the field is empty. An empty
    paragraph is left out. A `Plot`, `Claims` or `Command` has a paragraph of its own.
    """
    template = Path(module).with_suffix(".md").read_text("utf-8")
    title, *paragraphs = template.strip().split("\n\n")
    parts: list[Part] = []
    for paragraph in paragraphs:
        alone = re.fullmatch(r"{(\w+)}", paragraph)
        if alone:
            parts.append(fields[alone[1]])
        else:
            known = re.sub(r"\[\[(\w+): (.*?)\]\]", lambda m: m[2] * bool(fields[m[1]]), paragraph)
            lines = (line.format_map(fields) for line in known.split("\n"))
            parts.append("\n".join(re.sub(r"(?<=\S) +", " ", line).rstrip() for line in lines))
    return Page(title.format_map(fields), parts)


def table_of(columns: Mapping[str, Callable[..., object]], rows: Iterable[Sequence[Any]]) -> str:
    """Formats a Markdown table; a column has a title and a function of the values of a row."""
    return markdown_table([*columns], [[cell(*row) for cell in columns.values()] for row in rows])


def perplexity_axes(axes: Any, xlabel: str, title: str) -> None:
    """Labels the axes of learning curves on the dev part."""
    axes.set(xlabel=xlabel, ylabel="dev perplexity", yscale="log", title=title)
    for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatter("{x:.0f}")
    axes.grid(alpha=0.3, which="both")
    axes.legend()


def new_axes(width: float, height: float, columns: int = 1, dpi: int = 150) -> tuple["Figure", Any]:
    """Creates a figure, with its size in inches; returns it and its axes, one for each column."""
    from matplotlib.figure import Figure  # takes half a second, and an error needs no plot

    figure = Figure(figsize=(width, height), layout="constrained", dpi=dpi)
    return figure, figure.subplots(1, columns)


def publish(folder: str | Path, name: str, page: Page, data: Any) -> None:
    """Writes page, data and plot to FOLDER/NAME.md, NAME.json and NAME.png; prints the page."""
    folder, text, plot = Path(folder), page.as_markdown(name), page.part(Plot)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{name}.md", text)
    write_json(folder / f"{name}.json", data)
    if plot is not None:
        with atomic_file(folder / f"{name}.png") as file:
            plot.figure.savefig(file, format="png")
    print(text)
    suffixes = ".md and .json" if plot is None else ".md, .json and .png"
    print(f"written to {folder}/{name}{suffixes}")
