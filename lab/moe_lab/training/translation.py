"""Translation with the trained model of a run."""

from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from typing import Any

from moe_lab.data import ParallelText, Wordpieces
from moe_lab.decoding.beam_search import BeamSearch
from moe_lab.decoding.bleu import Bleu, corpus_bleu
from moe_lab.decoding.translator import Translator
from moe_lab.errors import ConfigError, config_errors
from moe_lab.files import write_text
from moe_lab.models import TranslationModel
from moe_lab.training.checkpoint import TrainedModel, checkpoints_of, load_run
from moe_lab.training.config import TranslationConfig, read_config
from moe_lab.training.text import parallel_text


def make_translator(
    trained: TrainedModel, search: BeamSearch, into: str | None = None, **options: Any
) -> Translator:
    """Creates the `Translator` of a trained model."""
    model, wordpieces, config = trained.model, trained.vocabulary, trained.config
    if not isinstance(config, TranslationConfig):
        raise ConfigError(f'the run\'s task must be "translation", got "{config.task}"')
    assert isinstance(model, TranslationModel) and isinstance(wordpieces, Wordpieces)
    languages = config.data.languages_with_token
    with config_errors():
        return Translator(model, wordpieces, search, into=into, languages=languages, **options)


def translations_of(trained: TrainedModel, text: ParallelText) -> list[str]:
    """Translates the sources of a text with a trained model and the default `BeamSearch`."""
    config = trained.config
    assert isinstance(config, TranslationConfig)
    into = text.target if config.data.languages_with_token else None
    translate = make_translator(trained, BeamSearch(), into)
    title = f"translating {text.source}-{text.target}" if config.log.progress else None
    return [best.text for best, *_ in translate([source for source, _ in text], title=title)]


def translated_test(run: str | Path) -> dict[str, list[str]]:
    """Translates the test part of a run, or reads the translations of an earlier call.

    The run's folder stores the translations for each step and language pair, for example in
    ``test-2000.en-fr.txt`` after step 2,000. Returns those of the newest checkpoint by pair.
    """
    run = Path(run)
    config = read_config(run / "config.toml", [], TranslationConfig)
    step = max(checkpoints_of(run).steps(), default=config.steps)
    files = {pair: run / f"test-{step}.{pair}.txt" for pair in config.data.pairs}
    if not all(file.is_file() for file in files.values()):
        trained = load_run(run, config.device)
        for file, text in zip(files.values(), parallel_text(config.data, "test"), strict=True):
            if file.is_file():
                continue
            lines = [f"{translation}\n" for translation in translations_of(trained, text)]
            write_text(file, "".join(lines))
    return {pair: file.read_text("utf-8").split("\n")[:-1] for pair, file in files.items()}


def bleu_of_test(
    run: str | Path, keep: Sequence[bool] | None = None, lowercase: bool = False
) -> dict[str, Bleu]:
    """Computes BLEU of the test part of a run, by language pair.

    `keep` says of each test sentence whether the BLEU counts it; only for a run with one language
    pair. With `lowercase`, upper and lower case count as equal.
    """
    config = read_config(Path(run) / "config.toml", [], TranslationConfig)
    scores = {}
    for text, (languages, translations) in zip(
        parallel_text(config.data, "test"), translated_test(run).items(), strict=True
    ):
        references = [target for _, target in text]
        sides = [translations, references]
        if keep is not None:
            sides = [list(compress(side, keep)) for side in sides]
        scores[languages] = corpus_bleu(*sides, language=text.target, lowercase=lowercase)
    return scores
