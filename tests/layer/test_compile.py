"""torch.compile and torch.export: full graphs, any number of tokens, any routing."""

import io

import pytest
import torch
from assertions import assert_same_bits, tensors_of

from moe_ext import (
    BalancedGate,
    ExpertChoiceGate,
    HierarchicalBalancedGate,
    HierarchicalMoE,
    MoE,
    MoEAux,
    MoELSTM,
    SwitchLoss,
    TopKGate,
    ZLoss,
)

D, E = 6, 5


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_layer(device="cpu", k=2, **options):
    layer = MoE(D, E, k, hidden_sizes=(7,), **options)
    torch.nn.init.normal_(layer.gate.w_gate)
    torch.nn.init.normal_(layer.gate.w_noise)
    return layer.to(device)


def results(function, layer, x):
    leaf = x.clone().requires_grad_()
    y, aux = function(leaf)
    layer.zero_grad()
    (y.pow(2).sum() + aux.loss).backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in layer.parameters()]
    return [y, *tensors_of(aux), leaf.grad, *grads]


def assert_close(actual, expected):
    """Allows a few float32 rounding errors of the largest value: the compiler may reorder sums."""
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype and a.shape == e.shape
        if a.is_floating_point():
            assert (a - e).abs().max() <= 1e-5 * (1 + e.abs().max())
        else:
            assert_same_bits(a, e)


@pytest.mark.parametrize(
    "training, dynamic",
    [
        (True, True),
        (False, False),
        pytest.param(True, False, marks=pytest.mark.long),
        pytest.param(False, True, marks=pytest.mark.long),
    ],
)
def test_layer_equals_eager(device, training, dynamic):
    """Runs the compiled graph with eager kernels: the noise is the same for the same seed."""
    layer = make_layer(device).train(training)
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for T in (7, 12):
        x = torch.randn(T, D, device=device)
        torch.manual_seed(1)
        expected = results(layer, layer, x)
        torch.manual_seed(1)
        actual = results(compiled, layer, x)
        assert_close(actual, expected)


def test_inductor_equals_eager(device):
    layer = make_layer(device).eval()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for shape in ((7,), (3, 4)):
        x = torch.randn(*shape, D, device=device)
        assert_close(results(compiled, layer, x), results(layer, layer, x))
    layer.train()
    actual = results(compiled, layer, torch.randn(7, D, device=device))
    assert all(a.isfinite().all() for a in actual)
    assert float(actual[2].sum()) == pytest.approx(7, rel=1e-5)  # importance: the gates sum to 1


@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("balanced", [False, True])
def test_losses_compile(device, masked, balanced):
    gate = BalancedGate(D, E, 2) if balanced else TopKGate(D, E, 2)
    losses = [SwitchLoss(0.1), SwitchLoss(0.1, per_sequence=True), ZLoss(0.1)]
    layer = MoE(D, E, 2, gate=gate, losses=losses).to(device)
    torch.nn.init.normal_(layer.gate.w_gate)
    layer(torch.randn(20, D, device=device))  # sets the thresholds
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((3, 7), (4, 5)):
        x = torch.randn(*shape, D, device=device)
        mask = torch.rand(shape, device=device) < 0.6 if masked else None
        actual, expected = ([*f(x, mask)[1].losses.values()] for f in (compiled, layer))
        assert_close(actual, expected)


def test_gated_and_deep_experts_compile(device):
    layer = MoE(D, E, 2, hidden_sizes=(8, 4), activation="swiglu", bias=True).to(device).eval()
    torch.nn.init.normal_(layer.gate.w_gate)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    x = torch.randn(9, D, device=device)
    assert_close(results(compiled, layer, x), results(layer, layer, x))


