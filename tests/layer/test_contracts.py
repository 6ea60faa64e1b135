"""The interfaces between the layer, gates and experts, and how other tools use them."""

import lzma
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from assertions import assert_exact, assert_same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_ext import (
    BalancedGate,
    Experts,
    Gate,
    HierarchicalMoE,
    HierarchicalNoisyTopKGate,
    MoE,
    MoELSTM,
    NoisyTopKGate,
    TopKGate,
)
from moe_ext.optim import split_parameters

D, E, K = 6, 5, 2


class RoundRobinGate(Gate):
    """Routes token t to the experts t, t + 1, … with equal gates."""

    def forward(self, x, ranks=None):
        index = (torch.arange(len(x))[:, None] + torch.arange(self.k)) % self.num_experts
        return self.make_routing(torch.full(index.shape, 1 / self.k), index, ranks=ranks)


class ScaleExperts(Experts):
    def __init__(self, num_experts, d_model):
        super().__init__(num_experts, d_model)
        self.scale = torch.nn.Parameter(torch.arange(1.0, num_experts + 1))

    def forward(self, x, offsets):
        return x * self.scale.repeat_interleave(offsets.diff())[:, None]


def test_a_gate_and_experts_of_ones_own():
    layer = MoE(D, E, K, gate=RoundRobinGate(D, E, K), experts=ScaleExperts(E, D)).double()
    x = torch.randn(7, D, dtype=torch.float64)
    y, aux = layer(x)
    t = torch.arange(7)
    assert_exact(y.detach(), (x * ((t % E + (t + 1) % E) / 2 + 1)[:, None]).detach())
    assert aux.tokens_per_expert.tolist() == [3, 4, 3, 2, 2]
    assert aux.load.tolist() == aux.tokens_per_expert.tolist()
    (y.sum() + aux.loss).backward()
    assert layer.experts.scale.grad.isfinite().all()


def test_layers_of_fake_tensors():
    with FakeTensorMode():
        gate = BalancedGate(D, E, K)
        for layer in (MoE(D, E, K, gate=gate), HierarchicalMoE(D, 3, 2, 2), MoELSTM(D, D, E, K)):
            y, *_, aux = layer(torch.randn(2, 3, D))
            (y.sum() + aux.loss).backward()
            assert y.shape == (2, 3, D)


def test_jagged_tensors():
    layer = MoE(D, E, K).eval()
    torch.nn.init.normal_(layer.gate.w_gate)
    rows = [torch.randn(3, D), torch.randn(0, D), torch.randn(4, D)]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
    y, aux = layer(x)
    expected, expected_aux = layer(torch.cat(rows))
    assert y.is_nested and torch.equal(y.offsets(), x.offsets())
    assert_same_bits(y.values(), expected)
    assert_same_bits(aux.load, expected_aux.load)
    y.values().sum().backward()
    assert x.grad.is_nested
    linear = torch.nn.Linear(D, D)
    assert layer(linear(x))[0].shape == linear(x).shape  # the same ragged dimension
    with pytest.raises(ValueError, match="MoE: mask must"):
        layer(x, torch.ones(7, dtype=torch.bool))
    with warnings.catch_warnings(action="ignore"):  # of torch, once in a process
        strided = torch.nested.nested_tensor(rows)
    with pytest.raises(ValueError, match="MoE: x must .*jagged"):
        layer(strided)
    for offsets in ([0, 3, 6], [2, 3, 7]):
        partial = torch.nested.nested_tensor_from_jagged(torch.cat(rows), torch.tensor(offsets))
        with pytest.raises(ValueError, match="MoE: x must .*without gaps, got 'offsets from"):
            layer(partial)


def test_hooks_of_the_experts_run():
    """Offloading, adapters and quantization use hooks or wrap the experts in a module."""
    layer, calls = MoE(D, E, K), []
    layer.experts.register_forward_pre_hook(lambda *_: calls.append("before"))
    layer.experts.register_forward_hook(lambda *_: calls.append("after"))
    layer(torch.randn(4, D))
    assert calls == ["before", "after"]


