"""torch.compile, torch.export and AOTInductor. test_layers.py compiles and exports each layer."""

import io

import pytest
import torch
from assertions import assert_same_bits
from layers import D, E, layer_of, make_gate, make_layer, make_x, results, total
from torch import nn

from moe_ext import MoEAux, MoELSTM

pytestmark = pytest.mark.usefixtures("one_thread")

ANY = torch.export.Dim.DYNAMIC


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_inductor_equals_eager(device):
    """A training step with noise, for two numbers of tokens; the second one compiles again."""
    layer = make_layer("noisy", device, torch.float32, losses=())
    with torch._inductor.config.patch(fallback_random=True):  # the noise of eager mode
        compiled = torch.compile(layer, fullgraph=True, dynamic=True)
        for shape in ((7,), (3, 4)):
            x = make_x(*shape, device=device, dtype=torch.float32)
            actual, expected = results(layer, x, function=compiled), results(layer, x)
            for a, e in zip(actual, expected, strict=True):
                torch.testing.assert_close(a, e)


def test_the_cpp_wrapper_of_inductor_equals_eager():
    """It cannot call an operator that returns a list of tensors among others."""
    layer = make_layer("shared expert", dtype=torch.float32, losses=())
    x = make_x(7, dtype=torch.float32)
    with torch._inductor.config.patch(cpp_wrapper=True):
        compiled = torch.compile(layer, fullgraph=True)
        for a, e in zip(results(layer, x, function=compiled), results(layer, x), strict=True):
            torch.testing.assert_close(a, e)


@pytest.mark.guarantee("It works with PyTorch's tools")
def test_export_keeps_the_ops(device):
    """Exports with a dynamic number of tokens; the graph contains the ops, and can be saved."""
    layer = make_layer("noisy", device, torch.float32).eval()
    x = make_x(9, device=device, dtype=torch.float32)
    program = torch.export.export(layer, (x,), dynamic_shapes={"x": {0: ANY}}, strict=True)
    graphs = [m.graph for m in program.graph_module.modules() if hasattr(m, "graph")]
    names = {str(node.target) for graph in graphs for node in graph.nodes}
    assert {"moe_ext.noisy_topk_gating.default", "moe_ext.experts.default"} <= names
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    x_new = make_x(14, device=device, dtype=torch.float32)
    for loaded in (program, torch.export.load(file)):
        y, aux = loaded.module()(x_new)
        assert isinstance(aux, MoEAux)
        assert_same_bits(y, layer(x_new)[0])


def test_export_of_a_recurrent_layer_leaves_the_batch_free():
    layer = MoELSTM(D, 4, E, 2).eval()
    program = torch.export.export(layer, (torch.randn(9, 3, D),), dynamic_shapes=({0: ANY},))
    for batch in (2, 14):
        x = torch.randn(batch, 3, D)
        torch.testing.assert_close(program.module()(x)[0], layer(x)[0])


@torch.no_grad()
def test_export_in_training_mode_leaves_the_batch_free():
    """The m = k·T/E rows of an expert depend on the batch; m = 1 is not special."""
    layer = make_layer("balanced groups", dtype=torch.float32, losses=())
    free = ({0: torch.export.Dim("batch", min=2)},)
    x = make_x(9, dtype=torch.float32)
    program = torch.export.export(layer, (x,), dynamic_shapes=free, strict=False)
    for batch in (2, 3, 14):
        x = make_x(batch, dtype=torch.float32)
        assert_same_bits(program.module()(x)[0], layer(x)[0])


def test_compiled_autograd_equals_eager():
    layer, x = make_layer("noisy", dtype=torch.float32), make_x(7, dtype=torch.float32)

    def gradients_of(function):
        layer.zero_grad()
        torch.manual_seed(0)
        total(*function(x)).backward()
        return [parameter.grad for parameter in layer.parameters()]

    expected = gradients_of(layer)
    with torch._dynamo.config.patch(compiled_autograd=True):
        actual = gradients_of(torch.compile(layer, backend="aot_eager"))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


# AOTInductor


class Layers(nn.Module):
    """Applies several layers to the same x: one package, which compiles faster than many."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        return [layer(x) for layer in self.layers]


# The experts of each layer differ, so that one package has many kinds of experts.
EXPERTS = {
    "noisy": {"hidden_sizes": (5, 4), "activation": "swiglu", "bias": True},
    "router": {"activation": "interleaved_clamped_swiglu", "activation_args": (0.75, 1.5, 0.25)},
    "hierarchical": {"expert_dtype": torch.bfloat16},
    "balanced groups": {"activation": "relu_squared", "bias": True},
}


@pytest.mark.parametrize(
    "names",
    [
        ["noisy"],
        pytest.param(["router", "hierarchical", "balanced groups"], marks=pytest.mark.long),
    ],
)
def test_a_package_equals_eager(tmp_path, names):
    """AOTInductor calls the ops without Python, for any batch and length."""
    gates = {name: make_gate(name, dtype=torch.float32) for name in names}
    model = Layers([layer_of(gate, **EXPERTS[name]) for name, gate in gates.items()]).eval()
    with torch.no_grad():
        x = make_x(3, 4, dtype=torch.float32)
        program = torch.export.export(model, (x,), dynamic_shapes=({0: ANY, 1: ANY},))
    path = str(tmp_path / "model.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=path)
    compiled = torch._inductor.aoti_load_package(path)
    for shape in ((1, 1), (1, 2), (3, 4), (20, 5)):
        x = make_x(*shape, dtype=torch.float32)
        with torch.no_grad():
            expected = model(x)
        for y, eager in zip(compiled(x), expected, strict=True):
            assert_equals_eager(*y, *eager)


def assert_equals_eager(y, aux, expected, expected_aux):
    """Compares all tensors of a layer; the compiler may reorder the sums of aux.loss."""
    assert_same_bits(y, expected)
    for name, actual in aux._asdict().items():
        wanted = getattr(expected_aux, name)
        if name == "loss":
            torch.testing.assert_close(actual, wanted)
        elif isinstance(wanted, dict):
            torch.testing.assert_close(dict(actual), wanted)
        elif wanted is None:
            assert actual is None, name
        else:
            assert_same_bits(actual, wanted)