@pytest.mark.guarantee("It works with PyTorch's tools")
def test_export_keeps_the_ops(device):
    """Exports with a dynamic number of tokens; the graph contains the ops."""
    layer = make_layer(device).eval()
    x = torch.randn(9, D, device=device)
    tokens = torch.export.Dim("tokens", min=2)
    program = torch.export.export(layer, (x,), dynamic_shapes={"x": {0: tokens}})
    graphs = [m.graph for m in program.graph_module.modules() if hasattr(m, "graph")]
    names = {str(node.target) for graph in graphs for node in graph.nodes}
    assert {"moe_ext.noisy_topk_gating.default", "moe_ext.experts.default"} <= names
    other = torch.randn(14, D, device=device)
    assert_same_bits(program.module()(other)[0], layer(other)[0])


@pytest.mark.guarantee("It works with PyTorch's tools")
def test_an_exported_layer_can_be_saved():
    layer, x = make_layer().eval(), torch.randn(9, D)
    file = io.BytesIO()
    torch.export.save(torch.export.export(layer, (x,)), file)
    file.seek(0)
    y, aux = torch.export.load(file).module()(x)
    assert isinstance(aux, MoEAux)
    assert_same_bits(y, layer(x)[0])


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "make, shape",
    [
        (lambda: make_layer(), (9, D)),
        (lambda: MoE(D, E, 2, gate=BalancedGate(D, E, 2), w_load=0), (9, D)),
        (lambda: MoE(D, E, 2, gate=ExpertChoiceGate(D, E, 2)), (9, D)),
        (lambda: MoELSTM(D, 4, E, 2), (9, 3, D)),
    ],
    ids=["noisy", "balanced", "expert_choice", "recurrent"],
)
def test_export_leaves_the_batch_free(make, shape, strict):
    layer, x = make().eval(), torch.randn(shape)
    free = ({0: torch.export.Dim("batch", min=2)},)
    program = torch.export.export(layer, (x,), dynamic_shapes=free, strict=strict)
    for batch in (2, 14):
        other = torch.randn(batch, *shape[1:])
        torch.testing.assert_close(program.module()(other)[0], layer(other)[0])


@pytest.mark.parametrize("strict", [False, True])
@torch.no_grad()
def test_export_in_training_mode_leaves_the_batch_free(strict):
    """The m = k·T/E rows of an expert depend on the batch; m = 1 is not special."""
    gate = HierarchicalBalancedGate(D, 3, 2, (2, 1))
    for layer in (
        MoE(D, E, 2, gate=BalancedGate(D, E, 2), w_load=0),
        HierarchicalMoE(D, 3, 2, (2, 1), gate=gate, w_load=0),
    ):
        free = ({0: torch.export.Dim("batch", min=2)},)
        program = torch.export.export(
            layer, (torch.randn(9, D),), dynamic_shapes=free, strict=strict
        )
        for batch in (2, 3, 14):
            x = torch.randn(batch, D)
            assert_same_bits(program.module()(x)[0], layer(x)[0])


def test_compiled_autograd_equals_eager():
    layer, x = MoE(6, 5, 2, hidden_sizes=[8]), torch.randn(7, 6)

    def gradients_of(function):
        layer.zero_grad()
        torch.manual_seed(0)
        y, aux = function(x)
        (y.square().sum() + aux.loss).backward()
        return [parameter.grad for parameter in layer.parameters()]

    expected = gradients_of(layer)
    with torch._dynamo.config.patch(compiled_autograd=True):
        actual = gradients_of(torch.compile(layer, backend="aot_eager"))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("options", [{}, {"hidden_sizes": [8], "bias": True}], ids=str)
def test_a_layer_compiled_ahead_of_time_equals_eager(options, tmp_path):
    """Runs AOTInductor, which calls the ops without Python, for any number of tokens."""
    layer = MoE(16, 4, 2, **options).eval()
    torch.nn.init.normal_(layer.gate.w_gate)
    tokens = torch.export.Dim("tokens", min=2)
    program = torch.export.export(layer, (torch.randn(9, 16),), dynamic_shapes={"x": {0: tokens}})
    file = str(tmp_path / "layer.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=file)
    compiled = torch._inductor.aoti_load_package(file)
    for T in (9, 14):
        x = torch.randn(T, 16)
        y, aux = compiled(x)
        expected, expected_aux = layer(x)
        assert_same_bits(y, expected)
        assert_close(tensors_of(aux), tensors_of(expected_aux))
