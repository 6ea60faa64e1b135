"""Writes FOLDER/packages.pt2, five layers in one AOTInductor package, and their results.

    python tests/cpp/packages.py FOLDER

The package maps tokens [T, D] to the outputs of all LAYERS. One package compiles in less time than
five.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from moe_ext import BalancedGate, HierarchicalMoE, MoE, NoisyTopKGate, SharedExpert, TopKGate

D = 8
LAYERS = {
    "flat noisy": lambda: MoE(D, 6, 2, gate=NoisyTopKGate(D, 6, 2)),
    "swiglu top-k": lambda: MoE(
        D, 6, 2, gate=TopKGate(D, 6, 2), hidden_sizes=(5,), activation="swiglu", bias=True
    ),
    "grouped sigmoid with a shared expert": lambda: MoE(
        D,
        6,
        2,
        gate=TopKGate(
            D, 6, 2, score="sigmoid", num_groups=3, groups_per_token=2, bias_update_rate=0.1
        ),
        shared_expert=SharedExpert(D, (5,)),
    ),
    "hierarchical": lambda: HierarchicalMoE(D, 4, 3, (2, 2)),
    "balanced": lambda: MoE(D, 6, 2, gate=BalancedGate(D, 6, 2), w_load=0),
}


class Layers(nn.Module):
    """Returns the output of each layer, without `MoEAux`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for make in LAYERS.values())
        for name, parameter in self.named_parameters():
            if name.endswith("threshold"):
                nn.init.constant_(parameter, 0.15)  # softmax scores are 1 / 6 on average
            else:
                nn.init.normal_(parameter, std=0.5)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x)[0] for layer in self.layers]


@torch.no_grad()
def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = Layers().eval()
    tokens = {0: torch.export.Dim.DYNAMIC}
    program = torch.export.export(model, (torch.randn(5, D),), dynamic_shapes=(tokens,))
    torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "packages.pt2"))
    cases = {}
    for T in (1, 2, 5, 64, 500):
        x = torch.randn(T, D)
        cases[f"{T}/x"] = x
        for i, y in enumerate(model(x)):
            cases[f"{T}/y/{i}"] = y.clone()
    torch.save(cases, folder / "packages.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
