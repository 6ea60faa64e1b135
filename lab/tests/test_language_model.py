"""The language model of App. C.1: its parts, its arithmetic, its cost."""

from dataclasses import replace

import pytest
import reference as ref
import torch
from assertions import assert_exact
from moe_lab.analysis.costs import cost
from moe_lab.analysis.experts import ExpertReport, by_specialisation, expert_reports
from moe_lab.analysis.routed_text import route_text
from moe_lab.data import Batch, EncodedSentences, Vocabulary
from moe_lab.models import (
    LSTM,
    FeedForwardConfig,
    LanguageModel,
    LanguageModelConfig,
    MoEConfig,
    SampledSoftmax,
    evaluating,
    sampled_cross_entropy,
)
from torch.nn import functional as F

from moe_ext import (
    BalancedGate,
    Capacity,
    ExpertChoiceGate,
    HierarchicalBalancedGate,
    HierarchicalNoisyTopKGate,
    NoisyTopKGate,
    ReLUGate,
    TopKGate,
)

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 50
VOCABULARY = Vocabulary([*(f"w{i}" for i in range(VOCAB - 2)), "<unk>", "</s>"])


def small_config(**changes):
    options = {
        "d_model": 8,
        "layers": ["lstm", "moe", "lstm"],
        "dropout": 0.0,
        "moe": MoEConfig(num_experts=4, k=2, hidden_sizes=[16]),
        "ffn": FeedForwardConfig(hidden_sizes=[32]),
    }
    return LanguageModelConfig(**(options | changes))


def build(noise=None, **changes):
    torch.manual_seed(1)
    noise = noise or torch.Generator().manual_seed(2)
    return LanguageModel(small_config(**changes), VOCAB, noise_generator=noise)


def random_batch(lengths, padding=0, fill=0):
    """Makes random sentences, padded with id ``fill`` to the longest plus ``padding``."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCAB, (2, len(lengths), max(lengths)), generator=generator)
    ids = F.pad(ids, (0, padding), value=fill)
    mask = torch.arange(ids.shape[2]) < torch.tensor(lengths)[:, None]
    inputs, targets = ids.masked_fill(~mask, fill)
    return Batch(inputs, targets, mask, torch.arange(len(lengths)))


@pytest.mark.parametrize("target", [-1, 7])
def test_targets_that_are_no_class(target):
    hidden, softmax = torch.randn(2, 4), SampledSoftmax(4, 7, 3)
    targets = torch.tensor([3, target])
    with pytest.raises(ValueError, match="^sampled_cross_entropy: targets must .*got .*(7|-1)"):
        softmax.loss(hidden, targets)
    with pytest.raises(IndexError, match="^linear_cross_entropy: target must .*got (7|-1)"):
        softmax.eval().loss(hidden, targets)


def test_shapes_that_do_not_fit_a_softmax():
    fits = {
        "hidden": torch.randn(2, 4), "weight": torch.randn(7, 4), "bias": torch.zeros(7),
        "targets": torch.tensor([3, 1]),
    }  # fmt: skip
    draw = torch.tensor([1, 2]), torch.zeros(2), torch.zeros(2)
    for name in fits:
        wrong = fits | {name: torch.ones(1) if name != "targets" else torch.tensor([1])}
        with pytest.raises(ValueError, match=f"^sampled_cross_entropy: {name} must"):
            sampled_cross_entropy(*wrong.values(), *draw)


def test_evaluating_leaves_each_modules_mode():
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout())
    model[1].eval()
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False]


def test_lstm_starts_with_open_forget_gate():
    lstm = LSTM(8)
    bias = lstm.lstm.bias_ih_l0 + lstm.lstm.bias_hh_l0
    assert torch.equal(bias, torch.tensor([0.0] * 8 + [1.0] * 8 + [0.0] * 16))


def test_lstm_weights_have_unit_gain():
    lstm = LSTM(64, 256)
    assert lstm(torch.randn(2, 3, 64)).shape == (2, 3, 64)
    assert lstm.lstm.weight_ih_l0.var().item() == pytest.approx(1 / 128, rel=0.05)
    assert lstm.lstm.weight_hh_l0.var().item() == pytest.approx(1 / 128, rel=0.05)
    assert lstm.lstm.weight_hr_l0.var().item() == pytest.approx(1 / 256, rel=0.05)
    lstm = LSTM(64, 64)
    assert lstm(torch.randn(2, 3, 64)).shape == (2, 3, 64)
    assert lstm.projection.var().item() == pytest.approx(1 / 64, rel=0.05)
    with pytest.raises(ValueError, match="units must"):
        LSTM(64, 32)


@pytest.mark.parametrize("units", [None, 6, 9])
def test_lstm_is_that_of_its_equations(units):
    """Includes a square projection, which torch's LSTM does not have."""
    lstm = LSTM(6, units, d_input=5).double()
    weights = dict(lstm.lstm.named_parameters())
    bias = weights["bias_ih_l0"] + weights["bias_hh_l0"]
    p = {None: None, 6: lstm.projection, 9: weights.get("weight_hr_l0")}[units]
    given = weights["weight_ih_l0"], weights["weight_hh_l0"], bias, p
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    m, c = x.new_zeros(6), x.new_zeros(units or 6)
    outputs, _, cells = zip(*(ref.LSTM(sentence, *given, m, c) for sentence in x), strict=True)
    expected = torch.stack([torch.stack(sentence) for sentence in outputs])
    assert_exact(lstm(x), expected)
    state = lstm.start(2)
    for t in range(4):
        state = lstm.step(x[:, t], state)
        assert_exact(state.m, expected[:, t])
    assert_exact(state.c, torch.stack(cells))
    actual, exact = (
        torch.autograd.grad(y.square().sum(), list(lstm.parameters())) for y in (lstm(x), expected)
    )
    for grad, exact_grad in zip(actual, exact, strict=True):
        assert_exact(grad, exact_grad)


