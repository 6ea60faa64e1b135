"""The experts of models of transformers.

`experts` finds the modules of experts and describes their weights. `activation` recognises what a
module computes. `given_lora` has the adapters that PEFT gives to a module for a forward pass.
`parallel` is expert parallelism, and `attention` the attention of one new token. `balance` measures
the experts, and `callback` warns during ``Trainer``. `warnings` has warnings that come once.
"""
