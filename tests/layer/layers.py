"""The table of layers, and the results of a layer by tests/reference.py.

A row is a gate or a path through `MoE`. test_layers.py tests every property for every row. To add a
gate, add a row and, in REFERENCES, what the gate computes.
"""

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import reference as ref
import torch
from assertions import assert_exact, dense, gradients, tensors_of
from torch.utils.checkpoint import checkpoint

from moe_ext import (
    BalancedGate,
    Capacity,
    ExpertChoiceGate,
    HierarchicalBalancedGate,
    HierarchicalMoE,
    HierarchicalNoisyTopKGate,
    ModuleExperts,
    MoE,
    NoisyTopKGate,
    ReLUGate,
    SharedExpert,
    SoftmaxGate,
    SwitchLoss,
    TopKGate,
    ZLoss,
)
from moe_ext.gates import HierarchicalGate

D, E, K, A, B = 5, 6, 2, 3, 4  # E experts, or A groups of B experts
LOSSES = [SwitchLoss(0.3), ZLoss(0.2)]
PER_SEQUENCE = SwitchLoss(0.1, per_sequence=True)


class Row(NamedTuple):
    """A layer: its gate, the equations of its paper, and the other options of `MoE`.

    lacks: the properties that the layer does not have, each with the reason.
    """

    gate: Callable
    equations: tuple[str, ...]
    options: Callable[[], dict] = dict
    lacks: dict[str, str] = {}  # noqa: RUF012  (never changed)


RAGGED = {
    "k slots": "the number of experts differs between tokens",
    "replay": "the gate does not take expert_index",
}
NO_REPLAY = {"replay": RAGGED["replay"]}
BY_BATCH = {"independent": "the experts of a token depend on the batch"}
ROUTER = dict(score="sigmoid", num_groups=3, groups_per_token=2, scale=2.5, logit_bias=True)
SHARED = dict(activation="clamped_swiglu", activation_args=(0.75, 1.5, 0.25), bias=True, gated=True)

TABLE = {
    "noisy": Row(
        lambda **o: NoisyTopKGate(D, E, K, **o),
        ("Eq. 1", "Eq. 3", "Eq. 4", "Eq. 5", "Eq. 6", "Eq. 10"),
    ),
    "top-k": Row(lambda: TopKGate(D, E, K), ("App. F",)),
    "router": Row(lambda: TopKGate(D, E, K, bias_update_rate=0.1, **ROUTER), ("arXiv 2408.15664",)),
    "softmax": Row(lambda: SoftmaxGate(D, E), ("Eq. 2",), lacks=NO_REPLAY),
    "hierarchical": Row(
        lambda **o: HierarchicalNoisyTopKGate(D, A, B, 2, **o),
        ("App. B", "Eq. 12"),
        lambda: dict(losses=()),
        NO_REPLAY,
    ),
    "balanced": Row(lambda **o: BalancedGate(D, E, K, **o), ("App. F",), lacks=RAGGED),
    "balanced groups": Row(
        lambda **o: HierarchicalBalancedGate(D, A, B, (1, 2), **o),
        ("App. B", "App. F"),
        lambda: dict(losses=()),
        RAGGED,
    ),
    "expert choice": Row(
        lambda: ExpertChoiceGate(D, E, K), ("arXiv 2202.09368",), lacks=RAGGED | BY_BATCH
    ),
    "relu": Row(lambda: ReLUGate(D, E, K, l1_weight=0.1), ("arXiv 2412.14711",), lacks=RAGGED),
    "capacity by position": Row(
        lambda: TopKGate(D, E, K),
        ("arXiv 2101.03961",),
        lambda: dict(capacity=Capacity(0.7)),
        BY_BATCH,
    ),
    "capacity by score": Row(
        lambda: TopKGate(D, E, 3, renormalize=False),
        ("arXiv 2101.03961",),
        lambda: dict(capacity=Capacity(0.7, "score")),
        BY_BATCH,
    ),
    "zero computation": Row(
        lambda: TopKGate(D, E + 3, K, renormalize=False),
        ("arXiv 2410.07348", "arXiv 2509.01322"),
        lambda: dict(num_identity_experts=2, num_null_experts=1),
    ),
    "shared expert": Row(
        lambda: TopKGate(D, E, K),
        ("arXiv 2401.06066",),
        lambda: dict(shared_expert=SharedExpert(D, [4, 3], **SHARED)),
    ),
    "modules": Row(
        lambda **o: NoisyTopKGate(D, E, K, **o),
        ("Eq. 1",),
        lambda: dict(
            experts=[torch.nn.Linear(D, D, bias=False) for _ in range(E)], hidden_sizes=None
        ),
        {
            "independent": "the rounding of torch.nn.Linear depends on the number of rows",
            "compilation": "the number of rows of each module depends on values",
        },
    ),
}
NOISY = ["noisy", "hierarchical"]
BALANCED = ["balanced", "balanced groups"]


