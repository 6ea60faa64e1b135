"""Pages and tables of results."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moe_lab.files import atomic_file, write_json, write_text

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
    """The commands that make a page."""

    lines: str


@dataclass(frozen=True)
class Page:
    """A page of results.

    Attributes:
        title: the title.
        parts: what follows the title, in this order. A text is Markdown; empty ones are left out.
            At most one part is a `Plot`, and at most one is `Claims`.
    """

    title: str
    parts: Sequence[str | Plot | Claims | Command]

    def part(self, kind: type[Any]) -> Any:
        """Returns the first part of a kind, or None."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def as_markdown(self, name: str) -> str:
        """Formats the page of the file NAME.md."""

        def text_of(part: str | Plot | Claims | Command) -> str:
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


def new_figure(width: float, height: float, dpi: int = 150) -> "Figure":
    """Creates an empty figure, with its size in inches."""
    from matplotlib.figure import Figure  # takes half a second, and an error needs no plot

    return Figure(figsize=(width, height), layout="constrained", dpi=dpi)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Formats a Markdown table; the text of the cells is not escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def publish(folder: str | Path, name: str, page: Page, data: Any) -> None:
    """Writes a page, its data and its plot, see `write_report`."""
    plot = page.part(Plot)
    write_report(folder, name, page.as_markdown(name), data, plot and plot.figure)


def write_report(
    folder: str | Path, name: str, page: str, data: Any, figure: "Figure | None" = None
) -> None:
    """Writes page, data and figure to FOLDER/NAME.md, NAME.json and NAME.png; prints the page."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{name}.md", page)
    write_json(folder / f"{name}.json", data)
    if figure is not None:
        with atomic_file(folder / f"{name}.png") as file:
            figure.savefig(file, format="png")
    print(page)
    suffixes = ".md and .json" if figure is None else ".md, .json and .png"
    print(f"written to {folder}/{name}{suffixes}")
