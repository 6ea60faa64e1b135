"""Counts the cost of a model, and measures the specialisation of its experts.

- costs: parameters and operations
- devices: the rates of accelerators
- cluster, mesh: the memory and time of training on many devices
- paper: the figures of the paper's language models
- routed_text, transformers_text: how a model routes a text, of the lab or of transformers
- experts, explorer: the words and contexts of each expert, as data, as text and as an HTML page
- specialisation: purity and mutual information of experts
"""

__all__: list[str] = []
