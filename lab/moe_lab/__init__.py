"""The paper's models and experiments, built on the MoE layer of moe_ext.

The package uses the public names of moe_ext. Its subpackages are:

- models: language models and translation models with mixtures of experts
- data: corpora, vocabularies and batches
- training: configurations, the training loop, metrics and checkpoints
- experiments: runs of several configurations and seeds, their stored results and intervals
- decoding: beam search and BLEU
- analysis: operation counts and the specialisation of experts
- studies: one module for each experiment of the paper
- benchmarks: the harness, the roofline limits, the other implementations, and one module for each
  benchmark
- commands: one module for each command, such as train, evaluate and translate

``moe-lab --help`` lists the commands.

An argument that is out of range raises ValueError. A configuration, a file or a folder that cannot
be used raises ConfigError or CorpusError, which are ValueErrors. Their messages say what to do.
"""

__all__ = [
    "analysis", "benchmarks", "commands", "data", "decoding", "experiments", "models", "studies",
    "training",
]  # fmt: skip
