"""The lab: the paper's models and experiments, built on the layer. The layer never imports it.

- models: language models and translation models with mixtures of experts
- data: corpora, vocabularies and batches
- training: configurations, the training loop, checkpoints and comparisons over paired seeds
- decoding: beam search and BLEU
- analysis: operation counts and the specialisation of experts
- studies: one module for each experiment of the paper
- benchmarks: the harness, the roofline limits, the peers, and one module for each benchmark
- commands: one module for each command, such as train, evaluate and translate

Install its optional packages with ``pip install 'moe_ext[train]'`` and
``pip install 'moe_ext[translation]'``.
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
