"""LoRA of PEFT, next to that of `moe_ext.lora`.

`forward` gives A and B of experts to the operator. `linear` lets PEFT adapt packed linear layers.
`files` maps the adapters of `moe_ext.LoRAExperts` to PEFT's files, and `checkpoints` adds them to
``save_pretrained`` and ``load_adapter`` of PEFT's models.
"""
