"""The data layer of the language models: corpora, vocabularies and batches of whole sentences.

From a corpus to batches (paper, App. C.1):

    corpus = load_corpus("builtin")                                  # corpora.py
    vocabulary = Vocabulary.build(corpus.train, max_size=10_000)     # vocabulary.py
    sentences = encode_sentences(corpus.train, vocabulary)           # encoded.py
    batches = SentenceBatches(                                       # batches.py
        sentences, eos_id=vocabulary.eos_id, tokens_per_batch=2_560, shuffle=True, seed=0
    )
    for batch in batches.epoch(0): ...

A corpus that does not fit into memory is encoded once, by several processes (workers.py), into
files that are mapped; others can make the batches while the model trains:

    vocabulary = Vocabulary.load("1b_word_vocab.txt")
    sentences = encode_to_files(corpus.train, vocabulary, "encoded", name="train", num_workers=2)
    for batch in batches.epoch(0, num_workers=1): ...
"""

from moe_ext.data.batches import Batch, SentenceBatches
from moe_ext.data.corpora import Corpus, CorpusError, Sentences, load_corpus
from moe_ext.data.encoded import EncodedSentences, encode_sentences, encode_to_files
from moe_ext.data.vocabulary import Vocabulary
from moe_ext.data.workers import in_workers

__all__ = [
    "Batch",
    "Corpus",
    "CorpusError",
    "EncodedSentences",
    "SentenceBatches",
    "Sentences",
    "Vocabulary",
    "encode_sentences",
    "encode_to_files",
    "in_workers",
    "load_corpus",
]
