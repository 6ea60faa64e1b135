"""Models of transformers with packed experts.

A checkpoint is read in steps: `stored_tensors` finds the tensors of its files, `gguf` and
`found_tensors` the weight of the model that each of them is, `layer_tensors` joins those of a layer
of experts, and `checkpoint` holds them all. `load`, `save` and `memory_plan` work on a checkpoint.
"""
