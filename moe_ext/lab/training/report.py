"""Pages of results."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moe_ext.lab.benchmarks.harness import environment
from moe_ext.lab.files import atomic_file, write_json, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = TypeVar("Row")


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; the lines of its cells' text stay as they are."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def report_rows(
    rows: Sequence[Row],
    header: Sequence[str],
    cells: Callable[[Row], Sequence[object]],
    path: Path | None,
) -> None:
    """What a benchmark ends with: a table of its rows, and as JSON rows and environment.

    Args:
        rows: instances of a dataclass.
        header, cells: of the table, which is printed.
        path: of the JSON file; None is without.
    """
    print(markdown_table(header, map(cells, rows)))
    if path is not None:
        write_json(path, {"environment": environment(), "rows": [vars(row) for row in rows]})


def write_report(
    folder: str | Path, name: str, page: str, data: Any, figure: "Figure | None" = None
) -> None:
    """FOLDER/NAME.md and NAME.json, and the figure as NAME.png; the page is printed too."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{name}.md", page)
    write_json(folder / f"{name}.json", data)
    if figure is not None:
        with atomic_file(folder / f"{name}.png") as file:
            figure.savefig(file, format="png")
    print(page)
    suffixes = ".md and .json" if figure is None else ".md, .json and .png"
    print(f"also in {folder}/{name}{suffixes}")
