"""The shapes, models and implementations that the benchmarks of experts accept, without torch."""

import argparse
from typing import NamedTuple

from moe_lab.errors import ConfigError

ROUTINGS = ("uniform", "zipf", "hierarchical")
ACTIVATIONS = ("relu", "swiglu")
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")  # of transformers
PEER_NAMES = (
    *("mask loop", "sort + slices", "sort + split", "sort + grouped_mm"),
    *("mixture-of-experts", "st-moe-pytorch", "ScatterMoE", "ScatterMoE GLU"),
    *(f"HF {name}" for name in ("eager", "grouped_mm", "batched_mm")),
)
# Of the benchmark of packed experts.
PACKED_FORMATS = (
    *("mxfp4", "gguf_q4_0", "gguf_q8_0", "gguf_q4_k", "gguf_q6_k"),
    *("fp8", "int4", "nf4"),  # ggml has no such type
)
PACKED_PEERS = (
    *("float-experts", "grouped_mm", "integer"),
    *("ik_llama.cpp", "ik_llama.cpp-repacked", "llama.cpp", "llama.cpp-repacked"),
)
# Of a whole model: the formats of a GGUF file, and the other implementations.
WHOLE_FORMATS = ("gguf_q4_k", "gguf_q4_0", "gguf_q8_0", "gguf_q6_k")
WHOLE_LINEAR = ("bfloat16", "packed")
WHOLE_PEERS = (
    *("integer", "compiled", "integer-compiled"),
    *("eager", "grouped_mm", "llama.cpp", "ik_llama.cpp"),
)


class Shape(NamedTuple):
    """T tokens with k of E experts each; an expert has the widths d -> h -> d.

    The routing is "uniform", "zipf" (the r-th most popular expert has weight 1 / r) or
    "hierarchical" (√k of √E groups, and √k experts in each group).
    """

    tokens: int
    num_experts: int
    k: int
    d_model: int
    hidden: int
    routing: str = "uniform"


SHAPES = {
    "e4": Shape(4096, 4, 4, 512, 1024),
    "e32": Shape(4096, 32, 4, 512, 1024),
    "e256": Shape(4096, 256, 4, 512, 1024),
    "t256": Shape(256, 256, 4, 512, 1024),
    "e1024": Shape(4096, 1024, 4, 512, 1024),
    "k1": Shape(8192, 64, 1, 512, 2048),
    "wide": Shape(4096, 64, 2, 1024, 4096),
    "t1": Shape(1, 256, 4, 512, 1024),
    "hierarchical": Shape(4096, 256, 4, 512, 1024, "hierarchical"),
    "e32-zipf": Shape(4096, 32, 4, 512, 1024, "zipf"),
    "e256-zipf": Shape(4096, 256, 4, 512, 1024, "zipf"),
    "t256-zipf": Shape(256, 256, 4, 512, 1024, "zipf"),
}
# On a GPU, in addition to SHAPES. The gated experts of e128 have a hidden width of 1024.
GPU_SHAPES = {
    "e128": Shape(32768, 128, 8, 4096, 1536),
    "t16384": Shape(16384, 256, 4, 512, 1024),
    "e4096": Shape(65536, 4096, 4, 512, 1024),
    "e2048": Shape(65536, 2048, 4, 512, 2048),
    "t65536-k1": Shape(65536, 64, 1, 512, 2048),
}


def parse_shape(text: str) -> tuple[str, Shape]:
    """Parses the name of a shape, or T,E,k,d,h with an optional routing."""
    known = SHAPES | GPU_SHAPES
    if text in known:
        return text, known[text]
    numbers, routing = text.split(","), "uniform"
    if numbers[-1] in ROUTINGS:
        routing = numbers.pop()
    if len(numbers) != 5 or not all(number.isdecimal() and int(number) for number in numbers):
        raise argparse.ArgumentTypeError(
            f"must be one of {', '.join(known)} or T,E,k,d,h with ,zipf or ,hierarchical, "
            f"got {text!r}"
        )
    return text, Shape._make((*map(int, numbers), routing))


class Model(NamedTuple):
    """The sizes of a model's experts, and transformers' classes for them."""

    hidden_size: int  # H, the width of a token.
    num_experts: int  # E.
    intermediate_size: int  # I, the width of an expert's hidden layer.
    k: int  # Number of experts of a token.
    prefix: str  # First part of the names of transformers' classes.
    activation: str = "swiglu"  # Activation of the hidden layer, shown in the results.
    width: str = "moe_intermediate_size"  # The config's name of I.


# The docstring of transformers_experts has the sources.
MODELS = {
    "mixtral": Model(4096, 8, 14336, 2, "Mixtral", width="intermediate_size"),
    "qwen3_moe": Model(2048, 128, 768, 8, "Qwen3Moe"),
    "olmoe": Model(2048, 64, 1024, 8, "Olmoe", width="intermediate_size"),
    "deepseek_v3": Model(7168, 256, 2048, 8, "DeepseekV3"),
    "gpt_oss": Model(2880, 32, 2880, 4, "GptOss", "clamped swiglu", "intermediate_size"),
}
DEFAULT_MODELS = ("qwen3_moe", "olmoe", "gpt_oss")
PACKED_MODELS = ("qwen3_moe", "gpt_oss", "olmoe", "mixtral")


def experts_of_model(shape: Shape, model: str) -> str:
    """Formats the number of experts, and that of the model if it has more."""
    num_experts, model_experts = shape.num_experts, MODELS[model].num_experts
    return f"{num_experts}" if num_experts == model_experts else f"{num_experts} of {model_experts}"


def experts_that_fit(name: str, gib: float) -> int:
    """Returns a model's number of experts, halved until the float32 weights fit into `gib` GiB."""
    model = MODELS[name]
    one = 4 * 3 * model.hidden_size * model.intermediate_size / 2**30
    num_experts = model.num_experts
    while num_experts * one > gib:
        num_experts //= 2
    if num_experts < model.k:
        raise ConfigError(
            f"--weights must hold {model.k} experts of {name}, which take {model.k * one:.2f} GiB, "
            f"got {gib:g} GiB"
        )
    return num_experts