@pytest.mark.parametrize("middle", ["moe", "moe_lstm", "ffn", "lstm"])
@pytest.mark.parametrize("residual", [True, False])
def test_layers_are_put_together_as_in_the_paper(middle, residual):
    """Sigmoid of the MoE (not of LSTMs), dropout of each output, then the residual (App. C.1)."""
    p = 0.25
    noise = torch.Generator()
    model = build(noise, layers=["lstm", middle, "lstm"], dropout=p, residual=residual)
    state = model.state_dict()
    batch = random_batch([4, 4, 4])
    rows = 12

    torch.manual_seed(7)
    noise.manual_seed(8)
    actual, aux = model(batch.inputs, batch.mask)

    torch.manual_seed(7)
    h = F.dropout(F.embedding(batch.inputs, state["embedding.weight"]), p)
    for layer, kind in zip(model.layers, ["lstm", middle, "lstm"], strict=True):
        if kind == "lstm":
            y = layer(h)
        elif kind == "ffn":
            w1, w2 = (w.squeeze(0) for w in layer.weights)
            y = torch.sigmoid(F.relu(h @ w1) @ w2)
        elif kind == "moe_lstm":
            noise.manual_seed(8)
            y = layer(h)[0]
        else:
            noise.manual_seed(8)
            y = torch.sigmoid(layer(h)[0])
        h = h * residual + F.dropout(y, p)
    torch.testing.assert_close(actual, h)
    assert len(aux) == middle.startswith("moe")
    if aux:
        assert aux[0].gates.shape == (rows, 2)


def test_loss_parts():
    model = build(layers=["moe", "lstm", "moe"])
    batch = random_batch([5, 3, 4])
    parts = model.loss(batch)
    assert parts.num_tokens == 12 and len(parts.aux) == 2
    # The balancing loss of each layer counts once and is not part of the nats.
    torch.testing.assert_close(parts.aux_loss, parts.aux[0].loss + parts.aux[1].loss)
    model.eval()
    h, _ = model(batch.inputs, batch.mask)
    logits = F.linear(h, model.softmax.weight, model.softmax.bias)
    expected = F.cross_entropy(logits[batch.mask], batch.targets[batch.mask], reduction="none")
    torch.testing.assert_close(model.token_nll(batch), expected.detach())
    torch.testing.assert_close(model.loss(batch).nll_sum, expected.sum())


