"""LoRAExperts: the formula, adapters by name, merging, states; add_lora on layers and models."""

import copy
import math
import re
import warnings

import pytest
import torch
from assertions import assert_all_same_bits, assert_exact, assert_same_bits
from expert_kinds import BASES, OFFSETS, make_experts, make_lora, shake
from layers import D
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.utils._python_dispatch import TorchDispatchMode

from moe_ext import (
    Experts,
    FeedForwardExperts,
    HierarchicalMoE,
    LoRAExperts,
    MoE,
    MoELSTM,
    QuantizedExperts,
    SharedExpert,
    TopKGate,
    add_lora,
    count_parameters,
    ops,
)
from moe_ext.distributed import full_state_dict, load_full_state_dict
from moe_ext.lora import LoRAReport, disable_lora, lora_experts, lora_state_dict, merge_lora


def formula(lora, x, offsets, names, masks=None):
    """Computes layer l as x W + b + Σ scale (x A) B over the adapters, with plain torch.

    masks: [R, fan_in] for each layer, False where A sees 0.
    """
    base = lora.base
    packed = isinstance(base, QuantizedExperts)
    weights = [w.dequantize(x.dtype).mT if packed else w for w in base.weights]
    parts = []
    bounds = offsets[1:-1].tolist()
    seen = [(x if m is None else m).tensor_split(bounds) for m in masks or (None, None)]
    for e, rows in enumerate(x.tensor_split(bounds)):
        for i, (weight, bias) in enumerate(zip(weights, base.biases, strict=True)):
            y = rows @ weight[e] + bias[e]
            for name in names:
                pair = lora.adapters[name].pair(i)
                if pair is not None:
                    inputs = rows * seen[i][e] if masks else rows
                    y = y + pair.scale * (inputs @ pair.a[e] @ pair.b[e])
            if i == 0:
                first, second = y.chunk(2, 1)
                y = nn.functional.silu(first) * second
            rows = y
        parts.append(rows)
    return torch.cat(parts)


OPTIONS = {
    "plain": {},
    "rslora": {"rslora": True},
    "first layer": {"layers": [0]},
    "second layer": {"layers": [1]},
    "shared A": {"shared_a": True},
}


# Values


@pytest.mark.equation("arXiv 2106.09685")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", BASES)
def test_equals_the_formula(kind, options):
    lora = make_lora(kind, dtype=torch.float64, **OPTIONS[options])
    adapter = lora.adapters["default"]
    assert adapter.scale == pytest.approx(6 / math.sqrt(3) if options == "rslora" else 2)
    assert {p.dtype for p in adapter.parameters()} == {
        torch.float64 if kind == "float" else torch.float32
    }
    lora.double()
    x = torch.randn(20, 64, dtype=torch.float64, requires_grad=True)
    y, expected = lora(x, OFFSETS), formula(lora, x, OFFSETS, ["default"])
    assert_exact(y, expected)
    leaves = [x, *adapter.parameters()]
    assert len(leaves) == (3 if "layer" in options else 5)
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    for a, b in zip(
        *(torch.autograd.grad(out, leaves, weight) for out in (y, expected)), strict=True
    ):
        assert_exact(a, b)
    assert {n for n, p in lora.named_parameters() if p.requires_grad} == {
        f"adapters.default.{name}" for name, _ in adapter.named_parameters()
    }


@pytest.mark.parametrize("kind", BASES)
def test_a_new_adapter_changes_nothing(kind):
    base = BASES[kind]()
    x = torch.randn(20, 64)
    expected = base(x, OFFSETS)
    lora = LoRAExperts(base, 4, 8)
    torch.testing.assert_close(lora(x, OFFSETS), expected)
    for i, fan_in in enumerate([64, 128]):
        a, b = (
            getattr(lora.adapters["default"], f"a_{i}"),
            getattr(lora.adapters["default"], f"b_{i}"),
        )
        assert not b.any()
        # As nn.Linear and PEFT: Kaiming-uniform with a = sqrt(5).
        assert 0.9 / math.sqrt(fan_in) < a.abs().max() <= 1 / math.sqrt(fan_in)