def shake(module):
    """Randomizes what the gates start with, and biases. The first batch sets the thresholds."""
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        if name.rpartition(".")[2].startswith(("w_", "b_", "bias_", "selection_bias")):
            torch.nn.init.normal_(value.data)
    return module


def thresholds_of(gate):
    return [parameter for name, parameter in gate.named_parameters() if "threshold" in name]


def move_thresholds(gate, by=0.02):
    """Moves the thresholds to where the masks of training and evaluation disagree."""
    with torch.no_grad():
        for threshold in thresholds_of(gate):
            shift = torch.randn(threshold.shape, dtype=threshold.dtype)  # on any device
            threshold.add_(by * shift.to(threshold.device))


def make_gate(name, device="cpu", dtype=torch.float64, started=True, **options):
    """Makes a gate of random weights. A started gate has thresholds."""
    gate = shake(TABLE[name].gate(**options)).to(device, dtype)
    if started and thresholds_of(gate):
        gate(make_x(20, device=device, dtype=dtype))
        move_thresholds(gate)
    return gate


def layer_of(gate, **options):
    """Makes a layer of any gate."""
    options = {"hidden_sizes": (7,), "w_importance": 0.1, "w_load": 0.1} | options
    if isinstance(gate, HierarchicalGate):
        sizes = gate.num_groups, gate.experts_per_group, gate.k_of_levels
        return HierarchicalMoE(D, *sizes, gate=gate, **options)
    zero = [options.get(f"num_{kind}_experts", 0) for kind in ("identity", "null")]
    return MoE(D, gate.num_experts - sum(zero), gate.k, gate=gate, **options)


def make_layer(name, device="cpu", dtype=torch.float64, started=True, **options):
    """Makes the layer of a row."""
    gate = make_gate(name, device, dtype, started)
    layer = layer_of(gate, **{"losses": LOSSES} | TABLE[name].options() | options)
    for part in (layer.experts, layer.shared_expert or torch.nn.Identity()):
        shake(part)
    return layer.to(device, dtype)


def make_x(*shape, device="cpu", dtype=torch.float64):
    return torch.randn(*shape, D, dtype=torch.float64).to(device, dtype)


def total(y, aux):
    """Computes a loss whose gradient differs between tokens."""
    weight = torch.linspace(-1, 1, y.numel()).to(y.device)
    return (y * weight.reshape(y.shape)).sum() + aux.loss


def results(layer, x, mask=None, function=None):
    """Returns y, the report and the gradients of x and of trained parameters, for one seed."""
    torch.manual_seed(1)
    leaf = x.detach().clone().requires_grad_()
    y, aux = (layer if function is None else function)(leaf, mask)
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    grads = gradients([total(y, aux)], [leaf, *trained], [None])
    return [y, *tensors_of(aux), *grads]


# What a layer computes, by tests/reference.py


