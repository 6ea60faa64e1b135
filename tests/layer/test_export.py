"""AOTInductor packages of all gates and experts equal eager, for any number of tokens."""

import pytest
import torch
from assertions import assert_same_bits
from torch import nn

from moe_ext import (
    BalancedGate,
    ExpertChoiceGate,
    FeedForwardExperts,
    HierarchicalBalancedGate,
    HierarchicalMoE,
    MoE,
    ReLUGate,
    SoftmaxGate,
    TopKGate,
)
from moe_ext.ops import ACTIVATIONS, CLAMPED_ACTIVATIONS

pytestmark = pytest.mark.usefixtures("one_thread")

D, E = 8, 6
ANY = torch.export.Dim.DYNAMIC


class Layers(nn.Module):
    """Applies several layers to the same x: one package, which compiles faster than many."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)
        for gate in self.modules():
            for name in ("threshold", "threshold_secondary"):  # scores of a softmax
                if hasattr(gate, name):
                    nn.init.constant_(getattr(gate, name), 0.2)

    def forward(self, x):
        return [layer(x) for layer in self.layers]


def package(model, x, dynamic, folder):
    with torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=({dim: ANY for dim in dynamic},))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
    return torch._inductor.aoti_load_package(path)


def assert_equals_eager(compiled, model, x, but=()):
    """Compares all tensors of all layers; the compiler may reorder the sums of aux.loss."""
    with torch.no_grad():
        results = model(x)
    for layer, (y, aux), (expected, expected_aux) in zip(
        model.layers, compiled(x), results, strict=True
    ):
        if isinstance(layer.gate, but):
            torch.testing.assert_close((y, aux.gates), (expected, expected_aux.gates))
            continue
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


def test_every_gate(tmp_path):
    hierarchical = HierarchicalBalancedGate(D, 3, 2, (2, 1))
    model = Layers(
        [
            MoE(D, E, 2),
            MoE(D, E, 2, gate=TopKGate(D, E, 2)),
            MoE(D, E, E, gate=SoftmaxGate(D, E)),
            HierarchicalMoE(D, 3, 2, (2, 1)),
            MoE(D, E, 2, gate=BalancedGate(D, E, 2), w_load=0),
            MoE(D, E, 2, gate=ExpertChoiceGate(D, E, 2)),
            MoE(D, E, 2, gate=ReLUGate(D, E, 2), w_load=0),
            HierarchicalMoE(D, 3, 2, (2, 1), gate=hierarchical, w_load=0),
        ]
    ).eval()
    compiled = package(model, torch.randn(7, D), [0], tmp_path)
    for T in (1, 2, 7, 100):
        # Inductor compiles torch.softmax, so the gates of these two equal eager to rounding.
        but = SoftmaxGate, ExpertChoiceGate
        assert_equals_eager(compiled, model, torch.randn(T, D), but=but)


def test_every_kind_of_expert(tmp_path):
    """The input [B, S, D] has a dynamic batch and length."""
    layers = [
        MoE(D, E, 2, hidden_sizes=(5, 4), activation=activation, bias=i % 2 == 0)
        for i, activation in enumerate(ACTIVATIONS)
        if activation not in CLAMPED_ACTIVATIONS
    ]
    layers += [
        MoE(
            D,
            E,
            2,
            experts=FeedForwardExperts(
                E, D, (5, 4), activation=activation, activation_args=(0.75, 1.5, 0.25)
            ),
        )
        for activation in CLAMPED_ACTIVATIONS
    ]
    layers.append(MoE(D, E, 2, hidden_sizes=(), bias=True))
    layers.append(MoE(D, E, 2, expert_dtype=torch.bfloat16))
    model = Layers(layers).eval()
    compiled = package(model, torch.randn(3, 4, D), [0, 1], tmp_path)
    for shape in ((1, 1), (3, 4), (2, 9)):
        assert_equals_eager(compiled, model, torch.randn(*shape, D))
