"""Other libraries' models on moe_ext's operators.

`transformers` and `peft` are public, and need the library of their name. `_transformers` and
`_peft` have their parts, and `_packed` those that load, quantize and save packed experts.
"""

__all__: list[str] = []