def test_padding_changes_nothing():
    def run(batch):
        model = build()
        parts = model.loss(batch)
        (parts.nll_sum / parts.num_tokens + parts.aux_loss).backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        return parts, gradients

    parts, gradients = run(random_batch([6, 2, 5]))
    padded_parts, padded_gradients = run(random_batch([6, 2, 5], padding=4, fill=33))
    torch.testing.assert_close(padded_parts.nll_sum, parts.nll_sum)
    torch.testing.assert_close(padded_parts.aux_loss, parts.aux_loss)
    assert torch.equal(padded_parts.aux[0].expert_index, parts.aux[0].expert_index)
    for name, gradient in gradients.items():
        torch.testing.assert_close(padded_gradients[name], gradient, msg=name)


@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16"}, {"num_sampled": 5}])
@pytest.mark.parametrize(
    ("middle", "gate"),
    [("moe", "noisy_topk"), ("moe", "balanced"), ("moe_lstm", "noisy_topk"), ("ffn", "noisy_topk")],
)
def test_an_empty_batch_has_zero_gradients(middle, gate, changes):
    """A rank has an empty batch if there are fewer sentences than ranks."""
    moe = MoEConfig(num_experts=4, k=2, hidden_sizes=[16], gate=gate, w_load=0)
    model = build(layers=["lstm", middle, "lstm"], moe=moe, **changes)
    empty = random_batch([6, 3]).part(2, 3)
    assert empty.inputs.shape == (0, 6)
    parts = model.loss(empty)
    (parts.nll_sum + parts.aux_loss).backward()
    assert parts.nll_sum == 0 and parts.num_tokens == 0 and parts.aux_loss == 0
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.count_nonzero() == 0, name
    assert model.eval().token_nll(empty).shape == (0,)


def test_moe_lstm_layers():
    """Has a balancing loss; padding has no effect; results with memory_slots are identical."""

    def run(batch, **changes):
        noise = torch.Generator().manual_seed(2)
        model = build(noise, layers=["moe", "moe_lstm"], dropout=0.25, **changes)
        torch.manual_seed(7)
        parts = model.loss(batch)
        (parts.nll_sum / parts.num_tokens + parts.aux_loss).backward()
        return parts, [p.grad for p in model.parameters()]

    batch = random_batch([6, 2, 5])
    parts, gradients = run(batch)
    assert len(parts.aux) == 2 and parts.aux[1].tokens_per_expert.sum() == 2 * 13
    assert parts.aux[1].loss > 0
    torch.testing.assert_close(parts.aux_loss, parts.aux[0].loss + parts.aux[1].loss)
    again, again_gradients = run(batch, memory_slots=2)
    assert torch.equal(again.nll_sum, parts.nll_sum)
    assert all(torch.equal(a, e) for a, e in zip(again_gradients, gradients, strict=True))
    # Other ids in the padding do not change the dropout masks.
    inputs = batch.inputs.masked_fill(~batch.mask, 33)
    filled, filled_gradients = run(replace(batch, inputs=inputs))
    torch.testing.assert_close(filled.nll_sum, parts.nll_sum)
    for a, e in zip(filled_gradients, gradients, strict=True):
        torch.testing.assert_close(a, e)


def test_evaluation_draws_nothing():
    noise = torch.Generator()
    model = build(noise, dropout=0.5).eval()
    batch = random_batch([4, 3])
    before = torch.get_rng_state(), noise.get_state()
    first, second = model.token_nll(batch), model.token_nll(batch)
    assert torch.equal(first, second)
    assert all(map(torch.equal, before, (torch.get_rng_state(), noise.get_state())))


