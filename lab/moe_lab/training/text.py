"""The encoded text of a run, for training and evaluation."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from moe_lab.data import (
    AnyText,
    AnyVocabulary,
    CorpusError,
    EncodedPairs,
    EncodedSentences,
    PairBatches,
    ParallelText,
    SentenceBatches,
    Sentences,
    Vocabulary,
    Wordpieces,
    batches_of,
    encode_pairs,
    encode_sentences,
    encode_to_files,
    in_workers,
    load_corpus,
    load_parallel,
)
from moe_lab.data.encoded import made_once
from moe_lab.data.parallel import languages_of
from moe_lab.errors import ConfigError, config_errors
from moe_lab.names import PARTS
from moe_lab.progress import progress
from moe_lab.training.config import DataConfig, ParallelDataConfig
from moe_lab.training.folder import load_vocabulary

_SENTENCES_FOR_WORDPIECES = 2_000_000  # maximum number of training sentences over all languages


@dataclass(frozen=True)
class SentenceText:
    """The three parts of a corpus as ids of words or wordpieces, with their vocabulary."""

    vocabulary: AnyVocabulary
    train: EncodedSentences
    dev: EncodedSentences
    test: EncodedSentences


@dataclass(frozen=True)
class PairText:
    """The three parts of a parallel corpus as ids, with their wordpieces."""

    vocabulary: Wordpieces
    train: EncodedPairs
    dev: EncodedPairs
    test: EncodedPairs


Text = SentenceText | PairText


@overload
def load_text(config: DataConfig) -> SentenceText: ...
@overload
def load_text(config: ParallelDataConfig) -> PairText: ...
def load_text(config: DataConfig | ParallelDataConfig) -> Text:
    """Loads and encodes a corpus; makes the vocabulary of the training part if config has none."""
    with _config_errors():
        if isinstance(config, ParallelDataConfig):
            texts = {part: parallel_text(config, part) for part in PARTS}
            wordpieces = _wordpieces(texts["train"], config)
            return PairText(
                wordpieces,
                **{part: _encode_pairs(texts[part], wordpieces, config, part) for part in PARTS},
            )
        vocabulary = None
        if config.vocabulary:
            vocabulary = load_vocabulary(config, config.vocabulary, "data.vocabulary: ")
        corpus = load_corpus(config.corpus, max_train_sentences=config.max_train_sentences or None)
        if vocabulary is None:
            vocabulary = _made_vocabulary(corpus.train, config)
        return SentenceText(
            vocabulary,
            **{part: _encode(getattr(corpus, part), vocabulary, config, part) for part in PARTS},
        )


def load_part(
    config: DataConfig | ParallelDataConfig, vocabulary: AnyVocabulary, part: str
) -> AnyText:
    """Loads one part of a corpus and encodes it with a given vocabulary."""
    with _config_errors():
        if isinstance(config, ParallelDataConfig):
            assert isinstance(vocabulary, Wordpieces)
            return _encode_pairs(parallel_text(config, part), vocabulary, config, part)
        corpus = load_corpus(
            config.corpus, parts=[part], max_train_sentences=config.max_train_sentences or None
        )
        return _encode(getattr(corpus, part), vocabulary, config, part)


def training_batches(
    text: Text, config: DataConfig | ParallelDataConfig, seed: int
) -> SentenceBatches | PairBatches:
    """Creates the shuffled batches of the training part of a text."""
    options: dict[str, Any] = {
        "tokens_per_batch": config.tokens_per_batch,
        "max_length": config.max_length or None,
        "shuffle": True,
        "seed": seed,
    }
    if isinstance(config, ParallelDataConfig):
        options["oversample"] = config.oversample
    with _config_errors():
        return batches_of(text.train, **options)


def parallel_text(config: ParallelDataConfig, part: str) -> list[ParallelText]:
    """Opens one part of a parallel corpus for each language pair.

    Of a table, only the language pairs in its name are used, if there are several.
    """
    if not config.corpus:
        raise ConfigError(
            "data.corpus must be a folder of parallel text, got ''; give data.corpus=FOLDER"
        )
    place = Path(config.corpus)
    pairs = config.language_pairs
    if len(pairs) > 1 and place.is_file():
        pairs = [pair for pair in pairs if languages_of(place, *pair)]
        if not pairs:
            raise ConfigError(
                f"data.corpus: the file name {place} must contain one of the language pairs "
                f"{', '.join(config.pairs)}, such as NAME.{config.pairs[0]}.tsv"
            )
    texts = []
    with _config_errors():
        for source, target in pairs:
            corpus = load_parallel(
                config.corpus,
                source=source,
                target=target,
                parts=[part],
                drop=config.drop,
                max_train_pairs=config.max_train_pairs or None,
            )
            texts.append(getattr(corpus, part))
    return texts


def _wordpieces(texts: Sequence[ParallelText], config: ParallelDataConfig) -> Wordpieces:
    """Loads the given wordpieces, or trains wordpieces on texts and stores them in `encoded`."""
    if config.wordpieces:
        vocabulary = load_vocabulary(config, config.wordpieces, "data.wordpieces: ")
        assert isinstance(vocabulary, Wordpieces)
        return vocabulary
    # Both directions of a language pair have the same sentences.
    once = {frozenset((text.source, text.target)): text for text in texts}.values()
    return _trained_wordpieces(
        lambda: (side for text in once for pair in text for side in pair),
        lambda: "\n".join(text.fingerprint() for text in once),
        config,
        config.languages_with_token,
    )


def _made_vocabulary(train: Sentences, config: DataConfig) -> AnyVocabulary:
    """Makes the vocabulary of the words or the wordpieces of a training part."""
    if config.kind == "words":
        counts = _count_words(train, config.num_workers)
        return Vocabulary.from_counts(counts, config.vocab_size, config.min_count)
    return _trained_wordpieces(lambda: map(" ".join, train), train.fingerprint, config)


def _trained_wordpieces(
    sentences: Callable[[], Iterable[str]],
    fingerprint: Callable[[], str],
    config: DataConfig | ParallelDataConfig,
    languages: Sequence[str] = (),
) -> Wordpieces:
    """Trains wordpieces and stores them in config.encoded, if given; reuses stored wordpieces.

    `sentences` returns the training text, and `fingerprint` its fingerprint. `languages` are those
    that need a target token.
    """
    languages = list(languages)

    def train() -> Wordpieces:
        try:
            return Wordpieces.train(
                progress(sentences(), "training wordpieces", "sentences"),
                config.vocab_size,
                kind=config.kind,
                target_tokens=languages,
                max_sentences=_SENTENCES_FOR_WORDPIECES,
            )
        except CorpusError:
            raise
        except ValueError as error:
            raise ConfigError(f"data.{str(error).removeprefix('Wordpieces.train: ')}") from error

    if not config.encoded:
        return train()

    def make(made: Path) -> None:
        train().save(made / "wordpieces.model")

    recipe = f"wordpieces 1 {config.vocab_size} {config.kind} {languages}"
    made = made_once(Path(config.encoded), "wordpieces", recipe, fingerprint, make)
    return Wordpieces.load(made / "wordpieces.model")


def _encode_pairs(
    texts: Sequence[ParallelText], wordpieces: Wordpieces, config: ParallelDataConfig, part: str
) -> EncodedPairs:
    return encode_pairs(
        texts,
        wordpieces,
        target_tokens=bool(config.languages_with_token),
        max_ratio=(config.max_ratio or None) if part == "train" else None,
        folder=config.encoded or None,
        name=part,
        num_workers=config.num_workers,
    )


def _count_words(sentences: Sentences, num_workers: int) -> Counter[str]:
    title = "counting words"
    if num_workers == 0:
        return Vocabulary.count(progress(sentences, title, "sentences"))
    total: Counter[str] = Counter()
    pieces = in_workers(Vocabulary.count, sentences.pieces, num_workers)
    for counts in progress(pieces, title, "pieces", len(sentences.pieces)):
        total.update(counts)
    return total


def _encode(
    sentences: Sentences, vocabulary: AnyVocabulary, config: DataConfig, part: str
) -> EncodedSentences:
    if config.encoded:
        return encode_to_files(
            sentences, vocabulary, config.encoded, name=part, num_workers=config.num_workers
        )
    return encode_sentences(progress(sentences, f"reading {part}", "sentences"), vocabulary)


@contextmanager
def _config_errors() -> Iterator[None]:
    with config_errors("data: "), config_errors("data.corpus: ", kinds=CorpusError):
        yield