class Adapter(torch.nn.Module):
    """Has only the forward of the module that it replaces, as adapters do."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    def forward(self, *args, **options):
        return self.base_layer(*args, **options)


@pytest.mark.parametrize("experts", [None, ScaleExperts(E, D)])
def test_a_module_around_the_experts(experts):
    layer = MoE(D, E, K, experts=experts).eval()
    x = torch.randn(4, D)
    before = layer(x)[0]
    layer.experts = Adapter(layer.experts)
    assert_same_bits(layer(x)[0], before)


@pytest.mark.parametrize("first, second", [(None, ScaleExperts(E, D)), (ScaleExperts(E, D), None)])
def test_experts_can_be_replaced(first, second):
    """Replaces the experts by others of the same number, fused or not."""
    layer, second_layer = MoE(D, E, K, experts=first).eval(), MoE(D, E, K, experts=second).eval()
    x = torch.randn(4, D)
    layer.experts = second_layer.experts
    assert_same_bits(layer(x)[0], second_layer(x)[0])


def test_compiled_parts():
    gate, experts = NoisyTopKGate(D, E, K), ScaleExperts(E, D)
    compiled = [torch.compile(module, backend="eager") for module in (gate, experts)]
    layer = MoE(D, E, K, gate=compiled[0], experts=compiled[1]).eval()
    plain = MoE(D, E, K, gate=gate, experts=experts).eval()
    x = torch.randn(4, D)
    assert_same_bits(layer(x)[0], plain(x)[0])


def test_parametrised_weights():
    class Doubled(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    layer = MoE(D, E, K).eval()
    x = torch.randn(4, D)
    before = layer(x)[0]
    torch.nn.utils.parametrize.register_parametrization(layer.experts, "weight_1", Doubled())
    assert_same_bits(layer(x)[0], 2 * before)
    assert [len(part) for part in split_parameters(layer)] == [2, 0, 2]


def test_state_dicts_of_former_versions():
    layer, loaded = MoE(D, E, K, bias=True), MoE(D, E, K, bias=True)
    former = {
        name.replace("weight_", "weights.").replace("bias_", "biases."): value
        for name, value in layer.state_dict().items()
    }
    assert "experts.weights.0" in former and "experts.biases.1" in former
    loaded.load_state_dict(former)
    for name, value in layer.state_dict().items():
        assert_same_bits(loaded.state_dict()[name], value)


def test_the_repr_shows_what_was_set():
    layer = MoE(D, E, K, hidden_sizes=(7,), activation="swiglu", bias=True, w_load=0.3)
    layer_with = MoE(D, E, K, recompute=True, noise_epsilon=0.5, expert_dtype=torch.bfloat16)
    for shown in ("w_load=0.3", "swiglu", "bias=True", f"{E} x ({D} -> 7 -> {D})"):
        assert shown in repr(layer)
    for shown in ("recompute=True", "noise_epsilon=0.5", "bfloat16"):
        assert shown in repr(layer_with)


EARLIER = pickle.loads(
    lzma.decompress((Path(__file__).parent / "layers_of_0_1.pickle.xz").read_bytes())
)


@pytest.mark.parametrize("name", EARLIER["layers"])
def test_pickles_of_version_0_1(name):
    """A pickled layer works after an upgrade; it can be pickled again."""
    layer, expected, loss, aux = EARLIER["layers"][name]
    x = torch.tensor(EARLIER["x"])
    for twin in (pickle.loads(layer), pickle.loads(pickle.dumps(pickle.loads(layer)))):
        y, *_, new = twin(x.view(2, 3, 4) if name == "lstm" else x)
        # torch's GEMMs depend on the processor.
        torch.testing.assert_close(y.detach(), torch.tensor(expected))
        torch.testing.assert_close(new.loss.detach(), torch.tensor(loss))
    assert pickle.loads(aux).tokens_per_expert.sum() == new.tokens_per_expert.sum()
    assert pickle.loads(EARLIER["routing"]).gates.shape == (6, 2)


def test_a_gate_of_version_0_1_that_replays():
    with pytest.warns(DeprecationWarning, match="^Replayed: declare replays = True"):

        class Replayed(RoundRobinGate):
            def forward(self, x, ranks=None, expert_index=None):
                routing = super().forward(x, ranks)
                return routing if expert_index is None else routing._replace(gates=0 * routing[0])

    layer = MoE(D, E, K, gate=Replayed(D, E, K))
    x = torch.randn(3, D)
    index = layer(x)[1].expert_index
    assert layer(x, expert_index=index)[0].count_nonzero() == 0


def test_a_gate_whose_own_forward_cannot_replay():
    class Noted(TopKGate):
        def forward(self, x, ranks=None):
            return super().forward(x, ranks)

    class Unchanged(TopKGate):
        pass

    assert Unchanged.replays and not Noted.replays
    layer = MoE(D, E, K, gate=Noted(D, E, K))
    with pytest.raises(ValueError, match="^MoE: expert_index must be None for Noted, whose forw"):
        layer(torch.randn(3, D), expert_index=torch.zeros(3, K, dtype=torch.int64))


def test_a_hierarchical_gate_with_its_own_forward_declares_what_it_can():
    with pytest.warns(UserWarning, match="^Undeclared has its own forward, so that ranks cannot"):

        class Undeclared(HierarchicalNoisyTopKGate):
            def forward(self, x, ranks=None):
                return super().forward(x, ranks)

    class Declared(HierarchicalNoisyTopKGate):
        shares_groups = True

        def forward(self, x, ranks=None, select=None):
            return super().forward(x, ranks, select)

    assert Declared.shares_groups and not Undeclared.shares_groups
    layer = MoE(D, 6, 4, gate=Undeclared(D, 3, 2, 2), capacity=0.5)
    assert not layer(torch.randn(9, D))[1].kept.all()