def test_models_of_one_seed_share_their_trunk():
    moe, dense = build().state_dict(), build(layers=["lstm", "ffn", "lstm"]).state_dict()
    shared = [name for name in moe if not name.startswith("layers.1")]
    assert len(shared) == 11
    for name in shared:
        assert torch.equal(moe[name], dense[name]), name


TOPK, GROUPS = {"gate": "topk", "w_load": 0}, {"num_groups": 4}
MOE_ERRORS = {
    "k": ({"num_experts": 4, "k": 5}, {"num_experts": 32, "num_groups": 8, "k": 5}),
    "w_load": ({"w_load": -1}, {"gate": "balanced"}),
    "gate": ({"gate": "top"},),
    "num_groups": ({"num_groups": 5}, TOPK | GROUPS, TOPK | GROUPS | {"gate": "expert_choice"}),
    "w_switch": ({"w_switch": -1}, GROUPS | {"w_switch": 0.1}),
    "w_switch_per_sequence": ({"w_switch_per_sequence": -1},),
    "w_z": ({"w_z": -1}, GROUPS | {"w_z": 0.1}),
    "score": (TOPK | {"score": "relu"}, {"score": "sigmoid"}),
    "scale": (TOPK | {"scale": 0},),
    "bias_update_rate": ({"bias_update_rate": 0.1},),
    "shared_sizes": ({"shared_sizes": [0]},),
    "num_identity_experts": ({"num_identity_experts": -1},),
    "num_null_experts": ({"num_null_experts": 1, "num_groups": 8, "k": 1},),
    "capacity_factor": ({"capacity_factor": -0.5},),
    "drop": ({"drop": "score"}, {"drop": "last"}),
}
RECURRENT = {  # mixtures in an LSTM
    "gate": ({"gate": "balanced", "w_load": 0}, {"gate": "expert_choice", "w_load": 0}),
    "w_z": ({"w_z": 1},),
    "num_null_experts": ({"num_null_experts": 1},),
    "shared_sizes": ({"shared_sizes": [8]},),
    "bias_update_rate": (TOPK | {"bias_update_rate": 0.1},),
}


def test_configuration_errors():
    for option, several in MOE_ERRORS.items():
        for options in several:
            with pytest.raises(ValueError, match=f"{option} must .*got"):
                MoEConfig(**options)
    for option, several in RECURRENT.items():
        for options in several:
            with pytest.raises(ValueError, match=f"moe.{option} must .*got"):
                small_config(layers=["moe_lstm"], moe=MoEConfig(**options))
    unused = {"dropout": 1.0, "memory_slots": -1, "num_sampled": -1, "lstm_units": 4}
    for option, value in [*unused.items(), ("layers", ["lstm", "mlp"]), ("layers", [])]:
        with pytest.raises(ValueError, match=f"{option} must .*got"):
            small_config(**{option: value})
    with pytest.raises(ValueError, match="activation must .*got .rely"):
        FeedForwardConfig(activation="rely")


@pytest.mark.parametrize("num_groups", [0, 2])
def test_options_reach_the_layers(num_groups):
    layer_options = {"w_importance": 0.3, "w_load": 0.7}
    more = {"activation": "tanh", "noise_epsilon": 0.05, "recompute": True, "hidden_sizes": [6, 5]}
    moe = MoEConfig(num_experts=4, num_groups=num_groups, k=2, **layer_options, **more)
    ffn = FeedForwardConfig(hidden_sizes=[7], activation="silu")
    model = build(layers=["moe", "moe_lstm", "ffn"], memory_slots=3, moe=moe, ffn=ffn)
    mixture, recurrent, dense = model.layers
    for layer, gate in ((mixture, mixture.gate), (recurrent, recurrent.cell.moe.gate)):
        assert (layer.w_importance, layer.w_load, gate.noise_epsilon) == (0.3, 0.7, 0.05)
    assert [len(w[0]) for w in mixture.experts.weights] == [8, 6, 5]
    assert mixture.experts.activation == "tanh" and mixture.recompute
    assert recurrent.memory_slots == 3
    assert [len(w[0]) for w in dense.weights] == [8, 7] and dense.activation == "silu"


