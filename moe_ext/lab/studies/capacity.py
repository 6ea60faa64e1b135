"""Compares models with 4 to 256 experts at equal operations per word (Figs. 2 and 3, Table 7).

    python scripts/studies/capacity.py data.corpus=path/to/text
    python scripts/studies/capacity.py data.corpus=path/to/text --seeds 1 2 --arms moe-4 moe-64
    python scripts/studies/capacity.py data.corpus=path/to/text --rates 4e-3 8e-3
    python scripts/studies/capacity.py --report data.corpus=path/to/text

The script trains the small-scale models of configs/small on 10.8 million words. The first seed
trains with every peak learning rate. The other seeds use the rate with the lowest dev perplexity.
The script tests each model after a quarter of the steps and after all steps. It writes capacity.md,
.json and .png to the folder OUTPUT (default: docs/results).

The study has 45 runs of 5 to 20 minutes each on one processor. --arms and --rates select some of
the runs; the page shows all finished runs. To share the runs, start the same command several times
with the same --runs. --report writes the page without training.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from moe_ext.lab.experiments.rate_search import (
    RATES,
    command_with_rates,
    parse_with_rates,
    rates_table,
    runs_at_best_rates,
)
from moe_ext.lab.experiments.report import markdown_table, write_report
from moe_ext.lab.experiments.study import (
    HOW_COMPARED,
    HOW_DECIDED,
    SMALL,
    Claim,
    Results,
    as_change,
    as_data,
    claims_data,
    claims_table,
    difference,
    mean_perplexity,
    size_cells,
    study_parser,
    widening,
)
from moe_ext.lab.models import fit_kneser_ney
from moe_ext.lab.training.config import Config, read_config
from moe_ext.lab.training.device import set_up_for
from moe_ext.lab.training.metrics import perplexity
from moe_ext.lab.training.text import SentenceText, load_text

MIXTURES = ("moe-4", "moe-16", "moe-64", "moe-256-h")  # by number of experts
DENSE = ("moe-1-wide", "moe-1-deep", "4xlstm", "lstm-512-128")
FIRST, LARGEST_FLAT, LARGE = "moe-4", "moe-64", "moe-64-2x"
ARMS = (*MIXTURES, *DENSE, LARGE)
SETTINGS = (*SMALL, "steps=4200", "log.eval_every=1050", "log.save_every=1050")
_QUARTER = 0.25
NEXT_STEP = "each increase in the number of experts lowers the perplexity"


def claims(results: Results) -> list[Claim]:
    """Returns the paper's claims; a negative difference in ln(perplexity) supports a claim."""

    def row(claim: str, a: str, b: str) -> Claim:
        return Claim(claim, f"{a} against {b}", difference(results[a], results[b]))

    rows = [row("more experts lower the perplexity at equal operations", LARGEST_FLAT, FIRST)]
    rows += [
        row(NEXT_STEP, more, fewer) for fewer, more in zip(MIXTURES, MIXTURES[1:], strict=False)
    ]
    rows += [
        row(
            "a mixture has a lower perplexity than an equally costly dense model",
            LARGEST_FLAT,
            dense,
        )
        for dense in DENSE
    ]
    rows.append(row("more operations lower the perplexity of a large mixture", LARGE, LARGEST_FLAT))
    rows += [
        Claim(
            "more training text increases the advantage of more experts",
            f"{more} against {FIRST}: difference after all steps minus difference after 25%",
            widening(results[more], results[FIRST], _QUARTER),
        )
        for more in MIXTURES[1:]
    ]
    return rows


def _five_grams(text: SentenceText, seen_tokens: int) -> dict[str, Any]:
    """Fits Kneser-Ney 5-grams to the first 25% and to all of the `seen_tokens` of a run."""
    seen = min(1.0, seen_tokens / text.train.num_tokens)
    perplexities = {}
    for share in (_QUARTER, 1.0):
        train = text.train.first(round(share * seen * len(text.train)))
        model = fit_kneser_ney(train, len(text.vocabulary))
        nll = float(model.sentence_nll(text.test).sum()) / text.test.num_tokens
        perplexities[share] = perplexity(nll)
    return {"parameters": model.num_parameters, "perplexities": perplexities}


