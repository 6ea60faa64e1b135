"""Corpora, vocabularies and batches of whole sentences or sentence pairs.

From a corpus to batches (App. C.1)::

    corpus = load_corpus("builtin")                                  # corpora.py
    vocabulary = Vocabulary.build(corpus.train, max_size=10_000)     # vocabulary.py
    sentences = encode_sentences(corpus.train, vocabulary)           # encoded.py
    batches = SentenceBatches(sentences, tokens_per_batch=2_560, shuffle=True)   # batches.py
    for batch in batches.epoch(0): ...

For a corpus that exceeds the memory, worker processes encode the text once into memory-mapped
files. Worker processes can also make the batches during training::

    vocabulary = Vocabulary.load("1b_word_vocab.txt")
    sentences = encode_to_files(corpus.train, vocabulary, "encoded", name="train", num_workers=2)
    for batch in batches.epoch(0, num_workers=1): ...

From parallel text to batches for translation (App. E)::

    corpus = load_parallel("wmt14", source="en", target="fr")            # parallel.py
    sides = (side for pair in corpus.train for side in pair)
    wordpieces = Wordpieces.train(sides, 32_000)                         # wordpieces.py
    pairs = encode_pairs(corpus.train, wordpieces)                       # pairs.py
    batches = PairBatches(pairs, tokens_per_batch=16_000, shuffle=True, seed=0)
    for batch in batches.epoch(0): ...
"""

from moe_lab.data.batches import Batch, SentenceBatches
from moe_lab.data.corpora import load_corpus
from moe_lab.data.encoded import AnyVocabulary, EncodedSentences, encode_sentences, encode_to_files
from moe_lab.data.pairs import EncodedPairs, PairBatch, PairBatches, batches_of, encode_pairs
from moe_lab.data.parallel import ParallelCorpus, ParallelText, load_parallel
from moe_lab.data.sentences import Corpus, CorpusError, Sentences
from moe_lab.data.vocabulary import Vocabulary
from moe_lab.data.wordpieces import Wordpieces
from moe_lab.data.workers import in_workers

AnyText = EncodedSentences | EncodedPairs

__all__ = [
    "AnyText", "AnyVocabulary", "Batch", "Corpus", "CorpusError", "EncodedPairs",
    "EncodedSentences", "PairBatch", "PairBatches", "ParallelCorpus", "ParallelText",
    "SentenceBatches", "Sentences", "Vocabulary", "Wordpieces", "batches_of", "encode_pairs",
    "encode_sentences", "encode_to_files", "in_workers", "load_corpus", "load_parallel",
]  # fmt: skip