class Gating(NamedTuple):
    """What a gate computes for the rows of a batch.

    G_X: [T, E], the gates; 0 for experts that are not chosen. load: None: the number of rows of
    each expert. loss: that of the gate. P_X: the probabilities of the experts; None:
    Softmax(logits). chosen: the experts of each row in their order; None: any order.
    """

    G_X: torch.Tensor
    load: torch.Tensor | None = None
    loss: torch.Tensor | float = 0.0
    logits: torch.Tensor | None = None
    P_X: list | None = None
    chosen: list | None = None


def _dense(gates, chosen, n):
    gates = torch.stack(gates)
    return gates.new_zeros(len(gates), n).scatter(1, torch.tensor(chosen), gates)


def _noisy(gate, w, X, noise, given):
    C, S, H_X = ref.noisy_logits(
        X, w["w_gate"], w["w_noise"], noise[0] if noise else None, gate.noise_epsilon
    )
    if given is None:
        chosen = [ref.top_k(h, gate.k) for h in H_X]
        G_X = torch.stack([ref.G(h, gate.k) for h in H_X])
    else:
        pairs = [*zip(H_X, given, strict=True)]
        chosen = [[i[j] for j in ref.top_k(h[i], gate.k)] for h, i in pairs]
        G_X = _dense([ref.Softmax(h[i]) for h, i in pairs], given, gate.num_experts)
    H_X = [h.detach() for h in H_X] if gate.detach_threshold else H_X
    load = ref.Load(C, S, H_X, gate.k) if noise else None
    return Gating(G_X, load, logits=C, chosen=chosen)


def _top_k(gate, w, X, noise, given):
    logits = X @ w["w_gate"] + w.get("b_gate", 0)
    bias = None if gate.selection_bias is None else gate.selection_bias.cpu()
    rule = gate.score, gate.num_groups, gate.groups_per_token, gate.group_score_k
    chosen = given or [ref.route(row, gate.k, bias, *rule) for row in logits]
    rule = gate.score, gate.renormalize, gate.scale
    gates = [ref.gates_of(row, i, *rule) for row, i in zip(logits, chosen, strict=True)]
    P_X = [s / sum(s) for s in (ref.scores(row, gate.score) for row in logits)]
    return Gating(_dense(gates, chosen, len(P_X[0])), logits=logits, P_X=P_X, chosen=chosen)


def _softmax(gate, w, X, noise, given):
    G_X = torch.stack([ref.G_sigma(x, w["w_gate"]) for x in X])
    return Gating(G_X, logits=X @ w["w_gate"], chosen=[[*range(gate.num_experts)]] * len(X))


def _hierarchical(gate, w, X, noise, given):
    k1, k2 = gate.k_of_levels
    matrices = (w[f"w_{kind}{level}"] for level in ("", "_secondary") for kind in ("gate", "noise"))
    if noise:
        noise = noise[0], noise[1].view(len(X), k1, -1)
    primary, secondary, *factors = ref.hierarchical_gates(
        X, *matrices, *(noise or (None, None)), k1, k2
    )
    rows, b = [*zip(primary, secondary, strict=True)], gate.experts_per_group
    chosen = [
        [i * b + j for i in ref.top_k(g, k1) for j in ref.top_k(group[i], k2)] for g, group in rows
    ]
    G_X = torch.stack([ref.G_H(*row) for row in rows])
    return Gating(G_X, ref.Load_H(*factors).reshape(-1) if noise else None, chosen=chosen)


def _balanced(gate, w, X, noise, given):
    G_X, _, L = ref.balanced_gates(X, w["w_gate"], gate.k, w["threshold"], training=gate.training)
    return Gating(G_X, loss=L / len(X) if gate.training else 0.0, logits=X @ w["w_gate"])


