"""Tiny packed checkpoints, written by the reference packages, and their dequantized models."""

import filecmp
import importlib
import json
import re
import shutil

import gguf
import torch
from optional import Optional
from safetensors.torch import load_file, save_file
from tiny_models import tiny

from moe_ext.formats import quantize

plug = importlib.import_module("moe_ext.integrations.transformers")
compressors = Optional("compressed_tensors.compressors")
quantization = Optional("compressed_tensors.quantization")
mxfp4 = Optional("transformers.integrations.mxfp4")

WIDE = {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32}
PROJECTIONS = re.compile(r"(experts\.\d+\.\w+|self_attn\.\w+_proj)\.weight$")
# Name: the architecture, the kind and the sizes that write() takes.
CHECKPOINTS = {
    "fp8": ("qwen3_moe", "fp8", {}),
    "fp8_in_whole_blocks": ("qwen3_moe", "fp8", {"hidden_size": 160, "moe_intermediate_size": 128}),
    "fp8_of_deepseek": ("deepseek_v3", "fp8", {}),
    "fp8_by_row": ("qwen3_moe", "compressed_fp8", {}),
    "int4": ("olmoe", "int4", {"head_dim": 16}),
    "int8": ("qwen3_moe", "int8", {}),
    "mxfp4": ("gpt_oss", "mxfp4", {}),
    "mxfp4_of_compressed_tensors": ("mixtral", "compressed_mxfp4", {}),
}


