"""The plan of a cluster, for hand-worked numbers and for real models and optimizers."""

import dataclasses
import itertools
import json
import math
import re
from typing import get_args
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from moe_lab.analysis.cluster import PAPER, Efficiency, exchange_bytes, leaving, mask_bytes, plan
from moe_lab.analysis.devices import DEVICES, Accelerator, Device
from moe_lab.benchmarks.memory import saved_bytes
from moe_lab.commands import plan_cluster
from moe_lab.commands._plan_cluster import grown, parse_device, parse_efficiency
from moe_lab.data import Batch
from moe_lab.errors import ConfigError
from moe_lab.models import LanguageModel
from moe_lab.training.config import config_from_dict, read_config
from moe_lab.training.optimizers import make_optimizers
from tiny import ROOT

from moe_ext import HierarchicalBalancedGate, MoE, ops
from moe_ext.distributed import ExchangeUnit, ExpertPlacement, Placement


def config(moe=None, data=None, optimizer=None, **model):
    """One layer of 8 experts 4 -> 6 -> 4 with k = 2, and a vocabulary of 10."""
    moe = {"num_experts": 8, "k": 2, "hidden_sizes": [6]} | (moe or {})
    model = {"d_model": 4, "layers": ["moe"], "dropout": 0.0} | model | {"moe": moe}
    data = {"vocab_size": 10, "tokens_per_batch": 12} | (data or {})
    return config_from_dict({"model": model, "data": data, "optimizer": optimizer or {}})


DEVICE = Device(flops=1e6, memory=1e5, memory_bandwidth=1e6, link=1e4)


def test_a_plan_worked_by_hand():
    p = plan(config(), DEVICE, 4)
    # Embedding 10 · 4, softmax 10 · 4 + 10, gate 2 · 4 · 8. An expert has 2 · 4 · 6; a device has
    # two.
    assert (p.dense_parameters, p.expert_parameters) == (40 + 50 + 64, 8 * 48)
    assert p.parameter_bytes == p.gradient_bytes == 4 * (154 + 2 * 48)
    assert p.optimizer_bytes == 2 * p.parameter_bytes  # Adam's moments
    # 12 tokens · 2 experts, 3/4 of them remote: 18 rows of 4 + 4 numbers of 4 bytes, in both
    # passes.
    assert p.exchange_bytes == 2 * 18 * 8 * 4
    assert p.reduce_bytes == 2 * 3 / 4 * 4 * 154
    # Multiply-adds of a token: gate 64, experts 2 · 48, softmax 40. Each is 2 flops in 3 passes.
    assert p.flops == 2 * 3 * 12 * (64 + 96 + 40)
    assert p.expert_intensity == 6 * 2 / 4  # hidden width · 2 / itemsize
    assert p.device_intensity == 100
    # x, sigmoid(y), embedding and softmax 4 each; gate 4 · 8; 2 rows with 6 hidden, 4 in and 4 out.
    assert p.activation_bytes == 4 * 12 * (16 + 32 + 2 * 14)
    assert p.memory_bytes == 4 * 1000 + p.activation_bytes
    assert p.network_seconds == pytest.approx((1152 + 924) / 1e4)
    assert p.compute_seconds == pytest.approx(p.flops / 1e6)
    assert p.optimizer_seconds == pytest.approx((3 * 1000 + 2 * 2000) / 1e6)
    assert p.step_seconds(overlap=False) == pytest.approx(0.2076 + 0.0144 + 0.007)
    assert p.step_seconds(overlap=True) == pytest.approx(0.2076 + 0.007)
    assert p.efficiency(overlap=True) == pytest.approx(0.0214 / 0.2146)
    assert p.share_of_peak(overlap=False) == pytest.approx(0.0144 / 0.229)


