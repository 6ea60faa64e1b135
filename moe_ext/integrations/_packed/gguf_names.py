"""The names in GGUF files of the parameters of transformers, and what the files have of each."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_ext.checks import required
from moe_ext.integrations._packed.gguf_package import gguf_package

__all__ = ["GGUFNames", "join_halves", "names_of_experts", "with_first", "without_first"]


class GGUFNames:
    """The names in GGUF files of the parameters outside experts.

    Args:
        architecture: its name in GGUF.
        config: the configuration of transformers.
    """

    def __init__(self, architecture: str, config: Any) -> None:
        gguf = gguf_package()
        kinds = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
        self._map = gguf.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
        self.architecture = architecture
        self._config = config

    def whole(self, name: str) -> list[str]:
        """Returns the names that the tensor of a parameter may have.

        llama.cpp reads those that end with weight or bias.
        """
        base, _, last = name.rpartition(".")
        keys = (base, last), (name, "weight"), (name.removesuffix("_bias"), "bias")
        targets = [(self._map.get_name(key), suffix) for key, suffix in keys]
        return [f"{target}.{suffix}" for target, suffix in targets if target is not None]

    def halves(self, name: str) -> list[tuple[str, Callable[[Tensor], Tensor]]]:
        """Returns the tensors of keys and values of kv_b_proj of DeepSeek; [] for other parameters.

        Each has its name, and a function that returns its values, from those of the parameter.
        """
        base, _, last = name.rpartition(".")
        if last != "weight" or not base.endswith("kv_b_proj"):
            return []
        kv = str(self._map.get_name(base))
        sizes = self._config.qk_nope_head_dim, self._config.v_head_dim
        return [
            (f"{kv.replace('kv_b', half)}.weight", partial(_half_of, i, sizes))
            for i, half in enumerate(("k_b", "v_b"))
        ]


def _half_of(index: int, sizes: tuple[int, int], weight: Tensor) -> Tensor:
    """Returns the part of keys [heads, rank, sizes[0]] or of values [heads, sizes[1], rank]."""
    heads: Tensor = weight.unflatten(0, (-1, sum(sizes)))
    own: Tensor = heads.split(sizes, 1)[index]
    return own if index else own.mT


def join_halves(keys: Tensor, values: Tensor) -> Tensor:
    """Undoes `GGUFNames.halves`."""
    return torch.cat([keys.mT, values], 1).flatten(0, 1)


def names_of_experts(module: str, key: str) -> list[str]:
    """Returns the names of the parts of a parameter of an experts module."""
    rule = "have the number of its layer"
    layer = required(re.search(r"\.(\d+)\.", module), module, rule, module)
    suffix = "bias" if key.endswith("_bias") else "weight"
    kinds = {"gate_up_proj": ["gate", "up"], "up_proj": ["up"], "down_proj": ["down"]}
    parts = kinds[key.removesuffix("_bias")]
    return [f"blk.{layer[1]}.ffn_{part}_exps.{suffix}" for part in parts]


def without_first(value: Tensor) -> Tensor:
    """Returns a value without a first dimension of 1, which GGUF files leave out."""
    return value[0] if value.dim() > 1 and value.shape[0] == 1 else value


def with_first(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Undoes `without_first` for a parameter of a shape."""
    return value[None] if shape == (1, *value.shape) else value
