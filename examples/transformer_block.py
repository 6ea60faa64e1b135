"""Train a transformer block with a mixture of experts in place of its feed-forward layer.

    python examples/transformer_block.py

The model predicts the next byte of Python's language manual, which comes with Python. The script
prints the loss in nats per byte and the balance of the experts, then the loss on held-out topics:

    step   1: loss 5.87, cv_importance 0.07, cv_load 0.01, max_over_mean_load 1.01, cv_tokens 0.07
    step  50: loss 2.85, cv_importance 0.10, cv_load 0.05, max_over_mean_load 1.06, cv_tokens 0.09
    step 100: loss 2.85, cv_importance 0.05, cv_load 0.04, max_over_mean_load 1.10, cv_tokens 0.04
    step 150: loss 2.37, cv_importance 0.06, cv_load 0.04, max_over_mean_load 1.07, cv_tokens 0.05
    step 200: loss 2.45, cv_importance 0.09, cv_load 0.06, max_over_mean_load 1.05, cv_tokens 0.07
    step 250: loss 2.43, cv_importance 0.07, cv_load 0.06, max_over_mean_load 1.11, cv_tokens 0.08
    step 300: loss 2.40, cv_importance 0.07, cv_load 0.04, max_over_mean_load 1.05, cv_tokens 0.05
    held-out topics: loss 2.53
    tokens of each expert: [8292, 7815, 8570, 7932, 7886, 7149, 8713, 8027]
"""

from collections.abc import Iterable
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_ext import MoE, MoEAux

BATCH, LENGTH, STEPS = 16, 64, 300


class MoEBlock(nn.Module):
    """A pre-norm transformer block: causal self-attention, then a mixture of experts."""

    def __init__(self, d_model: int, num_heads: int, num_experts: int, k: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(d_model)
        self.attention = nn.MultiheadAttention(d_model, num_heads, batch_first=True)
        self.moe_norm = nn.LayerNorm(d_model)
        self.moe = MoE(d_model, num_experts, k, hidden_sizes=[2 * d_model], activation="gelu")

    def forward(self, x: Tensor) -> tuple[Tensor, MoEAux]:
        """Returns the output of the block for x [batch, length, D], and the aux of its MoE."""
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        h = self.attention_norm(x)
        x = x + self.attention(h, h, h, attn_mask=future, need_weights=False)[0]
        # MoE takes any leading dimensions, here [batch, length].
        y, aux = self.moe(self.moe_norm(x))
        return x + y, aux


class ByteModel(nn.Module):
    """Predicts the next byte of a text with one transformer block."""

    def __init__(self, d_model: int = 64) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, d_model)
        self.positions = nn.Embedding(LENGTH, d_model)
        self.block = MoEBlock(d_model, num_heads=4, num_experts=8, k=2)
        self.logits = nn.Linear(d_model, 256)

    def forward(self, ids: Tensor) -> tuple[Tensor, MoEAux]:
        """Returns the logits of the next bytes, and the aux of the block."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x, aux = self.block(self.bytes(ids) + self.positions(positions))
        return self.logits(x), aux


def as_ids(texts: Iterable[str]) -> Tensor:
    """Returns the bytes of the joined texts."""
    return torch.tensor(list("\n".join(texts).encode()))


def windows(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns inputs and targets [len(starts), LENGTH] of the text at the positions starts."""
    window = text[starts[:, None] + torch.arange(LENGTH + 1)]
    return window[:, :-1], window[:, 1:]


def main() -> None:
    """Runs the example."""
    torch.manual_seed(1)
    names = sorted(topics)
    held_out = as_ids(topics[name] for name in names[::10])
    train = as_ids(topics[name] for name in names if name not in names[::10])

    model = ByteModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(1, STEPS + 1):
        ids, targets = windows(train, torch.randint(len(train) - LENGTH, (BATCH,)))
        logits, aux = model(ids)
        nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        # aux.loss balances the experts. Without this loss the gate prefers a few experts.
        (nll + aux.loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % 50 == 0:
            balance = ", ".join(f"{name} {value:.2f}" for name, value in aux.metrics().items())
            print(f"step {step:3}: loss {nll.item():.2f}, {balance}")

    model.eval()  # the gate adds no noise
    with torch.no_grad():
        ids, targets = windows(held_out, torch.arange(0, len(held_out) - LENGTH, LENGTH))
        logits, aux = model(ids)
        nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    print(f"held-out topics: loss {nll.item():.2f}")
    print(f"tokens of each expert: {aux.tokens_per_expert.tolist()}")


if __name__ == "__main__":
    main()
