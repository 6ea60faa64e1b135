"""Train 4,096 experts in 64 groups, at the cost of four experts for each token.

    python examples/hierarchical_4096.py

The gate chooses 2 of the 64 groups, then 2 of the 64 experts in each. The task is to remember
random values of 4,096 random keys. A dense layer with as many parameters as a token uses is too
small for this. The script prints the parameters, the error and the time of both layers, and the
load:

    4,096 experts, 17,309,696 parameters; a token uses 40,960 of them
      relative error 0.134; 32 µs for each token in training
    dense layer, 40,960 parameters
      relative error 0.806; 8 µs for each token in training
    tokens of an expert: 0 to 13, on average 4
"""

import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_ext import HierarchicalMoE

D_MODEL, GROUPS, PER_GROUP, K, HIDDEN = 64, 64, 64, 2, 32
NUM_KEYS, TOKENS, STEPS = 4_096, 4_096, 100


class Dense(nn.Module):
    """A feed-forward layer that returns (y, None), where the mixture returns (y, aux)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(D_MODEL, width, bias=False), nn.ReLU(), nn.Linear(width, D_MODEL, bias=False)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Applies the layer to x [T, D]."""
        return self.layers(x), None


def train(layer: nn.Module, keys: Tensor, values: Tensor) -> None:
    """Trains the layer to map keys to values; prints its error and the time for each token."""
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2, fused=True)
    started = time.perf_counter()
    for _ in range(STEPS):
        chosen = torch.randint(NUM_KEYS, (TOKENS,))
        y, aux = layer(keys[chosen])
        loss = F.mse_loss(y, values[chosen])
        if aux is not None:
            loss = loss + aux.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    microseconds = 1e6 * (time.perf_counter() - started) / (STEPS * TOKENS)
    layer.eval()
    with torch.no_grad():
        y, aux = layer(keys)
    error = F.mse_loss(y, values) / values.square().mean()
    print(f"  relative error {error:.3f}; {microseconds:.0f} µs for each token in training")


def main() -> None:
    """Runs the example."""
    torch.manual_seed(1)
    keys, values = torch.randn(2, NUM_KEYS, D_MODEL)

    moe = HierarchicalMoE(D_MODEL, GROUPS, PER_GROUP, K, hidden_sizes=[HIDDEN])
    total = sum(parameter.numel() for parameter in moe.parameters())
    experts = sum(parameter.numel() for parameter in moe.experts.parameters())
    # A token uses K² experts. The gate scores all groups and the experts of K groups, and has two
    # matrices: one for the logits and one for the noise.
    active = experts * K**2 // moe.num_experts + 2 * D_MODEL * (GROUPS + K * PER_GROUP)
    print(f"{moe.num_experts:,} experts, {total:,} parameters; a token uses {active:,} of them")
    train(moe, keys, values)

    dense = Dense(width=active // (2 * D_MODEL))
    print(f"dense layer, {sum(parameter.numel() for parameter in dense.parameters()):,} parameters")
    train(dense, keys, values)

    with torch.no_grad():
        _, aux = moe(keys)
    mean = NUM_KEYS * K**2 / moe.num_experts
    print(
        f"tokens of an expert: {int(aux.tokens_per_expert.min())} to "
        f"{int(aux.tokens_per_expert.max())}, on average {mean:.0f}"
    )


if __name__ == "__main__":
    main()
