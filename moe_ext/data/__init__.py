"""The data layer of the language models: corpora, vocabularies and batches of whole sentences.

From a corpus to batches (paper, App. C.1):

    corpus = load_corpus("builtin")                                  # corpora.py
    vocabulary = Vocabulary.build(corpus.train, max_size=10_000)     # vocabulary.py
    sentences = encode_sentences(corpus.train, vocabulary)           # batches.py
    batches = SentenceBatches(
        sentences, eos_id=vocabulary.eos_id, tokens_per_batch=2_560, shuffle=True, seed=0
    )
    for batch in batches.epoch(0): ...
"""

from moe_ext.data.batches import Batch, EncodedSentences, SentenceBatches, encode_sentences
from moe_ext.data.corpora import Corpus, CorpusError, Sentences, load_corpus
from moe_ext.data.vocabulary import Vocabulary

__all__ = [
    "Batch",
    "Corpus",
    "CorpusError",
    "EncodedSentences",
    "SentenceBatches",
    "Sentences",
    "Vocabulary",
    "encode_sentences",
    "load_corpus",
]
