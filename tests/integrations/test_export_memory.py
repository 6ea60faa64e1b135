"""The peak of memory while a model is saved."""

import pytest
import torch
from assertions import MIB, peak_mib

pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("peft")

from exports import PLAIN_ROPE, adapted, save  # noqa: E402
from packed_checkpoints import different_files, load, write  # noqa: E402
from tiny_models import tiny  # noqa: E402


@pytest.mark.parametrize("format", ["bfloat16", "merged", "gguf"])
def test_peak_of_memory_while_saving(format, tmp_path):
    """At most the float weights of one parameter of a layer are in memory."""
    sizes = {"hidden_size": 256, "intermediate_size": 128, "num_local_experts": 12, **PLAIN_ROPE}
    write(tmp_path / "model", "gpt_oss", "mxfp4", num_hidden_layers=4, **sizes)
    model = adapted(load(tmp_path / "model", dtype=torch.bfloat16))
    path = tmp_path / ("model.gguf" if format == "gguf" else "folder")
    peak = peak_mib(lambda: save(model, path, format))
    parameter = 12 * 256 * 256 * (2 if format == "bfloat16" else 17 / 32) / MIB
    expert = 256 * 256 * 4 / MIB
    assert peak < parameter + 12 * expert < 4 * 12 * 3 * 128 * 256 * 2 / MIB


@pytest.mark.parametrize("format", ["unchanged", "merged"])
def test_peak_of_memory_while_saving_float_experts(format, tmp_path):
    """The weights of one layer are converted at a time."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 12}
    tiny("qwen3_moe", num_hidden_layers=4, **sizes).save_pretrained(tmp_path / "model")
    model = load(tmp_path / "model")
    peak = peak_mib(lambda: save(model, tmp_path / format, format))
    assert different_files(tmp_path / "model", tmp_path / format) == []
    assert peak < 1.5 * 12 * 3 * 128 * 256 * 4 / MIB
