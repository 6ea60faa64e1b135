"""The study of balancing losses with adapters of a model of transformers."""

import json

import pytest
import torch

pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("moe_ext.integrations.transformers")  # registers the experts

from moe_lab.experiments.claims import NOT_DECIDED
from moe_lab.studies import fine_tuning as study
from moe_lab.studies.entries import run as run_study
from tiny import rebuilds

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_study_is_reported(corpus, tmp_path, monkeypatch):
    sizes = {"hidden_size": 32, "moe_intermediate_size": 32, "num_experts": 8, "head_dim": 8}
    monkeypatch.setattr(study, "SIZES", study.SIZES | sizes)
    monkeypatch.setattr(study, "LENGTH", 8)
    target = tmp_path / "target.txt"
    target.write_text("".join(f"{i} a new sentence of number {i % 7}\n" for i in range(400)))
    places = [f"--runs={tmp_path / 'runs'}", f"--output={tmp_path / 'results'}"]
    options = [f"--corpus={corpus}", f"--target={target}", "--pieces=45", "--steps=3"]
    (run,) = run_study("fine-tuning", [*options, "--lora-steps=4", "--seeds=1", *places]).runs
    assert run["tuned"].keys() == study.LOSSES.keys()
    results = [run["before"], *run["tuned"].values()]
    assert len({result["nll"] for result in results}) == len(results)
    for result in results:
        assert 0 <= result["idle"] <= result["dead"] <= 4 * 8 and 1 <= result["busiest"] <= 2
    adapters = 4 * 8 * 16 * (32 + 64 + 32 + 32)
    assert run["trained"] == adapters + 4 * 8 * 32
    page = (tmp_path / "results" / "fine_tuning.md").read_text()
    assert page.count(NOT_DECIDED) == 6 + 6 + 3 + 1  # verdicts, differences, changes, the rule
    assert "moe-lab study fine-tuning --pieces 45 --steps 3 --lora-steps 4" in page
    assert rebuilds("fine-tuning", "fine_tuning", tmp_path / "results")
    stored = json.loads((tmp_path / "results" / "fine_tuning.json").read_text())
    assert len(stored["claims"]) == 6


def test_the_losses_act_on_the_routers(corpus, tmp_path):
    """Each loss changes the gradient of the routers of the same model."""
    torch.manual_seed(0)
    model = study.make_model(50)
    for parameter in set(model.parameters()) - set(study.routers(model)):
        parameter.requires_grad_(False)
    start = [weight.detach().clone() for weight in study.routers(model)]
    rows = torch.randint(50, (30, 16))
    ends = []
    for loss in study.LOSSES.values():
        for weight, before in zip(study.routers(model), start, strict=True):
            weight.data.copy_(before)
        study.learn(model, rows, 2, 1e-3, loss, seed=1)
        ends.append(torch.cat([weight.detach().flatten() for weight in study.routers(model)]))
    assert all(not torch.equal(a, b) for i, a in enumerate(ends) for b in ends[:i])
