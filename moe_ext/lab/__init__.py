"""The paper's laboratory on top of the layer. The layer never imports it.

models       language models and translation models with mixtures of experts
data         corpora, vocabularies, batches
training     configurations, the training loop, checkpoints, comparisons over paired seeds
decoding     beam search and BLEU
analysis     operations, and what the experts specialise in
studies      the paper's experiments, one module each
benchmarks   the harness, the machine's limits, the peers, one module for each benchmark
commands     the commands train, evaluate, translate, …, one module each

Its optional packages: pip install 'moe_ext[train]' and 'moe_ext[translation]'.
"""

__all__ = [
    "analysis",
    "benchmarks",
    "commands",
    "data",
    "decoding",
    "models",
    "studies",
    "training",
]