def _balanced_groups(gate, w, X, noise, given):
    G_X, L = ref.hierarchical_balanced_gates(
        X,
        *(w["w_gate"], w["w_gate_secondary"], *gate.k_of_levels),
        *(w["threshold"], w["threshold_secondary"]),
        training=gate.training,
    )
    return Gating(G_X, loss=L / len(X) if gate.training else 0.0)


def _expert_choice(gate, w, X, noise, given):
    return Gating(ref.expert_choice_gates(X, w["w_gate"], gate.k), logits=X @ w["w_gate"])


def _relu(gate, w, X, noise, given):
    R_X = ref.relu_gates(X, w["w_gate"])
    loss = float(gate.l1_weight) * ref.L_reg_lb(R_X, gate.k)
    P_X = [r / sum(r) if any(r) else r for r in R_X]
    return Gating(R_X, loss=loss, logits=X @ w["w_gate"], P_X=P_X)


# The arguments are the gate, its weights by name, the rows X, the noise of each level, and the
# experts of each row for a replay.
REFERENCES = {
    NoisyTopKGate: _noisy,
    TopKGate: _top_k,
    SoftmaxGate: _softmax,
    HierarchicalNoisyTopKGate: _hierarchical,
    BalancedGate: _balanced,
    HierarchicalBalancedGate: _balanced_groups,
    ExpertChoiceGate: _expert_choice,
    ReLUGate: _relu,
}


def gating_by_reference(gate, x, noise=(), given=None, leaves=None):
    """Returns the `Gating` of the rows x. given: the experts of each row, for a replay."""
    leaves = dict(gate.named_parameters()) if leaves is None else leaves
    weights = {name: leaf.cpu() for name, leaf in leaves.items()}
    return REFERENCES[type(gate)](gate, weights, x.cpu(), [draw.cpu() for draw in noise], given)


class Results(NamedTuple):
    """What a layer computes. kept: [T, E] bool. losses: by name, without their weights."""

    y: torch.Tensor
    gating: Gating
    kept: torch.Tensor
    importance: torch.Tensor
    load: torch.Tensor
    loss: torch.Tensor
    losses: dict
    leaves: dict


def by_reference(layer, x, noise=(), given=None):
    """Returns the `Results` of a layer for the rows x [T, D]."""
    named = {"x": x, **dict(layer.named_parameters())}
    leaves = {name: value.detach().cpu().clone() for name, value in named.items()}
    for leaf in leaves.values():
        leaf.requires_grad_()

    def part_of(part):
        prefix = f"{part}."
        return {n.removeprefix(prefix): leaf for n, leaf in leaves.items() if n.startswith(prefix)}

    X, gate = leaves["x"], layer.gate
    gating = gating_by_reference(gate, X, noise, given, part_of("gate"))
    G_X, (T, n) = gating.G_X, gating.G_X.shape
    chosen = [[i for i in range(n) if g[i] != 0] for g in G_X]
    every = torch.zeros(T, n, dtype=torch.bool)
    for t, experts in enumerate(chosen):
        every[t, experts] = True
    kept = every
    if layer.capacity is not None:
        how = layer.capacity.factor, layer.capacity.drop
        kept = torch.tensor(ref.kept_by_capacity(G_X, chosen, layer.k, *how)).reshape(T, n)
    experts = _networks(layer.experts, part_of("experts"))
    rows = zip(X, G_X * kept, strict=True)
    y = torch.stack(
        [ref.zero_computation(x, g, experts, layer.num_identity_experts) for x, g in rows]
    )
    if layer.shared_expert is not None:
        y = y + torch.stack([_shared(layer.shared_expert, part_of("shared_expert"), x) for x in X])

    importance = ref.Importance(G_X)
    load = every.double().sum(0) if gating.load is None else gating.load
    loss = ref.L_importance(importance, layer.w_importance) + ref.L_load(load, layer.w_load)
    losses = {}
    for router_loss in layer.losses:
        if isinstance(router_loss, ZLoss):
            value = ref.L_z(gating.logits)
        else:
            P_X = gating.P_X or [ref.Softmax(row) for row in gating.logits]
            value = ref.L_switch(P_X, chosen)
        losses[router_loss.name], loss = value, loss + router_loss.weight * value
    return Results(y, gating, kept, importance, load, loss + gating.loss, losses, leaves)


