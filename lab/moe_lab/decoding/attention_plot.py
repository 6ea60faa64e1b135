"""Plots of the attention of translations (App. G)."""

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure
from matplotlib.font_manager import get_font_names

from moe_lab.decoding.translator import Translation
from moe_lab.errors import ConfigError
from moe_lab.files import output_file

_MAX_INCHES = 38  # the largest width or height of all cells of a plot
# Fonts for characters that matplotlib's own font lacks; only installed fonts are used.
_MORE_FONTS = (
    "Noto Sans CJK JP", "Noto Sans CJK KR", "Noto Sans CJK SC", "Noto Sans JP", "Noto Sans KR",
    "Noto Sans SC", "IPAexGothic", "IPAGothic", "VL Gothic", "TakaoGothic", "NanumGothic",
    "UnDotum", "WenQuanYi Zen Hei", "Droid Sans Fallback", "Hiragino Sans", "Apple SD Gothic Neo",
    "Yu Gothic", "Malgun Gothic", "Microsoft YaHei", "Arial Unicode MS", "Unifont",
)  # fmt: skip


def attention_plot(translation: Translation) -> Figure:
    """Plots attention: a row for each translated wordpiece, a column for each source wordpiece."""
    rows, columns = translation.attention.shape
    inches = min(0.25, _MAX_INCHES / max(rows, columns))  # the size of a cell
    figure = Figure(figsize=(2 + inches * columns, 1.5 + inches * rows), layout="constrained")
    axes = figure.subplots()
    axes.imshow(translation.attention.float().numpy(), cmap="Greys", vmin=0, vmax=1, aspect="auto")
    installed = set(get_font_names())
    labels: dict[str, Any] = {
        "parse_math": False,
        "fontsize": 40 * inches,  # points
        "fontfamily": ["sans-serif", *(font for font in _MORE_FONTS if font in installed)],
    }
    axes.set_xticks(range(columns), translation.source, rotation=90, **labels)
    axes.set_yticks(range(rows), translation.pieces, **labels)
    axes.xaxis.tick_top()
    return figure


@contextmanager
def attention_file(path: Path) -> Iterator[Callable[[Translation], None]]:
    """Yields a function that plots a translation into the file `path`.

    A .pdf gets the plots of all translations, a .png the plot of the first translation.
    """
    is_pdf = path.suffix.lower() == ".pdf"
    num_plots = 0
    no_glyphs = False
    with output_file(path) as file, PdfPages(file) if is_pdf else nullcontext() as pages:

        def add(translation: Translation) -> None:
            nonlocal num_plots, no_glyphs
            if not translation.source or (num_plots and not is_pdf):
                return
            figure = attention_plot(translation)
            with warnings.catch_warnings(record=True) as caught:
                if pages is not None:
                    pages.savefig(figure)
                else:
                    figure.savefig(file, format="png", dpi=150)
            for warning in caught:
                if re.match("Glyph .* missing from", str(warning.message)):
                    no_glyphs = True
                else:
                    warnings.warn(warning.message, stacklevel=2)
            num_plots += 1

        yield add
        if not num_plots:
            raise ConfigError("--attention must have text to plot, got only empty lines")
    if no_glyphs:
        print(f"{path} shows boxes for characters that no installed font has", file=sys.stderr)
