"""The commands of moe-lab, one module each: `main` runs a command, its docstring is the help.

- `train`: trains a language model or a translation model.
- `evaluate`: measures perplexity and BLEU of a run.
- `translate`: translates text.
- `export`: exports a language model for C++.
- `inspect_experts`: shows what the experts of a run specialise in.
- `prepare_data`: prepares a corpus for training.
- `compare`: compares two models over paired seeds.
- `plan_cluster`: computes the memory, network traffic and step time of a model on a cluster.
- `quickstart`: trains a small model and its dense counterpart in minutes.

Import the modules one by one: some of them need optional packages.
"""

__all__: list[str] = []
