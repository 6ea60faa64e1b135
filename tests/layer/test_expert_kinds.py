"""What packed experts and experts with adapters have in common with float experts."""

import copy

import pytest
import torch
from assertions import assert_all_same_bits, assert_exact, assert_same_bits, gradients, tensors_of
from expert_kinds import KINDS, OFFSETS, D, shake
from layers import TABLE, copies_of, make_layer, make_x, results, total
from safetensors.torch import load_file, save_file

from moe_ext import MoE, QuantizedExperts, TopKGate, add_lora
from moe_ext.lora import disable_lora, lora_experts, merge_lora
from moe_ext.optim import FactoredAdam, split_parameters

each_kind = pytest.mark.parametrize("kind", KINDS)
some_kinds = pytest.mark.parametrize("kind", ["mxfp4", "adapters", "adapters of packed experts"])


def layer_with(experts):
    return MoE(D, 4, 2, gate=TopKGate(D, 4, 2), experts=experts)


def assert_same(actual, expected):
    """Compares states, texts, outputs, and which parameters are trained."""
    state, wanted = actual.state_dict(), expected.state_dict()
    assert state.keys() == wanted.keys()
    assert_all_same_bits(state.values(), wanted.values())
    assert repr(actual) == repr(expected)
    trained = [[n for n, p in m.named_parameters() if p.requires_grad] for m in (actual, expected)]
    assert trained[0] == trained[1]
    x = torch.randn(20, expected.d_model)
    assert_same_bits(actual(x, OFFSETS), expected(x, OFFSETS))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["packed", "adapters"])
@pytest.mark.parametrize("name", [name for name in TABLE if name != "modules"])
def test_layers_equal_layers_of_float_experts(name, kind, recompute):
    """For every gate, with capacity, a shared expert and zero-computation experts."""
    layer = make_layer(name, recompute=recompute, bias=True)
    twin = copy.deepcopy(layer)
    if kind == "packed":
        layer.experts = QuantizedExperts.from_experts(layer.experts, ["int8", "fp8"])
        twin.experts = layer.experts.dequantize(torch.float64).requires_grad_(False)
    else:
        report = add_lora(layer, 2, 3, train_rest=True)
        assert report.experts == tuple(lora_experts(layer)) and not report.skipped
        twin = copy.deepcopy(shake(layer))
        merge_lora(twin)
        assert not lora_experts(twin)
    trained = [name for name, param in twin.named_parameters() if param.requires_grad]
    assert trained
    for mask in (None, torch.rand(11) > 0.2):
        passes, x = [], make_x(11)
        for m in (layer, twin):
            torch.manual_seed(1)
            leaf = x.clone().requires_grad_()
            y, aux = m(leaf, mask)
            leaves = [leaf, *map(m.get_parameter, trained)]
            passes.append([y, *tensors_of(aux), *gradients([total(y, aux)], leaves, [None])])
        for actual, expected in zip(*passes, strict=True):
            if kind == "packed":
                assert_same_bits(actual, expected)
            else:
                assert_exact(actual, expected, nan=True)


@each_kind
def test_split(kind):
    experts = KINDS[kind]()
    x = torch.randn(20, experts.d_model)
    first, second = experts.split([1, 3])
    parts = [first(x[:5], OFFSETS[:2]), second(x[5:], OFFSETS[1:] - 5)]
    assert_same_bits(torch.cat(parts), experts(x, OFFSETS))


@each_kind
def test_no_experts(kind):
    """A rank may have none; its output needs gradients as those of the other ranks do."""
    empty = KINDS[kind](num_experts=0)
    assert empty.state_dict().keys() == KINDS[kind]().state_dict().keys()
    y = empty(torch.randn(0, empty.d_model), torch.zeros(1, dtype=torch.int64))
    assert y.shape == (0, empty.d_model)
    assert y.requires_grad == ("adapters" in kind)
    if isinstance(empty, QuantizedExperts):
        assert empty.dequantize().weights[0].shape[0] == 0


@some_kinds
def test_compiles_to_one_graph(kind):
    layer = layer_with(KINDS[kind]())
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (9, 20):
        x = torch.randn(num_tokens, D)
        assert_all_same_bits(results(layer, x, function=compiled), results(layer, x))
        with disable_lora(layer), torch.no_grad():
            assert_same_bits(compiled(x)[0], layer(x)[0])


@each_kind
def test_copies_and_files(kind, tmp_path):
    experts = KINDS[kind]()
    for twin in copies_of(experts):
        assert_same(twin, experts)
    torch.save(experts.state_dict(), tmp_path / "state.pt")
    save_file(experts.state_dict(), tmp_path / "state.safetensors")
    for state in (
        torch.load(tmp_path / "state.pt", mmap=True),
        load_file(tmp_path / "state.safetensors"),
    ):
        if isinstance(experts, QuantizedExperts):
            assert_same(QuantizedExperts.from_state_dict(state, activation="swiglu"), experts)
        blank = copy.deepcopy(experts)
        with torch.no_grad():
            for param in blank.parameters():
                param.zero_()
        blank.load_state_dict(state)
        assert_same(blank, experts)


@pytest.mark.parametrize("assign", [False, True])
@each_kind
def test_made_on_the_meta_device(kind, assign):
    experts = KINDS[kind]()
    with torch.device("meta"):
        blank = KINDS[kind]()
    assert {param.device.type for param in blank.parameters()} == {"meta"}
    x = torch.empty(8, experts.d_model, device="meta")
    assert blank(x, None).shape == x.shape
    if not assign:
        blank.to_empty(device="cpu")
        if "adapters" in kind:
            blank.reset_parameters()
            assert blank.adapters["second"].a_0.any() and not blank.adapters["second"].b_0.any()
    blank.load_state_dict(experts.state_dict(), assign=assign)
    assert_same(blank, experts)


@pytest.mark.parametrize("make", [torch.optim.AdamW, FactoredAdam])
@pytest.mark.parametrize("splits", [False, True])
@some_kinds
def test_optimizers_change_what_is_trained_alone(kind, splits, make):
    layer = layer_with(KINDS[kind]())
    if kind == "mxfp4":
        layer.experts.bias_1.requires_grad_()
    before = {name: param.detach().clone() for name, param in layer.named_parameters()}
    trained = {name for name, param in layer.named_parameters() if param.requires_grad}
    split = split_parameters(layer)
    assert {*map(id, split.rest)} >= {id(layer.get_parameter(name)) for name in trained}
    optimizer = make(split.rest if splits else layer.parameters(), lr=0.1)
    y, aux = layer(torch.randn(20, D))
    (y.square().mean() + aux.loss).backward()
    norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    assert norm.isfinite() and norm > 0
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    changed = {n for n, param in layer.named_parameters() if not torch.equal(param, before[n])}
    assert changed == trained