def test_options_of_later_routers_reach_the_layer():
    gate_options = {"score": "sigmoid", "renormalize": False, "scale": 2.5}
    gate_options["bias_update_rate"] = 0.01
    zero_experts = {"num_identity_experts": 2, "num_null_experts": 1}
    capacity = {"capacity_factor": 1.5, "drop": "score"}
    losses = {"w_switch": 0.1, "w_switch_per_sequence": 0.2, "w_z": 0.3}
    more = {"num_experts": 4, "k": 2, "hidden_sizes": [6], "shared_sizes": [5]}
    moe = MoEConfig(**TOPK, **gate_options, **zero_experts, **capacity, **losses, **more)
    (layer,) = build(layers=["moe"], moe=moe).layers
    assert {name: getattr(layer.gate, name) for name in gate_options} == gate_options
    assert {name: getattr(layer, name) for name in zero_experts} == zero_experts
    assert layer.capacity == Capacity(1.5, "score")
    assert layer.gate.num_experts == 7 and layer.num_experts == 4
    assert layer.gate.selection_bias is not None
    assert [(loss.name, loss.weight) for loss in layer.losses] == [
        ("switch_loss", 0.1), ("switch_loss_per_sequence", 0.2), ("z_loss", 0.3),
    ]  # fmt: skip
    assert [len(w[0]) for w in layer.shared_expert.expert.weights] == [8, 5]


@pytest.mark.parametrize(
    ("options", "kind", "k"),
    [
        ({}, NoisyTopKGate, 2),
        ({"num_groups": 2}, HierarchicalNoisyTopKGate, 4),
        ({"gate": "topk", "w_load": 0}, TopKGate, 2),
        ({"gate": "topk", "w_load": 0, "score": "sigmoid", "bias_update_rate": 0.1}, TopKGate, 2),
        ({"gate": "expert_choice", "w_load": 0}, ExpertChoiceGate, 2),
        ({"gate": "relu", "w_load": 0, "w_importance": 0}, ReLUGate, 2),
        ({"gate": "balanced", "w_load": 0}, BalancedGate, 2),
        ({"gate": "balanced", "w_load": 0, "num_groups": 2}, HierarchicalBalancedGate, 4),
    ],
)
def test_gates(options, kind, k):
    """A model with any gate learns; a balanced gate gives each expert equally many tokens."""
    noise = torch.Generator().manual_seed(2)
    model = build(noise, moe=MoEConfig(num_experts=4, k=2, hidden_sizes=[16], **options))
    gate = model.layers[1].gate
    assert type(gate) is kind and gate.k == k == model.config.moe.experts_per_token
    batch = random_batch([5, 3, 4])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        parts = model.loss(batch)
        optimizer.zero_grad()
        (parts.nll_sum / parts.num_tokens + parts.aux_loss).backward()
        optimizer.step()
        losses.append(parts.nll_sum.item() / parts.num_tokens)
    assert losses[-1] < 0.5 * losses[0]
    loads = parts.aux[0].tokens_per_expert.tolist()
    assert sum(loads) == 12 * k or kind is ReLUGate
    assert len(set(loads)) == 1 or "balanced" not in options.values()
    assert len(model.eval().token_nll(batch)) == 12


