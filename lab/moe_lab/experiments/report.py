"""Pages and tables of results."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_lab.files import atomic_file, write_json, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Formats a Markdown table; the text of the cells is not escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


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
