"""Models of transformers with packed experts.

`stored_tensors` finds the tensors of the files of a checkpoint. `gguf` and `found_tensors` find the
weight of the model that each of them is. `layer_tensors` joins those of a layer of experts.
`checkpoint` holds them all. `load`, `save` and `memory_plan` work on a checkpoint.
"""