def test_options_of_a_plan():
    p = plan(config(), DEVICE, 4)
    # The hidden layers are recomputed and not saved: 2 rows of 4 · 6 multiply-adds.
    again = plan(config({"recompute": True}), DEVICE, 4)
    assert again.flops == p.flops + 2 * 12 * 2 * 24
    assert again.activation_bytes == p.activation_bytes - 4 * 12 * 2 * 6
    # Each of 4 devices has 2 of 8 experts: a token uses one of them in 28 - 15 of 28 cases.
    tokens = plan(config(), DEVICE, 4, exchange="tokens")
    copies = 12 * 3 * 13 / 28
    assert tokens.exchange_bytes == pytest.approx(2 * copies * 8 * 4 + 18 * (4 + 4 + 4))
    # Factored moments of an expert: 4 + 6 and 6 + 4 numbers.
    factored = plan(config(optimizer={"experts": "factored_adam"}), DEVICE, 4)
    assert factored.optimizer_bytes == 4 * (2 * 154 + 2 * 20)
    # A step of two batches sends and computes twice as much; its activations are those of one
    # batch.
    two = plan(config(optimizer={"accumulate": 2}), DEVICE, 4)
    assert (two.exchange_bytes, two.flops) == (2 * p.exchange_bytes, 2 * p.flops)
    assert (two.reduce_bytes, two.memory_bytes) == (p.reduce_bytes, p.memory_bytes)
    # 3 devices have 3, 3 and 2 experts. A single device has all experts and sends nothing.
    assert plan(config(), DEVICE, 3).parameter_bytes == 4 * (154 + 3 * 48)
    alone = plan(config(), DEVICE, 1)
    assert (alone.exchange_bytes, alone.reduce_bytes, alone.network_seconds) == (0, 0, 0)
    assert alone.efficiency(overlap=False) == 1


def test_secondary_gates_with_their_groups():
    moe = {"num_groups": 4, "k": 2}  # 4 groups of 2; a secondary gate has 2 · 4 · 2 weights
    everywhere = plan(config(moe), DEVICE, 4, placement="experts")
    split = plan(config(moe), DEVICE, 4)
    assert everywhere.dense_parameters - split.dense_parameters == 4 * 16
    assert everywhere.parameter_bytes - split.parameter_bytes == 4 * 3 * 16
    assert everywhere.reduce_bytes - split.reduce_bytes == 2 * 3 / 4 * 4 * 64
    # Each token has 2 of 4 groups, 3/4 of them remote: 18 pairs, each a copy of 4 + 4 numbers. In
    # forward, a gate, an int32 index and 2 noises go, 2 gates and 2 int32 indices come back. In
    # backward, the gradients of 1 + 2 gates.
    assert split.exchange_bytes == 2 * 18 * 8 * 4 + 18 * (4 + 4 + 2 * 4 + 2 * 8) + 18 * 3 * 4
    assert everywhere.exchange_bytes == 2 * 36 * 8 * 4


def test_balanced_gates_with_their_groups():
    moe = {"num_groups": 4, "k": 2, "gate": "balanced", "w_load": 0}
    everywhere = plan(config(moe), DEVICE, 4, placement="experts")
    split = plan(config(moe), DEVICE, 4)
    # A secondary gate has 4 · 2 weights and 2 thresholds.
    assert everywhere.dense_parameters - split.dense_parameters == 4 * 10
    # 18 pairs as above. A gate and an int32 index go; an int32 number, 2 gates and 2 int32 indices
    # come back. Of the scores, 3/4 are remote, each a float32 number; a byte comes back.
    masks = 12 * 3 / 4 * 5
    sent = 2 * 18 * 8 * 4 + 18 * (4 + 4 + 4 + 2 * 8) + 18 * 3 * 4
    assert split.exchange_bytes == sent + masks * 4
    assert everywhere.exchange_bytes == 2 * 36 * 8 * 4 + masks * (4 + 2 * 2)


