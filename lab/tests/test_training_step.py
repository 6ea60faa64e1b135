"""The benchmark of the training step: both models are the same function."""

import json
from types import SimpleNamespace

import pytest
import torch
from moe_lab.benchmarks import cases, roofline
from moe_lab.benchmarks.training_step import Step, Transformer, check
from torch.nn import functional as F

from moe_ext import MoE

pytestmark = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="needs torch 2.13")
SIZES = SimpleNamespace(
    sequences=2, length=8, d_model=64, layers=4, num_experts=4, k=2, hidden=32, vocabulary=50
)


def steps(dtype=torch.float32):
    torch.manual_seed(0)
    model = Transformer(SIZES)
    return Step(model, SIZES, dtype), Step(model.plain(), SIZES, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_models_have_the_same_cross_entropy(dtype):
    step, plain = steps(dtype)
    check(step, plain)
    with torch.no_grad():
        plain.model.feed_forward[1].down.mul_(1.1 if dtype == torch.float32 else 3)
    with pytest.raises(AssertionError):
        check(step, plain)


def test_both_models_have_the_same_gradients():
    fused, plain = (step.model for step in steps())
    for layer in fused.modules():
        if isinstance(layer, MoE):
            layer.w_importance = layer.w_load = 0.0
    tokens, target = torch.randint(50, (2, 8)), torch.randint(50, (16,))
    for model in (fused, plain):
        model(tokens, target).backward()
    norms, expected = (sorted(p.grad.norm().item() for p in m.parameters()) for m in (fused, plain))
    assert norms == pytest.approx(expected, rel=1e-4)


def test_a_run_writes_all_parts(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(roofline, "PEAK_SIZE", 64)
    monkeypatch.setattr(roofline, "REPEATS", 2)
    file = tmp_path / "step.json"
    sizes = "--sequences 2 --length 8 --d-model 64 --layers 2 --num-experts 4 --hidden 32"
    more = ["--vocabulary=50", "--rounds=2", "--eager", f"--json={file}"]
    rows = cases.run("training-step", [*sizes.split(), *more])
    parts = ["step", "update", "loss", "experts", "attention", "feed-forward"]
    assert [row.part for row in rows] == parts
    assert all(set(row.seconds) == {"moe_ext", "plain"} for row in rows)
    assert rows[0].limit == pytest.approx(sum(row.limit for row in rows[2:]))
    assert [row["part"] for row in json.loads(file.read_text())["rows"]] == parts
    assert "| experts |" in capsys.readouterr().out