def as_markdown(results: Results, facts: dict[str, Any], command: str) -> str:
    """Formats the Markdown page: models, their learning rates and verdicts on the claims."""
    rows = []
    for name, runs in results.items():
        if not runs:
            continue
        cost = next(iter(runs.values())).cost
        against = [as_change(difference(runs, results[FIRST], share)) for share in (_QUARTER, 1.0)]
        if name == FIRST:
            against = ["", ""]
        rows.append(
            [
                name,
                *size_cells(cost),
                len(runs),
                f"{mean_perplexity(runs, _QUARTER):.2f}",
                against[0],
                f"{mean_perplexity(runs):.2f}",
                against[1],
                f"{statistics.median(r.words_per_second for r in runs.values()):,.0f}",
            ]
        )
    grams = facts["five_grams"]
    quarter, whole = (f"{grams['perplexities'][share]:.2f}" for share in (_QUARTER, 1.0))
    parameters = f"{grams['parameters'] / 1e6:.2f}M"
    rows.append(["KN-5", "", parameters, "", quarter, "", whole, "", ""])
    table = markdown_table(
        [
            "model", "ops/timestep", "parameters", "seeds", "test ppl after 25%",
            f"change from {FIRST}, 95%", "test ppl", f"change from {FIRST}, 95%", "words/s",
        ],
        rows,
    )  # fmt: skip
    rates = rates_table(facts["dev_nll"])
    verdicts = claims_table(claims(results))
    sampled = f"{facts['num_sampled']:,} sampled" if facts["num_sampled"] else "all"
    return (
        "# More experts at equal operations\n\n"
        f"```\n{command}\n```\n\n"
        f"The training part has {facts['train_tokens']:,} tokens (words and ends of sentences). A "
        f"run trains on {facts['seen_tokens']:,} of them. The test part has "
        f"{facts['test_tokens']:,} tokens. "
        f"The vocabulary has {facts['vocabulary']:,} entries. "
        f"The softmax is over {sampled} classes in training and over all classes in the test. "
        "KN-5 is a modified Kneser-Ney 5-gram model, fitted to the same text. "
        "Operations and parameters do not include embedding and softmax. "
        f"{HOW_COMPARED}\n\n"
        f"{table}\n![perplexity against the number of experts](capacity.png)\n\n"
        "The next table shows the final dev perplexity of the first seed at each peak learning "
        "rate. Each model uses the rate with the lowest perplexity. A blank cell means that the "
        f"run diverged or was not started.\n\n{rates}\n"
        f"{HOW_DECIDED}\n\n{verdicts}"
    )


def plot(results: Results) -> Figure:
    """Plots test perplexity over the number of experts, after 25% and 100% of the steps."""
    experts = [int(name.split("-")[1]) for name in MIXTURES if results[name]]
    figure = Figure(figsize=(7, 4.2), layout="constrained", dpi=150)
    axes = figure.subplots()
    for share, label in ((_QUARTER, "after 25% of the steps"), (1.0, "after all steps")):
        found = [results[name] for name in MIXTURES if results[name]]
        means = [mean_perplexity(runs, share) for runs in found]
        axes.plot(experts, means, marker="o", label=label)
        for x, runs in zip(experts, found, strict=True):
            values = [perplexity(result.nll_at(share)) for result in runs.values()]
            axes.plot([x] * len(values), values, ".", color="grey", ms=4)
    others = [(mean_perplexity(results[name]), name) for name in (*DENSE, LARGE) if results[name]]
    for place, (level, name) in enumerate(sorted(others)):  # side by side: levels may overlap
        axes.axhline(level, lw=0.8, ls="--", color="grey")
        where = axes.get_yaxis_transform()
        axes.annotate(name, (0.05 + 0.15 * place, level), xycoords=where, fontsize=7, va="bottom")
    axes.set_xscale("log", base=4)
    axes.set_xticks(experts, [str(n) for n in experts])
    axes.set(xlabel="experts", ylabel="test perplexity", title="equal operations a word")
    axes.legend()
    return figure


def main(arguments: Sequence[str] | None = None, root: Path = Path()) -> Results:
    """Runs the study and returns the finished runs."""
    parser = study_parser(__doc__, "capacity", ARMS)
    options = parse_with_rates(parser, arguments)

    configs = {
        (name, rate): read_config(
            root / "configs" / "small" / f"{name}.toml",
            [*SETTINGS, *options.overrides, f"optimizer.learning_rate={rate}"],
            Config,
        )
        for name in ARMS
        for rate in RATES
    }
    config = next(iter(configs.values()))
    set_up_for(config)
    text = load_text(config.data)
    results, dev_nll = runs_at_best_rates(configs, options, text, [_QUARTER])
    if not results[FIRST]:
        print(f"nothing to report yet: no run of {FIRST} is finished")
        return results
    seen_tokens = config.steps * config.data.tokens_per_batch
    facts = {
        "corpus": config.data.corpus,
        "train_tokens": text.train.num_tokens,
        "seen_tokens": seen_tokens,
        "dev_nll": dev_nll,
        "five_grams": _five_grams(text, seen_tokens),
        "test_tokens": text.test.num_tokens,
        "vocabulary": len(text.vocabulary),
        "num_sampled": config.model.num_sampled,
    }
    command = command_with_rates("capacity", options)
    page = as_markdown(results, facts, command)
    data = {
        **facts,
        "models": as_data(results),
        "claims": claims_data(claims(results)),
    }
    write_report(options.output, "capacity", page, data, plot(results))
    return results