def test_experts_of_a_rank_start_as_those_of_one_process():
    def a_of(first, count, **options):
        torch.manual_seed(3)
        base = make_experts(num_experts=count, first_expert=first)
        base = QuantizedExperts.from_experts(base, "int8") if first % 2 else base
        torch.manual_seed(4)
        return LoRAExperts(base, 2, 2, **options).adapters["default"].a_1

    whole = a_of(0, 4)
    assert not torch.equal(whole[0], whole[1])
    assert_same_bits(a_of(1, 2), whole[1:3])
    assert_same_bits(a_of(2, 2), whole[2:])
    assert_same_bits(a_of(2, 2, shared_a=True), a_of(0, 4, shared_a=True))


@pytest.mark.parametrize("kind", BASES)
def test_several_active_adapters_are_added_up(kind):
    lora = make_lora(kind).double()
    lora.add_adapter("second", 5, 2, layers=[1], dtype=torch.float64)
    shake(lora)
    x = torch.randn(20, 64, dtype=torch.float64)
    outputs = {}
    for names in ([], ["default"], ["second"], ["default", "second"]):
        lora.set_adapter(*names)
        assert lora.active == tuple(names)
        trained = {n.split(".")[1] for n, p in lora.named_parameters() if p.requires_grad}
        assert trained == {*names}
        outputs[tuple(names)] = lora(x, OFFSETS)
        assert_exact(outputs[tuple(names)], formula(lora, x, OFFSETS, names))
    values = list(outputs.values())
    assert all((a - b).abs().max() > 0.1 for i, a in enumerate(values) for b in values[:i])
    lora.delete_adapter("second")
    assert lora.active == ("default",)
    assert_same_bits(lora(x, OFFSETS), outputs["default",])


@pytest.mark.parametrize("kind", BASES)
def test_a_disabled_adapter_gives_the_base(kind):
    lora = make_lora(kind)
    x = torch.randn(20, 64)
    with lora.disable_adapter():
        with lora.disable_adapter():
            assert_same_bits(lora(x, OFFSETS), lora.base(x, OFFSETS))
        assert_same_bits(lora(x, OFFSETS), lora.base(x, OFFSETS))
    assert (lora(x, OFFSETS) - lora.base(x, OFFSETS)).abs().max() > 0.1
    with pytest.raises(ZeroDivisionError), lora.disable_adapter():
        _ = 1 / 0
    assert (lora(x, OFFSETS) - lora.base(x, OFFSETS)).abs().max() > 0.1


@pytest.mark.parametrize("by_token", [False, True])
def test_dropout(by_token):
    """A sees zeros at random places of each row, in training alone."""
    lora = make_lora(dtype=torch.float64, dropout=0.25)
    x = torch.randn(10 if by_token else 20, 64, dtype=torch.float64)
    plan = ops.dispatch_plan(torch.rand(10, 4).topk(2).indices, 4)
    options = {"inverse": plan.inverse} if by_token else {}
    offsets = plan.offsets if by_token else OFFSETS
    torch.manual_seed(5)
    y = lora(x, offsets, **options)
    torch.manual_seed(5)
    masks = [torch.empty(20, n, dtype=torch.bool).bernoulli_(0.75) for n in (64, 128)]
    rows = ops.dispatch(x, plan.inverse) if by_token else x
    lora.adapters["default"].scale /= 0.75
    assert_exact(y, formula(lora, rows, offsets, ["default"], masks))
    lora.adapters["default"].scale *= 0.75
    for part, first, last in zip(lora.split([1, 3]), (0, 1), (1, 4), strict=True):
        begin, end = offsets[first], offsets[last]
        given = offsets[first : last + 1] - begin
        assert not torch.equal(part(rows[begin:end], given), y[begin:end])  # other masks
    assert_exact(lora.eval()(x, offsets, **options), formula(lora, rows, offsets, ["default"]))
    assert "dropout=0.25" in repr(lora)