def write(folder, model_type, kind, **sizes):
    """Writes a checkpoint; returns the model with the dequantized weights in float32."""
    model = tiny(model_type, "eager", **{**WIDE, **sizes}).eval()
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    files, floats, settings = {}, {}, {}
    for name, weight in state.items():
        floats[name], files[name] = weight, weight
        if kind == "mxfp4" and weight.dim() == 3:
            codes, scales = quantize(weight.mT.contiguous(), "mxfp4")
            blocks = codes.unflatten(-1, (-1, 16))
            del files[name]
            files |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            floats[name] = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            settings = {"quant_method": "mxfp4"}
        elif kind == "fp8" and PROJECTIONS.search(name):
            codes, scales = quantize(weight, "fp8")
            blocks = torch.kron(scales, torch.ones(128, 128))
            files |= {name: codes, f"{name}_scale_inv": scales}
            floats[name] = codes.float() * blocks[: len(weight), : weight.shape[1]]
            settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        elif kind in SCHEMES and PROJECTIONS.search(name):
            format, scheme = scheme_of(kind)
            del files[name]
            packed, floats[name] = compressed(weight, format, scheme)
            files |= {f"{name.removesuffix('weight')}{key}": part for key, part in packed.items()}
            group = scheme.model_dump(mode="json")
            settings = {"quant_method": "compressed-tensors", "format": format}
            settings |= {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
            settings |= {"quantization_status": "compressed"}
    # Two files, as of a large checkpoint.
    names = sorted(files)
    halves = [names[: len(names) // 2], names[len(names) // 2 :]]
    index = {}
    for i, half in enumerate(halves):
        path = f"model-0000{i + 1}-of-00002.safetensors"
        tensors = {name: files[name].contiguous() for name in half}
        save_file(tensors, folder / path, metadata={"format": "pt"})
        index |= dict.fromkeys(half, path)
    (folder / "model.safetensors").unlink()
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return with_weights(model, floats)


def with_weights(model, state):
    """Returns a model of transformers with other weights, in the names of files."""
    return type(model).from_pretrained(None, config=model.config, state_dict=state).eval()


SCHEMES = {
    "int4": (
        "pack-quantized",
        dict(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True),
    ),
    "int8": (
        "int-quantized",
        dict(num_bits=8, type="int", strategy="channel", symmetric=True),
    ),
    "compressed_mxfp4": (
        "mxfp4-pack-quantized",
        dict(num_bits=4, type="float", strategy="group", group_size=32, symmetric=True),
    ),
    "compressed_fp8": (
        "float-quantized",
        dict(num_bits=8, type="float", strategy="channel", symmetric=True),
    ),
}


def scheme_of(kind):
    """Returns the format and the scheme of compressed-tensors."""
    format, weights = SCHEMES[kind]
    weights = quantization.QuantizationArgs(**weights)
    return format, quantization.QuantizationScheme(targets=["Linear"], weights=weights)


def compressed(weight, format, scheme):
    """Packs a weight with compressed-tensors; returns its tensors and the dequantized weight."""
    args = scheme.weights
    groups = weight.unflatten(-1, (-1, args.group_size or weight.shape[1]))
    if format == "mxfp4-pack-quantized":
        scales = quantize(weight, "mxfp4").scales.view(torch.float8_e8m0fnu).float()
    else:
        scales, _ = quantization.utils.calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    compressor = compressors.BaseCompressor.get_value_from_registry(format)
    packed = compressor.compress({"weight": weight, "weight_scale": scales}, scheme)
    return packed, compressor.decompress(dict(packed), scheme)["weight"].float()


TYPES = gguf.GGMLQuantizationType
# Name: the architecture, the type of the experts and the options that write_gguf() takes.
GGUF = {
    "q8_0": ("qwen3_moe", TYPES.Q8_0, {}),
    "q4_0_and_q8_0": (
        "olmoe",
        TYPES.Q4_0,
        {"down": TYPES.Q8_0, "head_dim": 16, "num_key_value_heads": 4},
    ),
    "mxfp4": ("gpt_oss", TYPES.MXFP4, {}),
    "shared_experts": ("qwen2_moe", TYPES.Q8_0, {"shared_expert_intermediate_size": 24}),
    "deepseek": ("deepseek_v3", TYPES.Q8_0, {}),
    "deepseek_with_two_parts_of_kv_b": ("deepseek_v3", TYPES.Q4_0, {"split_kv": True}),
}
ARCHITECTURES = {
    "deepseek_v3": "deepseek2",
    "gpt_oss": "gpt-oss",
    "olmoe": "olmoe",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}


def write_gguf(
    path, model_type, kind, down=None, split_kv=False, num_tensors=0, tied=None, **sizes
):
    """Writes a GGUF file with gguf; returns the model with the dequantized weights in float32.

    With num_tensors, there are several files of at most num_tensors tensors. With tied, the last
    layer has the weight of the embedding, of this type.
    """
    sizes["tie_word_embeddings"] = tied is not None
    if model_type == "qwen3_moe":
        sizes["norm_topk_prob"] = True  # as llama.cpp computes each of them
    model = tiny(model_type, "eager", **{**WIDE, **sizes}).eval()
    config = model.config
    architecture = ARCHITECTURES[model_type]
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=num_tensors)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(
        getattr(config, "moe_intermediate_size", config.intermediate_size)
    )
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if model_type != "deepseek_v3":
        writer.add_key_length(getattr(config, "head_dim", None) or config.hidden_size // 4)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.rope_parameters["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        length = config.rope_parameters["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(length)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if model_type == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_pad_token_id(0)
    names = gguf.get_tensor_name_map(
        {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[architecture],
        config.num_hidden_layers,
    )

    def add(name, weight, type):
        data = gguf.quantize(weight.contiguous().numpy(), type)
        writer.add_tensor(name, data, raw_dtype=None if type == TYPES.F32 else type)
        return torch.from_numpy(gguf.dequantize(data, type)).view(weight.shape)

    floats = {}
    for name, weight in model.state_dict().items():
        base, _, suffix = name.rpartition(".")
        if tied is not None and base == "lm_head":
            continue
        if ".experts." in name:
            layer = f"blk.{name.split('.')[2]}.ffn"
            bias = name.endswith("_bias")
            whole = weight if bias or model_type != "gpt_oss" else weight.mT
            interleaved = model_type == "gpt_oss"
            halves = [whole]
            if "gate_up" in name:
                halves = [whole[:, ::2], whole[:, 1::2]] if interleaved else whole.chunk(2, 1)
            parts = ["gate", "up"] if "gate_up" in name else ["down"]
            type = TYPES.F32 if bias else down if down and parts == ["down"] else kind
            own = [
                add(f"{layer}_{part}_exps.{'bias' if bias else 'weight'}", half, type)
                for part, half in zip(parts, halves, strict=True)
            ]
            whole = torch.stack(own, 2).flatten(1, 2) if interleaved else torch.cat(own, 1)
            whole = own[0] if len(own) == 1 else whole
            floats[name] = whole.mT if not bias and model_type == "gpt_oss" else whole
        elif split_kv and base.endswith("kv_b_proj"):
            heads = weight.unflatten(0, (config.num_attention_heads, -1))
            k, v = heads.split([config.qk_nope_head_dim, config.v_head_dim], 1)
            kv = names.get_name(base)
            add(f"{kv.replace('kv_b', 'k_b')}.weight", k.mT, TYPES.F32)
            add(f"{kv.replace('kv_b', 'v_b')}.weight", v, TYPES.F32)
            floats[name] = weight
        else:
            target = names.get_name(base) or names.get_name(name) or names.get_name(name[:-5])
            suffix = (
                suffix if names.get_name(base) else "bias" if suffix.endswith("bias") else "weight"
            )
            type = TYPES.Q8_0 if base.endswith("q_proj") and suffix == "weight" else TYPES.F32
            type = tied if tied is not None and base.endswith("embed_tokens") else type
            flat = weight.flatten() if base.endswith("shared_expert_gate") else weight
            floats[name] = add(f"{target}.{suffix}", flat, type).view(weight.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return with_weights(model, floats)


def load(path, **options):
    return plug.load(path, **{"dtype": torch.float32, "quiet": True, **options})


def config_for(model):
    """Returns what `load` needs for a GGUF file, which describes all models but DeepSeek's."""
    return model.config if "deepseek" in model.config.model_type else None


def linear_layers(model):
    """Returns the packed linear layers of a model, by their names."""
    kind = plug.PackedLinear
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


def edited(folder, target, edit=lambda tensors: None, **config):
    """Copies a checkpoint; a function edits the tensors, options change its configuration."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    for path in target.glob("*.safetensors"):
        tensors = load_file(path)
        edit(tensors)
        save_file(tensors, path, metadata={"format": "pt"})
    described = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(described | config))
    return target


def files_of(folder):
    return sorted(path.name for path in folder.iterdir())


def different_files(folder, second):
    """Returns the names of the files with other bytes; both folders have the same names."""
    names = files_of(folder)
    assert names == files_of(second)
    return [name for name in names if not filecmp.cmp(folder / name, second / name, shallow=False)]
