"""The commands of scripts/: one module each, with `main(arguments)`; its docstring is the help.

train             trains a language model or a translation model
evaluate          perplexity and BLEU of a run
translate         translates text
inspect_experts   what the experts of a run specialise in
prepare_data      gets a corpus ready for training
compare           two models over paired seeds
plan_cluster      what a model takes of a cluster
quickstart        a small model and its dense counterpart in minutes

They are imported on request only, because some need optional packages.
"""

__all__: list[str] = []
