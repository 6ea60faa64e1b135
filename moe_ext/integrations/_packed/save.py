"""Writes a model with packed experts: unchanged, or with its adapters merged, or as GGUF."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import nn

from moe_ext.checks import require, require_one_of, require_sizes
from moe_ext.integrations._packed.checkpoint import Checkpoint
from moe_ext.integrations._packed.errors import errors_of_function
from moe_ext.integrations._packed.float_files import write_floats
from moe_ext.integrations._packed.gguf_file import write_gguf_adapter, write_gguf_model
from moe_ext.integrations._packed.merged import MergedModel
from moe_ext.integrations._packed.quantizer import PackedQuantizer
from moe_ext.integrations._packed.rewrite import rewrite
from moe_ext.integrations._packed.stored_tensors import files_of_gguf

__all__ = ["SaveFormat", "save"]

#: What `save` writes.
SaveFormat = Literal[
    "unchanged",
    "merged",
    "bfloat16",
    "float16",
    "float32",
    "gguf",
    "gguf_bf16",
    "gguf_f16",
    "gguf_f32",
    "gguf_mxfp4",
    "gguf_q4_0",
    "gguf_q8_0",
    "gguf_adapter",
]
_FLOATS = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@errors_of_function("save")
def save(
    model: nn.Module,
    path: str | Path,
    format: SaveFormat = "unchanged",
    *,
    shard_size: int = 2 * 10**9,
    quiet: bool = False,
) -> None:
    """Writes a model of `load` or `quantize_experts` to files.

    - "unchanged": the files of the checkpoint, without adapters. What did not change has the same
      bytes. A dense weight of floats that changed is written in the dtype of the checkpoint.
    - "merged": the files of the checkpoint, with the adapters merged. Weights that are packed in
      the checkpoint are quantized again in its formats, by `moe_ext.formats.quantize`.
    - "bfloat16", "float16", "float32": safetensors files that ``from_pretrained`` of transformers
      loads, with the adapters merged.
    - "gguf": a GGUF file that llama.cpp loads, with the adapters merged. The experts stay in MXFP4
      or in their format of GGUF, and the other weights in their dtype.
    - "gguf_bf16", "gguf_f16", "gguf_f32", "gguf_mxfp4", "gguf_q4_0", "gguf_q8_0": the same, with
      all experts in this format.
    - "gguf_adapter": a GGUF file with the active adapters alone, for ``--lora`` of llama.cpp.

    Adapters are those of `moe_ext.add_lora` on experts and LoRA of PEFT on linear layers. Only
    adapters that are active and not disabled are merged: each weight becomes W + scale A B, in
    float32, and is rounded once. Other adapters of PEFT are an error, unless they are disabled.
    An expert whose adapters add nothing keeps its bytes. The model does not change.

    The function reads and writes one tensor at a time, or the float weights of one layer. For
    "unchanged" and "merged", the checkpoint of the model must still exist. The other files of its
    folder are copied, such as those of the tokenizer, but not its folders; also for floats. At the
    end, a line is printed to stderr.

    Args:
        model: the model, or a PeftModel of it.
        path: another folder than the loaded one, or for the formats of GGUF a file with the suffix
            .gguf, but none of the loaded files.
        format: what to write; see above.
        shard_size: the largest size in bytes of a safetensors file of floats, unless one weight is
            larger.
        quiet: print nothing.

    Raises:
        ValueError: the format is unknown, or it cannot hold a weight or the configuration. An
            adapter of PEFT cannot be merged. The last layer differs from the embedding to which
            the configuration ties it. With "unchanged" and "merged": the model is not from `load`,
            or `quantize_experts` has packed its experts. With "unchanged": a dense weight that is
            packed in the checkpoint has changed.
        ImportError: the package gguf is not installed.
    """
    require_one_of("format", get_args(SaveFormat), format)
    require_sizes("", shard_size=shard_size)
    merged, target = MergedModel(model), Path(path)
    if format != "unchanged":
        merged.require_mergeable()
    quantizer = getattr(merged.model, "hf_quantizer", None)
    checkpoint: Checkpoint | None = getattr(quantizer, "checkpoint", None)
    is_gguf = format.startswith("gguf")
    rule = "have the suffix .gguf" if is_gguf else "be a folder, not end with .gguf"
    require((target.suffix == ".gguf") == is_gguf, "path", rule, str(target))
    from_load = checkpoint is not None or is_gguf or format in _FLOATS
    require(from_load, "model", "come from load", type(model).__name__)
    source = None if checkpoint is None else checkpoint.path
    folder = source if source is None or source.is_dir() else source.parent
    note = ""
    try:
        if is_gguf:
            loaded = [] if source is None else [file.resolve() for file in files_of_gguf(source)]
            is_new = target.resolve() not in loaded
            require(is_new, "path", "differ from the files that were loaded", str(target))
            target.parent.mkdir(parents=True, exist_ok=True)
            if format == "gguf_adapter":
                write_gguf_adapter(merged, target)
            else:
                note = write_gguf_model(merged, target, format, source)
            written = [target]
        else:
            target.mkdir(parents=True, exist_ok=True)
            is_new = folder is None or not target.samefile(folder)
            require(is_new, "folder", "differ from the loaded one", str(target))
            if checkpoint is None or format in _FLOATS:
                written = write_floats(merged, target, _FLOATS[format], shard_size)
                copied = _copy_others(folder, target)
                written += copied
                note = f"copied: {', '.join(file.name for file in copied) or 'no other files'}"
            else:
                assert isinstance(quantizer, PackedQuantizer)
                is_merged = format == "merged"
                written = rewrite(merged, checkpoint, quantizer.dtype, target, is_merged)
    except OSError as error:
        folders = target.absolute().parents
        free = shutil.disk_usage(next(parent for parent in folders if parent.exists())).free
        error.add_note(f"save: {target} is incomplete; its disk has {free:,} bytes free")
        raise
    if not quiet:
        print(_line(merged, target, format, written, note), file=sys.stderr)


def _copy_others(folder: Path | None, target: Path) -> list[Path]:
    """Copies the files of a folder that have no weights, unless `target` has them."""
    copied = []
    weights = (".safetensors", ".gguf", ".bin", ".pth", ".pt")
    for path in sorted(folder.iterdir()) if folder is not None else ():
        is_weight = path.suffix in weights or path.name.endswith(".index.json")
        if path.is_file() and not is_weight and not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)
            copied.append(target / path.name)
    return copied


def _line(model: MergedModel, target: Path, format: str, written: list[Path], note: str) -> str:
    """Returns what was written, in a line."""
    experts = sum(expert.is_adapted for expert in model.experts.values())
    adapters = f"{experts} modules of experts and {len(model.linear)} linear layers"
    verb = {"unchanged": "not written", "gguf_adapter": "written"}.get(format, "merged")
    size = sum(path.stat().st_size for path in written)
    parts = [
        f"{target}: {type(model.model).__name__} as {format}",
        f"{len(written)} files with {size:,} bytes",
        f"adapters {verb}: {adapters}",
        *([note] if note else []),
    ]
    return "; ".join(parts)