def test_dropout_of_several_adapters():
    """Their inputs have one mask."""
    lora = make_lora(dropout=0.5)
    lora.add_adapter("second", 2, 2, dropout=0.25)
    lora.set_adapter("default", "second")
    x = torch.randn(20, 64)
    with pytest.raises(
        ValueError, match=r"dropout must be equal for all active adapters, got \[0.25"
    ):
        lora(x, OFFSETS)
    lora.adapters["second"].dropout = 0.5
    assert not torch.equal(lora(x, OFFSETS), lora(x, OFFSETS))
    lora.merge()  # without dropout
    assert_same_bits(lora(x, OFFSETS), lora(x, OFFSETS))


def test_the_base_may_be_trained_too():
    lora = make_lora().double()
    lora.base.requires_grad_()
    x = torch.randn(20, 64, dtype=torch.float64)
    leaves = list(lora.parameters())
    grads, expected = (
        torch.autograd.grad(y.square().mean(), leaves)
        for y in (lora(x, OFFSETS), formula(lora, x, OFFSETS, ["default"]))
    )
    for a, b in zip(grads, expected, strict=True):
        assert_exact(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", BASES)
def test_adapters_in_float32_around_experts_in_half_precision(kind, dtype):
    lora = make_lora(kind, dtype=dtype)
    assert {p.dtype for p in lora.adapters.parameters()} == {torch.float32}
    x = torch.randn(20, 64).to(dtype)
    y = lora(x, OFFSETS)
    assert y.dtype == dtype
    y.float().square().mean().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.any() for p in lora.adapters.parameters())
    half = copy.deepcopy(lora)
    half.adapters.to(dtype)
    assert_same_bits(half(x, OFFSETS), y)
    exact = copy.deepcopy(lora).double()
    error = (y.double() - formula(exact, x.double(), OFFSETS, ["default"])).abs().max()
    assert error < 0.05 * y.abs().max()


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("shared_a", [False, True])
def test_generation_casts_the_adapters_of_the_chosen_experts_alone(kind, shared_a):
    base = BASES[kind](num_experts=8, dtype=torch.bfloat16)
    lora = shake(LoRAExperts(base, 3, 6, shared_a=shared_a))
    x, gates = torch.randn(2, 64).bfloat16(), torch.rand(2, 2).bfloat16()
    plan = ops.dispatch_plan(torch.tensor([[6, 1], [1, 3]]), 8)
    rows = torch.randn(4, 64).bfloat16()
    options = {"inverse": plan.inverse, "gates": gates}
    expected = lora(rows, plan.offsets), lora(x, plan.offsets, **options)
    with torch.no_grad(), CastNumbers() as cast:
        assert_same_bits(lora(rows, plan.offsets), expected[0])
        assert_same_bits(lora(x, plan.offsets, **options), expected[1])
        assert_same_bits(lora.split([8])[0](rows, plan.offsets), expected[0])
    # Three calls with three experts: 1, 3 and 6.
    expert_size = sum(p[0].numel() for p in lora.adapters.parameters())
    assert cast.numbers == 3 * 3 * expert_size
    with torch.no_grad():  # as many rows as experts
        x, offsets = torch.randn(8, 64).bfloat16(), torch.tensor([0, 4, 4, 4, 5, 5, 8, 8, 8])
        assert_same_bits(lora(x, offsets), copy.deepcopy(lora).bfloat16()(x, offsets))


