"""The work of ``moe-lab inspect-experts``: reads a text, and writes what each expert sees."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from moe_lab.analysis.experts import by_specialisation, expert_reports
from moe_lab.analysis.explorer import ExpertPage, as_text
from moe_lab.analysis.routed_text import RoutedText, route_text
from moe_lab.analysis.transformers_text import route_lines
from moe_lab.data import Vocabulary
from moe_lab.files import write_text
from moe_lab.packages import require_transformers
from moe_lab.training.checkpoint import load_run
from moe_lab.training.text import load_part

_LONGEST_LINE = 2**16  # characters; longer lines are read in parts


class Routed(NamedTuple):
    title: str  # the names of the model and of its text
    spelling: Sequence[str]  # the words of the text in the order of their ids
    pieces: bool  # whether the words are wordpieces
    num_layers: int
    layers: Iterable[tuple[str, RoutedText]]  # by name; an iterator needs less memory than a list


def write_experts(routed: Routed, output: Path, *, num_contexts: int, num_sentences: int) -> None:
    """Writes OUTPUT.txt and OUTPUT.html, and prints the text of a single layer."""
    output.parent.mkdir(parents=True, exist_ok=True)
    title = f"{routed.title}: what each expert sees"
    per_layer = math.ceil(num_sentences / routed.num_layers)
    page = ExpertPage(routed.spelling, title, pieces=routed.pieces, num_sentences=per_layer)
    texts = []
    for name, layer in routed.layers:
        reports = expert_reports(layer, routed.spelling, num_contexts=num_contexts)
        reports = by_specialisation(reports)
        page.add_layer(name, layer, reports)
        texts.append((name, as_text(reports)))
    text = "\n".join(f"{name}\n\n{text}" for name, text in texts)
    if len(texts) == 1:
        text = texts[0][1]
        print(text)
    write_text(output.with_name(f"{output.name}.txt"), text)
    write_text(output.with_name(f"{output.name}.html"), page.html())
    print(f"written: {output}.txt and {output}.html")


def route_run(run: str, part: str, num_positions: int, layer: int, device: str) -> Routed:
    """Runs a model of the lab on a part of its corpus."""
    trained = load_run(run, device)
    sentences = load_part(trained.config.data, trained.vocabulary, part)
    routed = route_text(trained.model, sentences, num_positions=num_positions, layer=layer)
    title = f"{Path(run).resolve().name}, step {trained.step:,}, layer {layer}"
    pieces = not isinstance(trained.vocabulary, Vocabulary)
    return Routed(title, trained.vocabulary.words, pieces, 1, [(f"layer {layer}", routed)])


def route_transformers(
    name: str, text: str, num_positions: int, layer: int | None, device: str
) -> Routed:
    """Runs a model of transformers on a text file; layer = None keeps all layers."""
    transformers = require_transformers("--text", "transformers")
    # The import registers "moe_ext".
    plug = require_transformers("--text", "moe_ext.integrations.transformers")
    with open(text, encoding="utf-8-sig", errors="replace") as file:
        config = transformers.AutoConfig.from_pretrained(name)
        # These models have no output layer, whose logits nobody needs.
        if getattr(config, "quantization_config", None) is not None:
            model = plug.load(name, dtype=config.dtype or torch.bfloat16).base_model.to(device)
        else:
            model = transformers.AutoModel.from_pretrained(
                name, dtype="auto", experts_implementation="moe_ext"
            ).to(device)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        pieces = iter(lambda: file.readline(_LONGEST_LINE), "")
        routed = route_lines(model, tokenizer, pieces, num_positions=num_positions)
    title = f"{Path(name).name}, {Path(text).name}"
    if layer is not None:
        routed_layer = routed.layer(layer)
        name = routed.layers[layer]
        return Routed(f"{title}, {name}", routed.spelling, True, 1, [(name, routed_layer)])
    layers = ((name, routed.layer(index)) for index, name in enumerate(routed.layers))
    return Routed(title, routed.spelling, True, len(routed.layers), layers)