def _networks(experts, w):
    """Returns the network of each expert, as a function of a row. w: the weights by name."""
    if isinstance(experts, ModuleExperts):
        linear = [w[f"experts.{i}.weight"].T for i in range(experts.num_experts)]
        return [lambda x, matrix=matrix: ref.E_i(x, [matrix]) for matrix in linear]
    W = [w[f"weight_{j}"] for j in range(len(experts.weights))]
    b = None if experts.biases is None else [w[f"bias_{j}"] for j in range(len(W))]

    def network(x, i):
        biases = None if b is None else [vector[i] for vector in b]
        return ref.E_i(
            x, [matrix[i] for matrix in W], biases, experts.activation, experts.activation_args
        )

    return [partial(network, i=i) for i in range(experts.num_experts)]


def _shared(shared, w, x):
    expert_weights = {name.removeprefix("expert."): leaf for name, leaf in w.items()}
    (network,) = _networks(shared.expert, expert_weights)
    return network(x) * (1 if shared.w_gate is None else torch.sigmoid(x @ w["w_gate"][:, 0]))


def record_noise(gate):
    """Returns a list to which the gate appends the noise that it draws."""
    drawn, draw = [], gate.draw_noise
    gate.draw_noise = lambda like: drawn.append(draw(like)) or drawn[-1]
    return drawn


def assert_equals_reference(layer, x, given=None):
    """Compares outputs, routing, statistics, losses and every gradient; returns y and aux."""
    noise, x = record_noise(layer.gate), x.detach().requires_grad_()
    index = None if given is None else torch.tensor(given, device=x.device)
    y, aux = layer(x, expert_index=index)
    expected = by_reference(layer, x, noise, given)
    T, n = expected.kept.shape
    assert_exact(y.detach(), expected.y.detach())
    assert_exact(dense(aux, n).detach(), expected.gating.G_X.detach())
    if expected.gating.chosen is not None:
        assert aux.expert_index.tolist() == expected.gating.chosen
    chosen = expected.gating.G_X != 0
    shares = {
        "sparsity": 1 - chosen.double().mean(),
        "share_without_expert": (~chosen).all(1).double().mean(),
        "share_dropped": 1 - expected.kept.sum() / chosen.sum(),
    }
    for name in shares.keys() & aux.gate_metrics.keys():
        assert aux.metrics()[name] == pytest.approx(float(shares[name]), rel=1e-6, abs=1e-12), name
    if aux.kept is not None:
        assert torch.equal(dense(aux, n, aux.kept).cpu(), expected.kept)
    assert_exact(aux.importance.detach(), expected.importance.detach())
    assert_exact(aux.load.detach(), expected.load.detach())
    assert_exact(aux.loss.detach(), expected.loss.detach())
    assert aux.losses.keys() == expected.losses.keys()
    for name, value in expected.losses.items():
        assert_exact(aux.losses[name], value.detach())
    named = {"x": x, **dict(layer.named_parameters())}
    actual = gradients([total(y, aux)], [*named.values()], [None])
    wanted = gradients([total(expected.y, expected)], [*expected.leaves.values()], [None])
    for a, e in zip(actual, wanted, strict=True):
        assert_exact(a, e)
    return y, aux


# How a function of a tensor runs: plainly, or again in the backward pass.
RECOMPUTED = {
    "no": lambda function, x: function(x),
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
}


def copies_of(module):
    """Yields a deep copy, and copies through pickle and through a file of torch."""
    yield copy.deepcopy(module)
    yield pickle.loads(pickle.dumps(module))
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    yield torch.load(file, weights_only=False)