def bytes_of_balanced_step(group, rank):
    """Returns the bytes of each pass, and the remote slots, copies and experts of this rank."""
    gate = HierarchicalBalancedGate(4, 5, 3, (2, 1))
    for weight in (gate.w_gate, gate.w_gate_secondary):
        torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(2))
    layer = MoE(4, 15, 2, gate=gate, w_load=0.0, process_group=group)
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    forward, backward = [], []

    def noting(sent):
        all_to_all_single = dist.all_to_all_single

        def note(output, rows, received, counts, **options):
            sent.append((sum(counts) - counts[rank]) * rows[:1].nbytes)
            return all_to_all_single(output, rows, received, counts, **options)

        return patch.object(dist, "all_to_all_single", note)

    with noting(forward):
        y, aux = layer(x)
    with noting(backward):
        (y.sum() + aux.loss).backward()
    del forward[2]  # the numbers of rows, after the scores and the mask
    primary = gate.select_groups(x, layer.sharding.balanced)
    owner = layer.sharding.group_exchange.exchange.placement.owner
    token = ops.token_index(primary.group_index, primary.token_offsets).tolist()
    owners = [owner(group_index) for group_index in primary.group_index.tolist()]
    slots = sum(owner != rank for owner in owners)
    copies = len({pair for pair in zip(token, owners, strict=True) if pair[1] != rank})
    experts = sum(owner(expert // 3) != rank for expert in aux.expert_index.tolist())
    return sum(forward), sum(backward), slots, copies, experts


def test_bytes_of_balanced_groups(workers):
    """The predicted bytes of both ranks equal those that are sent."""
    steps = workers.run(2, bytes_of_balanced_step)
    forward, backward, slots, copies, experts = map(sum, zip(*steps, strict=True))
    k2 = experts / slots
    sent = exchange_bytes(slots, copies, 4, 4, 4, "tokens", secondary=(3, k2), balanced=True)
    assert forward == pytest.approx(sent[0] + mask_bytes(2 * 7 * 5, 2))
    assert backward == pytest.approx(sent[1])


@pytest.mark.parametrize(
    ("num_experts", "num_processes", "group", "k"),
    [(8, 4, 1, 2), (7, 3, 1, 3), (2, 3, 1, 1), (12, 3, 3, 2), (6, 2, 1, 6)],
)
def test_leaving_is_the_mean_over_all_choices(num_experts, num_processes, group, k):
    placement = ExpertPlacement(num_experts, num_processes, group)
    rows = copies = 0
    choices = list(itertools.combinations(range(num_experts // group), k))
    for home, groups in itertools.product(range(num_processes), choices):
        owners = [placement.owner(g * group) for g in groups]
        rows += sum(owner != home for owner in owners) * (k if group > 1 else 1)
        copies += len(set(owners) - {home})
    cases = num_processes * len(choices)
    assert leaving(placement, k) == pytest.approx((rows / cases, copies / cases))


CONFIGS = {
    "flat": {},
    "hierarchical": {"moe": {"num_experts": 8, "num_groups": 4, "k": 2, "hidden_sizes": [6]}},
    "swiglu": {"moe": {"activation": "swiglu"}},
    "mixed": {"layers": ["lstm", "moe", "ffn"], "lstm_units": 6, "ffn": {"hidden_sizes": [5]}},
    "square": {"layers": ["lstm", "moe"], "lstm_units": 4},
}  # fmt: skip


ADAM, FACTORED = "adam", "factored_adam"


@pytest.mark.parametrize(
    ("experts", "embedding", "dtype"),
    [
        (ADAM, ADAM, "float32"),
        (FACTORED, ADAM, "float32"),
        (ADAM, FACTORED, "float32"),
        (FACTORED, FACTORED, "bfloat16"),
    ],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_memory_is_that_of_a_model_and_its_optimizers(name, experts, embedding, dtype):
    optimizer = {"experts": experts, "embedding": embedding}
    c = config(optimizer=optimizer, dtype=dtype, **CONFIGS[name])
    p = plan(c, DEVICE, 1)
    model = LanguageModel(c.model, c.data.vocab_size)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    state = 0
    for optimizer in make_optimizers(model, c.optimizer):
        optimizer.step()
        for values in optimizer.state.values():
            state += sum(value.nbytes for key, value in values.items() if key != "step")
    assert p.parameter_bytes == sum(param.nbytes for param in model.parameters())
    assert p.gradient_bytes == sum(param.grad.nbytes for param in model.parameters())
    assert p.optimizer_bytes == state


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("num_groups", [0, 4])
def test_what_is_kept_is_about_what_autograd_keeps(num_groups, dropout):
    moe = {"num_experts": 16, "num_groups": num_groups, "k": 2, "hidden_sizes": [64]}
    data = {"vocab_size": 50, "tokens_per_batch": 16 * 20}
    c = config(moe, data, d_model=32, layers=["lstm", "moe", "lstm", "ffn"], dropout=dropout)
    model = LanguageModel(c.model, 50)
    ids = torch.randint(50, (16, 20))
    batch = Batch(ids, ids, torch.ones_like(ids, dtype=torch.bool), torch.arange(16))
    kept = saved_bytes(lambda: model.loss(batch).nll_sum, model.parameters())
    kept -= 4 * (32 * 50 + 50)  # softmax gradients, computed in forward
    assert plan(c, DEVICE, 1).activation_bytes == pytest.approx(kept, rel=0.15)


def test_a_trillion_parameters():
    """Sec. 3.1: the load of a device does not grow if experts are in proportion to devices."""
    base = read_config(ROOT / "configs/news/moe-131072-h.toml", ["data.tokens_per_batch=19531"])
    small, large = (plan(grown(base, n), DEVICES["k40"], 128 * n) for n in (1, 8))
    assert small.num_experts == 2**17  # 137 billion parameters (App. D)
    assert small.dense_parameters + small.expert_parameters == pytest.approx(137.7e9, rel=1e-3)
    assert large.dense_parameters + large.expert_parameters > 1.1e12
    assert large.memory_bytes < 1.05 * small.memory_bytes
    assert large.exchange_bytes < 1.01 * small.exchange_bytes
    assert large.step_seconds(overlap=False) < 1.05 * small.step_seconds(overlap=False)
    # Replicated secondary gates would grow with the experts: 2 · 512 weights each.
    copied = plan(grown(base, 8), DEVICES["k40"], 1024, placement="experts")
    assert copied.dense_parameters - large.dense_parameters == 2 * 512 * 2**20


PUBLISHED = {
    "/".join(path.parts[-2:]): (float(match[1]), int(match[2]))
    for path in sorted(ROOT.glob("configs/*/moe-*.toml"))
    if (match := re.search(r"([\d.]+) TFLOPS/GPU on (\d+) K40s", path.read_text()))
    and "moe-1-" not in path.name  # a dense layer
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_efficiencies(name):
    """Tables 7 and 8: the TFLOPS per device of the mixtures, within a factor of 1.3.

    As in the tables, each GEMM counts once.
    """
    assert len(PUBLISHED) == 15
    published, num_devices = PUBLISHED[name]
    path = ROOT / "configs" / name
    tokens = read_config(path).data.tokens_per_batch // num_devices
    once = [f"data.tokens_per_batch={tokens}", "model.moe.recompute=false"]
    p = plan(read_config(path, once), DEVICES["k40"], num_devices)
    tflops = p.flops / p.expected_seconds(DEVICES["k40"], PAPER) / 1e12
    assert 1 / 1.3 < tflops / published < 1.3


def test_an_expected_step_worked_by_hand():
    p = plan(config(), DEVICE, 3)  # 3, 3 and 2 of 8 experts; 12 tokens with 2 experts
    assert (p.expert_rows, p.imbalance) == (3 * 12 * 2 / 8, 3 * 3 / 8)
    assert p.expert_flops == 2 * 3 * 12 * 96
    assert p.vocabulary_bytes == pytest.approx(2 * 2 / 3 * 4 * (40 + 50))
    efficiency = Efficiency(dense=0.5, experts=0.8, half_rows=3)
    experts = 9 / 8 * p.expert_flops / (0.8 * 9 / 12)
    computed = ((p.flops - p.expert_flops) / 0.5 + experts) / 1e6
    sent = (9 / 8 * p.exchange_bytes + 2 * 2 / 3 * 4 * 64) / 1e4
    assert p.expected_seconds(DEVICE, efficiency) == pytest.approx(
        computed + sent + p.optimizer_seconds
    )
    # At the peak, without waiting for a device with more experts.
    p = plan(config(), DEVICE, 1)
    assert p.expected_seconds(DEVICE, Efficiency()) == pytest.approx(p.step_seconds(overlap=False))


def test_efficiency_of_the_command():
    assert parse_efficiency(["paper"]) == PAPER
    assert parse_efficiency(["paper", "dense=0.5"]) == dataclasses.replace(PAPER, dense=0.5)
    for words, message in (
        (["dense=fast"], "--efficiency: dense must be a number, got 'fast'"),
        (["dense=2"], "--efficiency: Efficiency: dense must be in"),
        (["all=1"], "--efficiency must be a preset .*, got .all=1"),
        (["half_rows=-1"], "half_rows must be at least 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_efficiency(words)


def test_errors():
    with pytest.raises(ValueError, match="plan: num_devices must .*got 0"):
        plan(config(), DEVICE, 0)
    with pytest.raises(ValueError, match="plan: exchange must .*got 'all'"):
        plan(config(), DEVICE, 2, exchange="all")
    with pytest.raises(
        ValueError, match="plan: config.model.moe.num_null_experts must be 0, got 2"
    ):
        plan(config({"num_null_experts": 2}), DEVICE, 1)
    with pytest.raises(ValueError, match="plan: config.model.layers must"):
        plan(config(layers=["lstm"]), DEVICE, 2)
    with pytest.raises(ValueError, match="Device: link must .*got 0"):
        dataclasses.replace(DEVICE, link=0)


def test_devices_of_the_command():
    assert get_args(ExchangeUnit) == plan_cluster.EXCHANGES
    assert get_args(Placement) == plan_cluster.PLACEMENTS
    for name, device in DEVICES.items():  # without the faster links of an accelerator's domain
        assert vars(parse_device([name])).items() <= vars(device).items()
    assert {"h100", "gb300"} < {n for n in DEVICES if isinstance(DEVICES[n], Accelerator)}
    assert parse_device(["k40", "link=5e9"]) == dataclasses.replace(DEVICES["k40"], link=5e9)
    words = ["flops=1e6", "memory=1e5", "memory_bandwidth=1e6", "link=1e4"]
    assert parse_device(words) == DEVICE
    for words, message in (
        (["v100"], "--device must"),
        (["k40", "link=fast"], "--device: link must"),
        (["flops=1e6", "memory=1"], "must be a preset or also give memory_bandwidth, link"),
        (["k40", "link=-1"], "link must"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_device(words)


def test_the_command(tmp_path, capsys):
    path = tmp_path / "plan.json"
    small = ["model.d_model=8", "model.moe.num_experts=4", "model.moe.k=2"]
    arguments = [str(ROOT / "configs/small/moe-32.toml"), *small, "--devices", "2", "4", "--weak"]
    plan_cluster.main([*arguments, "--device", "h200", "memory=1", "--json", str(path)])
    assert "expected" not in capsys.readouterr().out
    plan_cluster.main(
        [*arguments, "--device", "h200", "memory=1", "--json", str(path), "--efficiency", "paper"]
    )
    out = capsys.readouterr().out
    assert "| experts of a MoE layer | 4 | 8 |" in out
    assert "| fits | NO | NO |" in out
    assert "| expected TFLOPS, each device | " in out
    record = json.loads(path.read_text())
    assert record["device"]["memory"] == 1
    two, four = record["plans"]
    assert two["exchange_bytes"] == 2 * (2560 * 2 / 2) * 16 * 4
    assert math.isclose(four["exchange_bytes"], two["exchange_bytes"] * 1.5)
    with pytest.raises(ConfigError, match="--devices must"):
        plan_cluster.main([*arguments, "--devices", "2", "3"])
