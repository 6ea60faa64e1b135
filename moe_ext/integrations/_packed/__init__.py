"""Models of transformers with packed experts.

`stored_tensors` finds the tensors of the files of a checkpoint. `gguf` and `found_tensors` find the
weight of the model that each of them is; `gguf_names` has the names that GGUF files are read and
written with. `layer_tensors` joins those of a layer of experts.
`checkpoint` holds them all. `load` and `memory_plan` read a checkpoint. `quantize_experts` packs a
float model. `quantizer` tells transformers what it can do with both. `describe` has the line that
both print.

`merged` has the weights of a model with its adapters. `save` writes them: `rewrite` in the files of
the checkpoint, with `requantize` in their formats, `float_files` as floats, and `gguf_file` with
`gguf_fields` as GGUF.

Errors name the file, the weight or the argument. `errors` puts the name of the public function in
front, so that readers which several functions share do not name one of them.
"""
