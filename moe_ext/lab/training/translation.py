"""Translating with the model of a run."""

from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from typing import Any

from moe_ext.lab.data import ParallelText, Wordpieces
from moe_ext.lab.decoding import BeamSearch, Bleu, Translator, corpus_bleu
from moe_ext.lab.decoding.bleu import import_bleu
from moe_ext.lab.files import write_text
from moe_ext.lab.models import TranslationModel
from moe_ext.lab.training.checkpoint import TrainedModel, checkpoints_of, load_run
from moe_ext.lab.training.config import ConfigError, TranslationConfig, read_config
from moe_ext.lab.training.text import parallel_text


def require_bleu() -> None:
    """To be called before a text is translated whose BLEU is wanted.

    Raises:
        ConfigError: sacreBLEU is not installed.
    """
    try:
        import_bleu()
    except ImportError as error:
        raise ConfigError(str(error)) from error


def make_translator(
    trained: TrainedModel, search: BeamSearch, into: str | None = None, **options: Any
) -> Translator:
    """A trained model's translator.

    Args:
        trained: from `load_run`.
        search: how translations are searched for.
        into: the language to translate into, of a model of several language pairs.
        options: further ones of `Translator`.

    Raises:
        ConfigError: it is no translation model, has not learnt that language or needs to be told
            which, or an option is out of range.
    """
    model, wordpieces, config = trained.model, trained.vocabulary, trained.config
    if not isinstance(config, TranslationConfig):
        raise ConfigError(f'the run\'s task must be "translation", got "{config.task}"')
    assert isinstance(model, TranslationModel) and isinstance(wordpieces, Wordpieces)
    pairs = config.data.pairs
    languages = sorted({pair.partition("-")[2] for pair in pairs}) if len(pairs) > 1 else []
    try:
        return Translator(model, wordpieces, search, into=into, languages=languages, **options)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def translations_of(trained: TrainedModel, text: ParallelText) -> list[str]:
    """The sources of a text translated by a trained translation model, with `BeamSearch()`.

    Raises:
        ConfigError: it has not learnt to translate into the text's language.
    """
    config = trained.config
    assert isinstance(config, TranslationConfig)
    into = text.target if len(config.data.pairs) > 1 else None
    translate = make_translator(trained, BeamSearch(), into)
    title = f"translating {text.source}-{text.target}" if config.log.progress else None
    return [best.text for best, *_ in translate([source for source, _ in text], title=title)]


def translated_test(run: str | Path) -> dict[str, list[str]]:
    """`translations_of` the run's test part, by language pair.

    They are made once and kept in the run's folder: in test-2000.en-fr.txt those of the language
    pair en-fr after step 2,000, which is the newest.

    Raises:
        ConfigError: the run has no model or its corpus cannot be read.
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


def bleu_of_test(run: str | Path, keep: Sequence[bool] | None = None) -> dict[str, Bleu]:
    """BLEU of the run's test part, by language pair.

    Args:
        run: its folder.
        keep: the sentences that count, of a run with one language pair; None is all.

    Raises:
        ConfigError: see `translated_test`.
    """
    config = read_config(Path(run) / "config.toml", [], TranslationConfig)
    found = {}
    for text, (languages, translations) in zip(
        parallel_text(config.data, "test"), translated_test(run).items(), strict=True
    ):
        references = [target for _, target in text]
        if keep is not None:
            translations, references = (
                list(compress(side, keep)) for side in (translations, references)
            )
        found[languages] = corpus_bleu(translations, references, language=text.target)
    return found
