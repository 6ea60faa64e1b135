"""Pages of results."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from moe_ext.files import write_json, write_text


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; the lines of its cells' text stay as they are."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def write_report(folder: str | Path, name: str, page: str, data: Any) -> None:
    """FOLDER/NAME.md and NAME.json."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{name}.md", page)
    write_json(folder / f"{name}.json", data)