@pytest.mark.parametrize("middle", ["moe", "ffn"])
@pytest.mark.parametrize("num_sampled", [0, 5])
def test_large_matrices_in_bfloat16(middle, num_sampled):
    """Activations are float32; results equal a float32 model with the same weights."""
    changes = {"layers": ["lstm", middle, "lstm"], "num_sampled": num_sampled}
    model, wide = (build(dtype=dtype, **changes) for dtype in ("bfloat16", "float32"))
    for name, p in model.named_parameters():
        small = "lstm" in name or "gate" in name
        assert p.dtype == (torch.float32 if small else torch.bfloat16), name
    wide.load_state_dict(model.state_dict())
    batch = random_batch([5, 3, 4])
    losses = []
    for module in (model, wide):
        module.train()
        torch.manual_seed(3)
        if module.softmax.sampler is not None:
            module.softmax.sampler.generator = torch.Generator().manual_seed(3)
        losses.append(module.loss(batch).nll_sum)
        losses[-1].backward()
    assert losses[0].dtype == torch.float32
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-3)
    for (name, p), q in zip(model.named_parameters(), wide.parameters(), strict=True):
        error = (p.grad - q.grad).norm()
        # A few roundings of 2^-9 each.
        assert error <= 0.02 * q.grad.norm() + 1e-3, name
    nll = model.eval().token_nll(batch)
    assert nll.dtype == torch.float32 and len(nll) == 12
    assert model.double().token_nll(batch).dtype == torch.float64


def test_gradients_of_a_bfloat16_embedding_are_added_up_in_float32():
    model = build(dtype="bfloat16", layers=["lstm"])
    h = model._embed(torch.full((3, 200), 7))
    assert h.dtype == torch.float32 and h.shape == (3, 200, 8)
    h.sum().backward()
    # In bfloat16, 256 + 1 is 256.
    assert torch.equal(model.embedding.weight.grad[7].float(), torch.full((8,), 600.0))
    assert model.embedding.weight.grad.count_nonzero() == 8


def test_cost_of_a_moe_lstm():
    """Two gate matrices [2 D, E], and E expert matrices [2 D, 4 D]."""
    D, E, K = 8, 4, 2
    counted = cost(build(layers=["moe_lstm"]))
    assert counted.parameters == 2 * 2 * D * E + E * 2 * D * 4 * D
    assert counted.ops_per_timestep == 2 * 2 * D * E + K * 2 * D * 4 * D
    assert counted.total_parameters == counted.parameters + 4 * D + VOCAB * (2 * D + 1)


def test_routed_text_is_without_dropped_slots():
    encoded = EncodedSentences([[1, 2, 3]] * 9, VOCABULARY.eos_id)
    model = build(moe=MoEConfig(num_experts=4, k=2, hidden_sizes=[8], capacity_factor=0.5))
    routed = route_text(model, encoded)
    # One batch of 36 tokens: at most 9 slots of each of the 4 experts; 36 · 2 slots were chosen.
    assert routed.slots_by_gate()[1].max() == 9 and len(routed.windows) == 36
    assert len(routed.position) == len(routed.expert) == len(routed.gate) <= 36


def test_reports_have_identity_and_null_experts():
    zero_experts = {"num_identity_experts": 2, "num_null_experts": 1}
    model = build(moe=MoEConfig(num_experts=4, k=2, hidden_sizes=[8], **zero_experts))
    for weight in (model.layers[1].gate.w_gate, *model.layers[0].parameters()):
        torch.nn.init.normal_(weight)
    sentences = [[i, 1, 2 * i] for i in range(2, 22)]
    routed = route_text(model, EncodedSentences(sentences, VOCABULARY.eos_id))
    reports = expert_reports(routed, VOCABULARY.words, num_words=VOCAB)
    assert len(reports) == 7 and sum(report.share for report in reports) == pytest.approx(2)
    shares = [word.share for report in reports for word in report.words if word.word == "w1"]
    assert len(shares) > 2 and sum(shares) == pytest.approx(2)


def test_experts_with_few_tokens_come_last():
    def report(expert, share, information):
        return ExpertReport(expert, share, information, purity=1.0, words=[], contexts=[])

    reports = [report(0, 0.5, 1.0), report(1, 0.01, 9.0), report(2, 0.5, 2.0), report(3, 0.99, 0.1)]
    assert [r.expert for r in by_specialisation(reports)] == [2, 0, 3, 1]


def test_routing_needs_a_moe_layer():
    with pytest.raises(ValueError, match="layer must"):
        route_text(build(layers=["lstm"]), EncodedSentences([[1, 2]], VOCABULARY.eos_id))
