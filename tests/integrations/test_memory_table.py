"""The memory on the page on packed checkpoints is that of `memory_plan` for the real models."""

import json
import re
import struct
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5.23")

from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig  # noqa: E402

from moe_ext.integrations.transformers import memory_plan  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "packed_checkpoints.md"
QUANTIZATION = {
    "FP8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "MXFP4": {"quant_method": "mxfp4"},
}
CONFIGS = {
    "gpt-oss-20b": lambda: GptOssConfig(num_hidden_layers=24, num_local_experts=32),
    "Qwen3-30B-A3B": lambda: Qwen3MoeConfig(num_hidden_layers=48, head_dim=128),
}
SIZES = {"BF16": 2, "F8_E4M3": 1, "F32": 4, "U8": 1}


def tensors(name, shape, kind):
    """Yields the tensors of a weight in the files: name, type and shape."""
    if ".experts." not in name or len(shape) != 3:
        yield name, "BF16", shape
        return
    experts, rows, inputs = shape
    if kind == "MXFP4":  # the model has [experts, in, out]
        yield f"{name}_blocks", "U8", (experts, inputs, rows // 32, 16)
        yield f"{name}_scales", "U8", (experts, inputs, rows // 32)
        return
    layer, _, key = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj")}.get(key, (key,))
    outputs = rows // len(parts)
    for weight in (
        f"{layer}.{expert}.{part}.weight" for expert in range(experts) for part in parts
    ):
        yield weight, "F8_E4M3", (outputs, inputs)
        yield f"{weight}_scale_inv", "F32", (-(-outputs // 128), -(-inputs // 128))


def write_headers(folder, config, kind):
    """Writes a checkpoint whose file has a header, and a hole in place of the weights."""
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    header, end = {}, 0
    for weight, values in state.items():
        for name, dtype, shape in tensors(weight, values.shape, kind):
            start, end = end, end + SIZES[dtype] * torch.Size(shape).numel()
            header[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    config.quantization_config = QUANTIZATION[kind]
    config.save_pretrained(folder)


@pytest.mark.parametrize(("model", "kind"), [("gpt-oss-20b", "MXFP4"), ("Qwen3-30B-A3B", "FP8")])
def test_the_memory_of_real_models(model, kind, tmp_path):
    write_headers(tmp_path, CONFIGS[model](), kind)
    generation = memory_plan(tmp_path, tokens=4096)
    training = memory_plan(tmp_path, tokens=512, lora_rank=16)
    weights = generation.experts + generation.dense
    # Adapters in bfloat16 and FactoredAdam take as many bytes as adapters in float32 alone.
    small = weights + training.lora + training.activations
    sizes = (weights, generation.total, small, training.total)
    row = " | ".join(f"{size / 1e9:.1f}" for size in sizes)
    assert re.search(rf"^\| {model}, {kind} \| (.*) \|$", PAGE.read_text(), re.M)[1] == row
