"""Builds the site into build/docs, or the folder that is given: python docs/build.py [FOLDER]

A warning is an error. Every link within the site must lead to a file that exists, and to an element
with the id after its "#". No page may load anything from the network. Links to other sites are not
followed.
"""

import shutil
import sys
import warnings
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sphinx.cmd.build import main as sphinx
from sphinx.deprecation import RemovedInSphinx10Warning

DOCS = Path(__file__).resolve().parent
OPTIONS = ("-W", "--keep-going", "-q", "-E", "-b", "html")


class Page(HTMLParser):
    """The ids of a page, its links, and the addresses that it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes the ids, the links and the loaded addresses of a tag."""
        values = {name: value or "" for name, value in attrs}
        self.ids.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a":
            self.links += [values["href"]] if "href" in values else []
        else:
            self.loaded += [values[name] for name in ("href", "src", "data") if name in values]


def problems(root: Path) -> list[str]:
    """A line for each broken link and for each address on the network."""
    pages = {path: Page(path) for path in sorted(root.rglob("*.html"))}
    broken = []
    for path, page in pages.items():
        where = path.relative_to(root)
        remote = [link for link in page.loaded if urlsplit(link).netloc]
        broken += [f"{where}: loads {link} from the network" for link in remote]
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            ids = pages[target].ids if target in pages else {unquote(parts.fragment)}
            if not target.is_file():
                broken.append(f"{where}: {link} does not exist")
            elif parts.fragment and unquote(parts.fragment) not in ids:
                broken.append(f"{where}: {link} has no such anchor")
    for style in root.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        if "url(http" in text or "url(//" in text or "@import" in text:
            broken.append(f"{style.relative_to(root)}: loads from the network")
    return broken


def main(arguments: list[str]) -> int:
    """Builds the site, prints what is broken, and returns the exit status."""
    folder = Path(arguments[0] if arguments else DOCS.parent / "build" / "docs").resolve()
    warnings.simplefilter("ignore", RemovedInSphinx10Warning)  # of an extension
    shutil.rmtree(DOCS / "api" / "generated", ignore_errors=True)  # stubs of former names
    status = sphinx([*OPTIONS, str(DOCS), str(folder)])
    broken = problems(folder)
    print("\n".join(broken), end="\n" if broken else "")
    return status or bool(broken)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
