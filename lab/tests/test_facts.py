"""The study of how many bits of facts a layer stores."""

import math

import pytest
import torch
from moe_lab.errors import ConfigError
from moe_lab.experiments.arms import Arm
from moe_lab.studies import facts as study
from moe_lab.studies.entries import run as run_study
from tiny import rebuilds
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


class Knows(nn.Module):
    """Maps the first keys to multiples of their values' vectors, all others to 0."""

    def __init__(self, facts, number, scale=1000.0):
        super().__init__()
        self.known = {tuple(key.tolist()): i for i, key in enumerate(facts.keys[:number])}
        self.answers = scale * facts.vectors[facts.values] / facts.vectors.square().sum(1).max()

    def forward(self, keys, offsets):
        rows = [self.known.get(tuple(key.tolist())) for key in keys]
        zero = torch.zeros(study.WIDTH)
        return torch.stack([zero if row is None else self.answers[row] for row in rows])


def test_facts_depend_on_seed_and_number_only():
    a, b = study.make_facts(50, 1), study.make_facts(50, 1)
    torch.manual_seed(99)
    assert all(map(torch.equal, a, b)) and all(map(torch.equal, a, study.make_facts(50, 1)))
    reseeded = study.make_facts(50, 2)
    assert not torch.equal(a.keys, reseeded.keys) and not torch.equal(a.values, reseeded.values)
    assert a.keys.shape == (50, 16) and a.vectors.shape == (256, 16)
    assert a.values.min() >= 0 and a.values.max() < 256
    assert len(a.keys.unique(dim=0)) == 50


def test_a_known_fact_is_eight_bits_and_a_guess_is_none(monkeypatch):
    monkeypatch.setattr(study, "_AT_ONCE", 7)  # several batches, the last of them smaller
    facts = study.make_facts(40, 3)
    facts = facts._replace(vectors=nn.functional.normalize(facts.vectors))
    # A guess has the logits 0, so the cross-entropy is log2(256) = 8 bits and nothing is stored.
    assert study.stored_bits(Knows(facts, 0), facts) == pytest.approx(0, abs=1e-4)
    assert study.stored_bits(Knows(facts, 40), facts) == pytest.approx(8 * 40, abs=1e-3)
    assert study.stored_bits(Knows(facts, 10), facts) == pytest.approx(8 * 10, abs=1e-3)
    # A layer that is sure of wrong values has stored less than nothing, which counts as nothing.
    assert study.stored_bits(Knows(facts, 40, scale=-50.0), facts) == 0


def test_sizes_and_operations_of_the_layers():
    """A mixture never has more operations than the dense layer."""
    dense = study.make_layer(study.DENSE, 1.0)
    limit = sum(study.layer_ops(dense))
    assert limit == study.num_parameters(dense) == 2 * 16 * 160
    for arm, number in zip(study.MIXTURES, study.NUM_EXPERTS, strict=True):
        layer = study.make_layer(arm, 1.0)
        groups = math.isqrt(number)
        per_group = number // groups
        experts, gate = study.layer_ops(layer)
        assert experts == 4 * 2 * 16 * 16  # 4 experts of 16 hidden units
        # W_gate and W_noise of the groups, and of the experts in 2 of them.
        assert gate == 2 * 16 * (groups + 2 * per_group) and experts + gate <= limit
        assert study.num_parameters(layer) == number * 2 * 16 * 16 + 2 * 16 * (groups + number)
        assert layer.gate.num_experts == number and layer.k == 4


def test_a_layer_learns_what_fits_and_a_longer_text_no_more():
    settings = study.FactsStudy.own | {"epochs": 20}
    few, many = (study.run_of(Arm("moe-16", times=size), 1, settings) for size in (0.1, 1))
    # 8,832 parameters: 2 bits for each of them, 8 bits in a fact.
    assert many["parameters"] == 8832 and many["facts"] == 2208 and few["facts"] == 221
    assert 0.9 * 8 * 221 < few["bits"] <= 8 * 221  # nearly all of a small corpus
    assert few["bits"] < many["bits"] < 8 * 2208
    again = study.run_of(Arm("moe-16", times=0.1), 1, settings)
    assert again == few


def test_a_loss_that_is_not_finite_stops_the_run():
    with pytest.raises(FloatingPointError, match="moe-4-seed1: the loss is not finite"):
        study.run_of(
            Arm("moe-4"), 1, study.FactsStudy.own | {"bits": 0.2, "epochs": 3, "rate": 1e38}
        )


def test_the_study_grows_and_its_page_is_made_of_the_stored_runs(tmp_path, capsys):
    def run(*options):
        places = [f"--runs={tmp_path / 'runs'}", f"--output={tmp_path / 'results'}"]
        return run_study("facts", ["--epochs=3", "--bits=0.1", *places, *options]).by_arm()

    page = tmp_path / "results" / "facts.md"
    assert run("--seeds", "1", "--arms", "dense").keys() == {Arm("dense")}
    assert "nothing to report yet" in capsys.readouterr().out and not page.exists()
    table = run("--seeds", "1", "2", "--arms", "moe-16", "moe-4", "moe-16 x2")
    assert {str(arm): [*runs] for arm, runs in table.items()} == {
        "dense": [1], "moe-4": [1, 2], "moe-16": [1, 2], "moe-16 x2": [1, 2],
    }  # fmt: skip
    text = page.read_text()
    assert "(two seeds, not decided)" in text
    assert "moe-lab study facts --bits 0.1 --epochs 3" in text
    assert "| moe-16 against the mean of the mixtures, within 15% |" in text
    assert rebuilds("facts", "facts", tmp_path / "results")
    with pytest.raises(ConfigError, match=r"facts.json must hold runs with .*'epochs': 50"):
        run_study("facts", [f"--output={tmp_path / 'results'}", f"--runs={tmp_path / 'runs'}"])
    for wrong in ("0", "nan", "two"):
        with pytest.raises(SystemExit):
            run("--rate", wrong)
        assert f"--rate: must be a positive number, got '{wrong}'" in capsys.readouterr().err