class CastNumbers(TorchDispatchMode):
    """Counts the numbers of adapters that are cast to bfloat16."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_cast = function is torch.ops.aten._to_copy.default
        if is_cast and kwargs.get("dtype") == torch.bfloat16:
            self.numbers += args[0].numel()
        return function(*args, **kwargs)


def test_autocast():
    lora = make_lora()
    x = torch.randn(20, 64)
    with torch.autocast("cpu", torch.bfloat16):
        y = lora(x, OFFSETS)
    assert y.dtype == torch.bfloat16
    assert (y - lora(x, OFFSETS)).abs().max() < 0.05 * y.abs().max()


def test_tokens_keep_the_dtype_that_they_had_without_adapters():
    """The adapters are in float32, packed weights without biases have no dtype."""
    layer = MoE(64, 4, 2, hidden_sizes=[64], expert_dtype=torch.bfloat16, gate=TopKGate(64, 4, 2))
    layer.experts = QuantizedExperts.from_experts(layer.experts, "mxfp4")
    x = torch.randn(8, 64).bfloat16()
    layer.bfloat16()
    expected = layer(x)[0]
    add_lora(layer, 2, 2)
    with disable_lora(layer):
        assert_same_bits(layer(x)[0], expected)


# Merging


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge_and_unmerge(dtype):
    lora = make_lora(dtype=dtype)
    x = torch.randn(20, 64, dtype=dtype)
    expected = lora(x, OFFSETS)
    before = [weight.clone() for weight in lora.base.weights]
    lora.merge()
    assert lora.merged and "merged=True" in repr(lora)
    for weight, old, i in zip(lora.base.weights, before, range(2), strict=True):
        a, b, scale, _ = lora.adapters["default"].pair(i)
        assert_same_bits(weight, (old.float() + scale * (a @ b)).to(dtype))
    bound = 1e-5 if dtype == torch.float32 else 0.05
    assert (lora(x, OFFSETS) - expected).abs().max() < bound * expected.abs().max()
    for call in (
        lora.merge,
        lora.merged_experts,
        lora.set_adapter,
        lambda: lora.delete_adapter("default"),
        lambda: lora.disable_adapter().__enter__(),
    ):
        with pytest.raises(ValueError, match="must be called without merged adapters"):
            call()
    lora.unmerge()
    assert_all_same_bits(lora.base.weights, before)
    assert_same_bits(lora(x, OFFSETS), expected)
    with pytest.raises(ValueError, match="unmerge must follow merge"):
        lora.unmerge()


def test_merge_that_fails_changes_nothing():
    lora = make_lora()
    before = [weight.clone() for weight in lora.base.weights]
    lora.adapters["default"].b_1.data = torch.zeros(4, 7, 64)  # an error in the second layer
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        lora.merge()
    assert not lora.merged
    assert_all_same_bits(lora.base.weights, before)


@pytest.mark.parametrize("kind", BASES)
def test_merged_experts(kind):
    lora = make_lora(kind).double()
    lora.add_adapter("second", 2, 2, dtype=torch.float64)
    shake(lora).set_adapter("default", "second")
    before = copy.deepcopy(lora.state_dict())
    x = torch.randn(20, 64, dtype=torch.float64)
    merged = lora.merged_experts(torch.float64)
    assert type(merged) is FeedForwardExperts
    assert not any(p.requires_grad for p in merged.parameters())
    assert_exact(merged(x, OFFSETS), lora(x, OFFSETS))
    assert_all_same_bits(lora.state_dict().values(), before.values())
    assert lora.merged_experts().weights[0].dtype == (
        torch.float64 if kind == "float" else torch.float32
    )


@pytest.mark.parametrize("kind", BASES)
def test_disabled_adapters_are_not_merged(kind):
    lora = make_lora(kind)
    x = torch.randn(20, 64)
    expected = lora(x, OFFSETS)
    for call in (lora.merge, lora.merged_experts):
        message = f"^LoRAExperts: {call.__name__} must be called outside disable_adapter, got "
        with lora.disable_adapter(), pytest.raises(ValueError, match=message):
            call()
    assert not lora.merged
    assert_same_bits(lora(x, OFFSETS), expected)


def test_merge_lora_changes_all_experts_or_none():
    model = nn.Sequential(*(MoE(64, 4, 2, experts=make_lora()) for _ in range(2)))
    before = lora_experts(model)
    with disable_lora(model), pytest.raises(ValueError, match="merge_lora must be called outside"):
        merge_lora(model)
    model[1].experts.merge()
    with pytest.raises(ValueError, match="merge_lora must be called without merged adapters"):
        merge_lora(model)
    assert lora_experts(model) == before
    model[1].experts.unmerge()
    merge_lora(model)
    assert not lora_experts(model)


def test_packed_weights_are_not_merged_in_place():
    message = "merge needs experts in floating point, got packed weights; merged_experts"
    with pytest.raises(ValueError, match=message):
        make_lora("packed").merge()


# State


def test_the_state_of_one_adapter():
    layers = []
    for _ in range(2):
        torch.manual_seed(5)
        model = nn.Sequential(MoE(64, 4, 2, hidden_sizes=[8]), MoE(64, 4, 2, hidden_sizes=[8]))
        for adapter in ("first", "second"):
            add_lora(model, 2, 2, adapter=adapter)
        layers.append(model)
    one, second = layers
    shake(one)
    state = lora_state_dict(one, "second")
    assert len(state) == 8 and all(".adapters.second." in name for name in state)
    missing, unexpected = second.load_state_dict(state, strict=False)
    assert not unexpected and not any(".second." in name for name in missing)
    assert_all_same_bits(lora_state_dict(second, "second").values(), state.values())
    for name, value in lora_state_dict(second, "first").items():
        assert not torch.equal(value, one.state_dict()[name])
    with pytest.raises(ValueError, match="lora_state_dict: adapter must be one of first, second, "):
        lora_state_dict(one, "third")


def test_the_state_of_an_adapter_in_a_model_with_extra_state():
    class WithExtraState(MoE):
        def get_extra_state(self):
            return {"step": 1}

    model = WithExtraState(64, 4, 2, experts=make_lora())
    assert [*lora_state_dict(model)] == [
        f"experts.adapters.default.{name}" for name in ("a_0", "b_0", "a_1", "b_1")
    ]


def test_merged_adapters_are_neither_saved_nor_loaded():
    """Otherwise a state would have the adapters twice, and a loaded one would keep the old sum."""
    model = nn.Sequential(MoE(64, 4, 2, experts=make_lora()))
    before = copy.deepcopy(model.state_dict())
    adapter = lora_state_dict(model)
    model[0].experts.merge()
    model = copy.deepcopy(model)
    values = [p.clone() for p in model.parameters()]
    for call in (
        model.state_dict,
        lambda: get_model_state_dict(model),
        lambda: full_state_dict(model, None),
        lambda: model[0].experts.load_state_dict(make_lora().state_dict()),
        lambda: model.load_state_dict(adapter, strict=False),
        lambda: load_full_state_dict(model, before, None),
    ):
        message = "LoRAExperts: (load_)?state_dict must be called without merged adapters"
        with pytest.raises(ValueError, match=message):
            call()
    assert_all_same_bits(model.parameters(), values)
    assert_all_same_bits(lora_state_dict(model).values(), adapter.values())
    model[0].experts.unmerge()
    assert_all_same_bits(model.state_dict().values(), before.values())


# Training


def test_parameters_are_counted():
    layer = MoE(64, 4, 2, gate=TopKGate(64, 4, 2), experts=BASES["packed"]())
    before = count_parameters(layer)
    add_lora(layer, 2, 4)
    added = 4 * 2 * (64 + 256 + 128 + 64)
    assert count_parameters(layer) == (before.total + added, before.active + added // 2)


# Models


class OwnExperts(Experts):
    def forward(self, x, offsets):
        return x


def make_model(**options):
    model = nn.Sequential(
        nn.Linear(64, 64),
        MoE(64, 4, 2, hidden_sizes=[16], shared_expert=SharedExpert(64, [8], gated=True)),
        MoE(64, 4, 2, experts=BASES["packed"](), **options),
    )
    return model.eval()


def test_add_lora_to_a_model():
    model = make_model()
    report = add_lora(model, 2, 4)
    names = ("1.experts", "1.shared_expert.expert", "2.experts")
    assert report.experts == names == tuple(lora_experts(model))
    trained = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
    assert all(".adapters." in name for name in trained)
    assert report == LoRAReport(names, {}, report.trained)
    assert sum(report.trained.values()) == sum(trained.values())
    text = str(report)
    assert text.startswith(f"LoRA on 3 modules; {sum(trained.values()):,} trained parameters")
    assert not any(experts.training for experts in lora_experts(model).values())
    more = add_lora(model, 3, 3, adapter="second", layers=[1])
    assert more.experts == names
    for experts in lora_experts(model).values():
        assert [*experts.adapters] == ["default", "second"] and experts.active == ("second",)


def test_some_experts_of_a_model():
    model = make_model()
    report = add_lora(model, 2, 4, where=lambda path: path.startswith("2."))
    assert report.experts == tuple(lora_experts(model)) == ("2.experts",)
    for wrong in (lambda path: False, None):
        message = "^add_lora: model must contain FeedForwardExperts or QuantizedExperts "
        with pytest.raises(ValueError, match=message):
            add_lora(model if wrong else make_experts(), 2, 4, where=wrong)


def test_the_rest_of_a_model_may_be_trained():
    model = make_model()
    model[0].weight.requires_grad_(False)
    report = add_lora(model, 2, 4, train_rest=True)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {"0.bias", "1.gate.w_gate", "1.shared_expert.w_gate"} < trained
    assert "0.weight" not in trained and "1.experts.base.weight_0" not in trained
    assert report.trained[""] == sum(
        p.numel() for n, p in model.named_parameters() if p.requires_grad and "adapters" not in n
    )
    assert "other parameters: " in str(report)


def test_experts_that_are_shared_stay_shared():
    experts = make_experts()
    model = nn.ModuleList([MoE(64, 4, 2, experts=experts) for _ in range(2)])
    report = add_lora(model, 2, 4)
    assert report.experts == ("0.experts", "1.experts")
    assert model[0].experts is model[1].experts
    assert sum(report.trained.values()) == 4 * 2 * (64 + 256 + 128 + 64)
    merge_lora(model)
    assert model[0].experts is model[1].experts


def test_modules_that_are_skipped_are_named():
    model = make_model()
    model.append(MoE(64, 4, 2, experts=OwnExperts(4, 64)))
    model.append(MoE(64, 2, 2, experts=[nn.Linear(64, 64) for _ in range(2)]))
    compiled = MoE(64, 4, 2, hidden_sizes=[8])
    compiled.experts = torch.compile(compiled.experts)
    model.append(compiled)
    with pytest.warns(
        UserWarning, match="add_lora: no adapters in 3.experts: OwnExperts is neither"
    ):
        report = add_lora(model, 2, 4)
    assert [*report.skipped] == ["3.experts", "4.experts", "5.experts._orig_mod"]
    assert "call add_lora before torch.compile" in report.skipped["5.experts._orig_mod"]
    assert "skipped 4.experts: ModuleExperts is neither" in str(report)


@pytest.mark.parametrize(
    "model", [HierarchicalMoE(8, 2, 2, 2, hidden_sizes=[4]), MoELSTM(8, 4, 4, 2)], ids=type
)
def test_other_layers(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = add_lora(model, 2, 2)
    assert len(report.experts) == 1
    y, *_ = model(torch.randn(3, 5, 8))
    y.sum().backward()
    adapter = lora_experts(model)[report.experts[0]].adapters["default"]
    assert all(param.grad is not None for param in adapter.parameters())


def test_a_model_that_cannot_have_adapters_does_not_change():
    model = make_model()
    trained = [p.requires_grad for p in model.parameters()]
    for options in ({"layers": [0, 7]}, {"adapter": "a.b"}):
        with pytest.raises(ValueError, match="^LoRAExperts: "):
            add_lora(model, 2, 2, **options)
        assert [p.requires_grad for p in model.parameters()] == trained
        assert not lora_experts(model)
    add_lora(model[1], 2, 2)
    trained = [p.requires_grad for p in model.parameters()]
    with pytest.raises(ValueError, match="must be a new name, got 'default'"):
        add_lora(model, 2, 2)
    assert [p.requires_grad for p in model.parameters()] == trained
    assert [*lora_experts(model)] == ["1.experts", "1.shared_expert.expert"]


def test_add_lora_to_merged_experts_changes_nothing():
    model = make_model()
    add_lora(model, 2, 2, train_rest=True)
    trained = [p.requires_grad for p in model.parameters()]
    experts = model[1].shared_expert.expert
    experts.merge()
    with pytest.raises(ValueError, match="add_lora must be called without merged adapters"):
        add_lora(model, 2, 2, adapter="second")
    assert [p.requires_grad for p in model.parameters()] == trained
    assert all([*module.adapters] == ["default"] for module in lora_experts(model).values())
    experts.unmerge()
    add_lora(model, 2, 2, adapter="second")


def test_a_warning_that_is_an_error_changes_nothing():
    model = nn.Sequential(make_model(), MoE(64, 4, 2, experts=OwnExperts(4, 64)))
    with warnings.catch_warnings(action="error"), pytest.raises(UserWarning, match="1.experts"):
        add_lora(model, 2, 2)
    assert not lora_experts(model)
    assert all(p.requires_grad for p in model[1].parameters())


def test_the_text_of_a_module():
    lora = make_lora(rslora=True, shared_a=True)
    lora.add_adapter("b", 4, 2.5, layers=[1])
    lines = [line.strip() for line in repr(lora).splitlines()]
    assert lines[:2] == ["LoRAExperts(", "active=['default']"]
    text = "rank=3, alpha=6, rslora=True, shared_a=True, layers=[0, 1], dtype=torch.float32"
    assert f"(default): LoRAAdapter({text})" in lines
    assert "(b): LoRAAdapter(rank=4, alpha=2.5, layers=[1], dtype=torch.float32)" in lines


ERRORS = {
    "LoRAExperts(nn.Linear(2, 2), 2, 2)": "experts must be a FeedForwardExperts or "
    "QuantizedExperts, got Linear",
    "make_lora(rank=0)": "rank must be at least 1, got 0",
    "make_lora(alpha=-1)": "alpha must be at least 0, got -1",
    "make_lora(layers=[])": "layers must be different indices below 2, at least one, got []",
    "make_lora(layers=[0, 0])": "layers must be different indices below 2, at least one, got",
    "make_lora(layers=[2])": "layers must be different indices below 2, at least one, got [2]",
    "make_lora(layers=1)": "layers must be different indices below 2, at least one, got 1",
    "make_lora(dropout=1)": "dropout must be below 1, got 1",
    "make_lora(dropout=-1)": "dropout must be at least 0, got -1",
    "make_lora(rslora=1)": "rslora must be True or False, got 1",
    "make_lora(adapter='a.b')": "adapter must be a name without dots",
    "make_lora(adapter='keys')": "adapter must be a name without dots",
    "make_lora(adapter='')": "adapter must be a name without dots",
    "make_lora().add_adapter('default', 1, 1)": "adapter must be a new name, got 'default'",
    "make_lora().add_adapter('b', 1, 1, dtype=torch.int8)": "dtype must be a floating-point dtype",
    "make_lora().set_adapter('b')": "adapter must be one of default, got 'b'",
    "make_lora().delete_adapter('b')": "adapter must be one of default, got 'b'",
}


@pytest.mark.parametrize("call", ERRORS)
def test_errors(call):
    """Errors name the class, the argument, the rule and the value."""
    with pytest.raises((TypeError, ValueError), match=f"^LoRAExperts: {re.escape(ERRORS[call])}"):
        eval(call)


def test_experts_whose_adapter_is_refused_stay_trained():
    experts = make_experts()
    with pytest.raises(ValueError, match="rank must be at least 1"):
        LoRAExperts(experts, 0, 1)
    assert all(p.requires_grad for p in experts.parameters())


def test_errors_of_models():
    with pytest.raises(ValueError, match=r"'0.experts': 'OwnExperts is neither"):
        add_lora(nn.Sequential(MoE(D, 4, 2, experts=OwnExperts(4, D))), 2, 2)
    with pytest.raises(ValueError, match="^merge_lora: model must contain LoRAExperts"):
        merge_lora(nn.Linear(2, 2))
    for x in ([1.0], torch.ones(3, 64, dtype=torch.int64)):
        with pytest.raises(TypeError, match="x must"):
            make_lora()(x, OFFSETS)
    assert ops.LoRA(1, 2).scale == 1
