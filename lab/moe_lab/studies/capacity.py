"""Compares models with 4 to 256 experts at equal operations (Figs. 2 and 3, Table 7).

    moe-lab study capacity
    moe-lab study capacity --seeds 4 --arms "moe-64 x4" "4xlstm x4 rate 0.016"
    moe-lab study capacity --text prose data.corpus=CORPUS
    moe-lab study capacity --text languages data.corpus=CORPUS
    moe-lab study capacity --report

The models are those of configs/small, with a width of 96, without dropout, on wordpieces with the
full softmax. The text has Python code, C++ headers and documentation. With --text prose,
data.corpus has English prose. With --text languages, it is that of `prepare_data.py languages`,
which has English and six other languages.

The models with " x4" in their names train for four times the steps. Those with " rate" or
" dropout" have other options; "experts 0.008" is the learning rate of the experts. --arms selects
such models. The page compares each model at the options with the lowest dev perplexity.

The file OUTPUT/capacity_TEXT.json (default: runs/results) keeps every finished run, so the study
can grow over many occasions and machines. A run that is interrupted continues from its checkpoint
in RUNS. To share the runs, start the command several times. A run takes 3 to 30 minutes on an idle
processor. The script also writes capacity_TEXT.md and .png; --report writes them without training
and without the corpus.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_lab.data import Wordpieces
from moe_lab.errors import ConfigError
from moe_lab.experiments.results import train_and_test
from moe_lab.experiments.stored import (
    Report,
    Run,
    Stored,
    changed_options,
    commands_of,
    record_of,
    report_stored,
    results_of,
    run_missing,
    shared_settings,
)
from moe_lab.experiments.study import Results, claims_data, config_of_run, study_parser
from moe_lab.studies._capacity_page import (
    ARMS,
    FIRST,
    LARGE,
    MIXTURES,
    MODELS,
    QUARTER,
    TEXTS,
    as_markdown,
    at_best,
    claims,
    lengths_of,
    plot,
)
from moe_lab.training.config import Config, read_config
from moe_lab.training.device import set_up_for
from moe_lab.training.metrics import bytes_of
from moe_lab.training.text import SentenceText, load_text

_FILES = {"lstm-384-96": "lstm-512-128"}  # models with a configuration of another name
SETTINGS = (
    "num_threads=1",
    "steps=1500",
    "data.corpus=sources",
    "data.kind=bpe",
    "data.vocab_size=2000",
    "model.d_model=96",
    "model.dropout=0.0",
    "optimizer.learning_rate=8e-3",
    "log.eval_every=300",
    "log.save_every=50",
    "log.tensorboard=false",
)
# Four experts of a mixture, and the layer of MoE-1-Wide, have 768 hidden units.
_OF_MODEL = dict.fromkeys(MIXTURES, ["model.moe.hidden_sizes=[192]"]) | {
    "moe-1-wide": ["model.ffn.hidden_sizes=[768]"],
    "moe-1-deep": ["model.ffn.hidden_sizes=[192, 192, 192, 192]"],
    "4xlstm": [],
    "lstm-384-96": ["model.lstm_units=384"],
    LARGE: ["model.lstm_units=192", "model.moe.hidden_sizes=[384]"],
}


def settings_of(config: Config, text: SentenceText, corpus: str) -> dict[str, Any]:
    """Returns what all runs of the study share: text, sizes and options of training."""
    if not isinstance(text.vocabulary, Wordpieces):
        raise ConfigError('data.kind must be "bpe" or "unigram" for this study, got "words"')
    return {
        "text": corpus,
        "train_tokens": text.train.num_tokens,
        "test_tokens": text.test.num_tokens,
        "test_bytes": bytes_of(text.test, text.vocabulary),
        **shared_settings(config, text),
    }


def main(arguments: Sequence[str] | None = None) -> Results:
    """Runs the study and returns the finished runs."""
    parser = study_parser(__doc__, "capacity", [*ARMS])
    parser.set_defaults(arms=[*MODELS])
    parser.add_argument("--text", choices=TEXTS, default="sources", help="the kind of the corpus")
    options = parser.parse_intermixed_args(arguments)
    name = f"capacity_{options.text}"
    path, runs_folder = options.output / f"{name}.json", Path(options.runs) / options.text

    def config_of(arm: str, seed: int, overrides: Sequence[str]) -> Config:
        model, factor, of_arm = ARMS[arm]
        config = read_config(
            f"small/{_FILES.get(model, model)}",
            [
                f"data.encoded={runs_folder / 'encoded'}",
                *SETTINGS,
                *_OF_MODEL[model],
                *overrides,
                *of_arm,
            ],
            Config,
        )
        longer = replace(config, steps=config.steps * factor)
        return config_of_run(longer, runs_folder, arm, seed)

    def run(arm: str, seed: int) -> Run:
        return record_of(train_and_test(config_of(arm, seed, options.overrides), text, [QUARTER]))

    if not options.report:
        first = config_of(FIRST, 0, options.overrides)
        if options.text != "sources" and first.data.corpus == "sources":
            raise ConfigError(f"data.corpus must be given for --text {options.text}, got sources")
        set_up_for(first)
        text = load_text(first.data)
        settings = settings_of(first, text, options.text)
        run_missing(
            [(arm, seed) for seed in options.seeds for arm in options.arms],
            run,
            path,
            settings,
            [*ARMS],
            runs_folder,
        )

    def report(stored: Stored) -> Report | None:
        results = at_best(stored.runs)
        if not lengths_of(results):
            return None
        compared = claims(results, results_of(stored.runs, ARMS))
        changed = changed_options(stored.settings, config_of(FIRST, 0, []))
        corpus = [] if options.text == "sources" else ["data.corpus=CORPUS"]
        command = ["moe-lab", "study", "capacity", "--text", options.text, *corpus]
        command += changed
        commands = commands_of(command, stored.runs, MODELS)
        page = as_markdown(name, *stored, compared, commands)
        return Report(page, claims_data(compared), plot(*stored))

    return results_of(report_stored(path, report), ARMS)
