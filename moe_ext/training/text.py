"""A corpus as ids: what the models are trained on and measured with."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from moe_ext.data import (
    Corpus,
    CorpusError,
    EncodedSentences,
    Sentences,
    Vocabulary,
    encode_sentences,
    encode_to_files,
    in_workers,
    load_corpus,
)
from moe_ext.progress import progress
from moe_ext.training.config import ConfigError, DataConfig

_RANDOM_SENTENCE = 25  # words


@dataclass(frozen=True)
class Text:
    """The three parts of a corpus as ids of a vocabulary."""

    vocabulary: Vocabulary
    train: EncodedSentences
    dev: EncodedSentences
    test: EncodedSentences


def load_text(config: DataConfig) -> Text:
    """The corpus in the vocabulary given, or else in that of its own training part.

    Raises:
        ConfigError: whatever is wrong with them.
    """
    vocabulary = _given_vocabulary(config)
    with _config_errors():
        corpus = load_corpus(config.corpus, max_train_sentences=config.max_train_sentences or None)
        if vocabulary is None:
            counts = _count_words(corpus.train, config.num_workers)
            vocabulary = Vocabulary.of_counts(counts, config.vocab_size, config.min_count)
        return Text(
            vocabulary,
            train=_encode(corpus, "train", vocabulary, config),
            dev=_encode(corpus, "dev", vocabulary, config),
            test=_encode(corpus, "test", vocabulary, config),
        )


def load_part(config: DataConfig, vocabulary: Vocabulary, part: str) -> EncodedSentences:
    """One part of the corpus in a given vocabulary; the others are not read.

    Args:
        config: names the corpus; its vocabulary's options do not count.
        vocabulary: of the model.
        part: "train", "dev", "test" or "all".

    Raises:
        ConfigError: whatever is wrong with the corpus.
    """
    with _config_errors():
        corpus = load_corpus(
            config.corpus, parts=[part], max_train_sentences=config.max_train_sentences or None
        )
        return _encode(corpus, part, vocabulary, config)


def _given_vocabulary(config: DataConfig) -> Vocabulary | None:
    try:
        return Vocabulary.load(config.vocabulary) if config.vocabulary else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.vocabulary: {error}") from error


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
    corpus: Corpus, part: str, vocabulary: Vocabulary, config: DataConfig
) -> EncodedSentences:
    sentences = getattr(corpus, part)
    if config.encoded:
        return encode_to_files(
            sentences, vocabulary, config.encoded, name=part, num_workers=config.num_workers
        )
    return encode_sentences(progress(sentences, f"reading {part}", "sentences"), vocabulary)


def random_text(vocab_size: int, num_tokens: int, seed: int) -> Text:
    """Sentences of frequent and rare words, as many as have at least so many predictions.

    Made of nothing, for measurements without a corpus: all three parts are the same.
    """
    special = [Vocabulary.UNK, Vocabulary.EOS]
    vocabulary = Vocabulary([*special, *(f"w{i}" for i in range(len(special), vocab_size))])
    generator = torch.Generator().manual_seed(seed)
    number = -(-num_tokens // (_RANDOM_SENTENCE + 1))
    u = torch.rand(number, _RANDOM_SENTENCE, generator=generator, dtype=torch.float64)
    ids = (vocab_size**u).long().clamp_(len(special), vocab_size - 1)
    sentences = EncodedSentences(ids.tolist(), vocabulary.eos_id)
    return Text(vocabulary, train=sentences, dev=sentences, test=sentences)


@contextmanager
def _config_errors() -> Iterator[None]:
    try:
        yield
    except CorpusError as error:
        raise ConfigError(f"data.corpus: {error}") from error
    except ValueError as error:
        raise ConfigError(f"data: {error}") from error
