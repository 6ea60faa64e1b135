"""The estimate of training on a mesh, against published throughputs and numbers by hand."""

from pathlib import Path

import pytest
from moe_lab.analysis.devices import ACCELERATORS
from moe_lab.analysis.mesh import TRANSFORMERS, Mesh, estimate, meshes
from moe_lab.commands import plan_mesh
from moe_lab.errors import ConfigError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "distributed.md"

# Tokens per second and GPU in bfloat16, with experts chosen equally: model, device, devices,
# sequences of a step and of a micro-batch, pp, vp, ep, length (Megatron-Bridge, 25.11).
PUBLISHED = [
    ("deepseek-v3", "gb300", 256, 4096, 1, 2, 4, 32, 4096, 3848),
    ("qwen3-235b", "gb300", 256, 8192, 2, 4, 12, 16, 4096, 6131),
    ("gpt-oss-120b", "gb300", 64, 1280, 2, 1, 1, 64, 8192, 18347),
    ("deepseek-v3", "gb200", 256, 4096, 1, 4, 4, 64, 4096, 3139),
    ("qwen3-235b", "gb200", 256, 8192, 1, 8, 3, 32, 4096, 4916),
    ("gpt-oss-120b", "gb200", 64, 1280, 1, 1, 1, 64, 8192, 15876),
    ("gpt-oss-120b", "b200", 64, 512, 4, 1, 1, 8, 4096, 8213),
    ("gpt-oss-120b", "h100", 64, 512, 4, 4, 1, 8, 4096, 5630),
]


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row[0]}, {row[1]}")
def test_published_throughputs(row):
    model, device, devices, batch, sequences, pp, vp, ep, length, published = row
    mesh = Mesh(pp, 1, devices // pp, ep, sequences, vp)
    step = estimate(TRANSFORMERS[model], ACCELERATORS[device], mesh, batch * length, length)
    predicted = batch * length / step.total / devices
    assert 1 / 1.3 < predicted / published < 1.3, predicted


@pytest.mark.parametrize(
    ("model", "parameters", "active"),
    [
        ("gpt-oss-120b", 117, 5.1),
        ("qwen3-235b", 235, 22),
        ("deepseek-v3", 671, 37),
        ("kimi-k2", 1000, 32),
    ],
)
def test_published_numbers_of_parameters(model, parameters, active):
    sizes = TRANSFORMERS[model]
    assert (sizes.dense + sizes.experts) / 1e9 == pytest.approx(parameters, rel=0.03)
    flops = sum(sizes.flops(0)) / 2e9  # without the embedding
    embedding = sizes.vocabulary * sizes.d_model / 1e9
    assert flops - embedding < active * 1.02 and flops + embedding > active * 0.98


def test_more_of_everything_costs_more():
    model, device = TRANSFORMERS["deepseek-v3"], ACCELERATORS["h200"]
    tokens = 2048 * 4096
    plain = estimate(model, device, Mesh(4, 1, 64, 32), tokens)
    recomputed = estimate(model, device, Mesh(4, 1, 64, 32, recompute=True), tokens)
    assert recomputed.memory < plain.memory and recomputed.total > plain.total
    sharded = estimate(model, device, Mesh(4, 1, 64, 32, sharded=True), tokens)
    assert sharded.memory < plain.memory
    assert sharded.seconds["replicas"] > 10 * plain.seconds["replicas"]
    crossing = estimate(model, device, Mesh(4, 1, 64, 64), tokens)
    inside = estimate(model, device, Mesh(4, 1, 64, 8), tokens)
    assert crossing.seconds["all-to-all"] > 3 * inside.seconds["all-to-all"]
    assert inside.memory > crossing.memory
    split = estimate(model, device, Mesh(4, 4, 16, 32), tokens)
    assert split.seconds["tensor parallel"] > 0 == plain.seconds["tensor parallel"]
    uneven = estimate(model, device, Mesh(4, 1, 64, 32), tokens, imbalance=2)
    assert uneven.seconds["GEMMs, experts"] == 2 * plain.seconds["GEMMs, experts"]
    short = estimate(model, device, Mesh(4, 1, 64, 32), tokens // 8)
    assert short.seconds["pipeline bubble"] == plain.seconds["pipeline bubble"]


def test_every_mesh_has_all_devices():
    model, device = TRANSFORMERS["kimi-k2"], ACCELERATORS["gb300"]
    listed = list(meshes(model, device, 1152, 4608))
    assert listed
    for mesh in listed:
        assert mesh.pp * mesh.tp * mesh.dp == 1152 == mesh.pp * mesh.ep * mesh.efsdp


@pytest.mark.parametrize(
    "more", [[], ["--device", "gb300", "--devices", "1152", "--batch", "4608"]]
)
def test_the_page_has_the_output(capsys, more):
    plan_mesh.main(["kimi-k2", *more])
    assert capsys.readouterr().out.strip() in PAGE.read_text()


def test_meshes_that_the_user_gives(capsys):
    plan_mesh.main(["deepseek-v3", "--mesh", "pp=8", "efsdp=1"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 8 |")]
    assert rows and all(row.split(" | ")[4] == "1" for row in rows)
    with pytest.raises(ConfigError, match="must allow a mesh that fits, got none"):
        plan_mesh.main(["kimi-k2", "--devices", "8"])
