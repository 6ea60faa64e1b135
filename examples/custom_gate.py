"""Write a gate of your own: cosine similarity with a learned temperature.

    python examples/custom_gate.py

The data have 8 kinds of tokens. The target of a token is a linear map of the token; each kind has a
map of its own. The script prints the loss, the temperature and the balance. At the end it prints,
for each kind, the percentage of the kind's tokens that go to its most frequent expert:

    step   1: loss 1.952, temperature 0.200, CV(Importance) 0.42
    step 100: loss 0.542, temperature 0.232, CV(Importance) 0.32
    step 200: loss 0.218, temperature 0.130, CV(Importance) 0.52
    step 300: loss 0.257, temperature 0.140, CV(Importance) 0.44
    step 400: loss 0.233, temperature 0.154, CV(Importance) 0.36
    share of the most frequent expert: 94% 89% 88% 84% 92% 87% 94% 92%
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_ext import Gate, MoE, Routing
from moe_ext.distributed import Ranks

D_MODEL, NUM_KINDS, STEPS = 32, 8, 400


class CosineGate(Gate):
    """G(x) = the top k of softmax(cos(x, W_i) / temperature), scaled to the sum 1."""

    def __init__(self, d_model: int, num_experts: int, k: int, temperature: float = 0.2) -> None:
        super().__init__(d_model, num_experts, k)
        self.directions = nn.Parameter(torch.randn(d_model, num_experts))
        # The gate learns the logarithm, so that the temperature stays positive.
        self.log_temperature = nn.Parameter(torch.tensor(temperature).log())

    def forward(self, x: Tensor, ranks: Ranks | None = None) -> Routing:
        """Routes the tokens x [T, D]."""
        # self.logits computes in float32 at least, also under autocast.
        cosine = self.logits(F.normalize(x, dim=-1), F.normalize(self.directions, dim=0))
        temperature = self.log_temperature.exp()
        kept, expert_index = torch.softmax(cosine / temperature, dim=-1).topk(self.k)
        gates = kept / kept.sum(dim=-1, keepdim=True)
        routing = self.make_routing(gates, expert_index, ranks=ranks)
        # aux.metrics() then reports the temperature too.
        return routing._replace(metrics={"temperature": temperature.detach()})


def main() -> None:
    """Runs the example."""
    torch.manual_seed(1)
    centers = 3 * F.normalize(torch.randn(NUM_KINDS, D_MODEL), dim=-1)
    maps = torch.randn(NUM_KINDS, D_MODEL, D_MODEL) / D_MODEL**0.5

    def tokens(number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns random tokens, their targets and their kinds."""
        kind = torch.randint(NUM_KINDS, (number,))
        x = centers[kind] + torch.randn(number, D_MODEL)
        return x, torch.einsum("td,tde->te", x, maps[kind]), kind

    gate = CosineGate(D_MODEL, num_experts=16, k=2)
    # Each expert is a single matrix (hidden_sizes=[]). The load of a gate without noise has no
    # gradient, so only the importance loss balances the experts (w_load=0).
    moe = MoE(D_MODEL, num_experts=16, k=2, gate=gate, hidden_sizes=[], w_load=0.0)
    optimizer = torch.optim.Adam(moe.parameters(), lr=1e-2)
    for step in range(1, STEPS + 1):
        x, target, _ = tokens(512)
        y, aux = moe(x)
        loss = F.mse_loss(y, target)
        (loss + aux.loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % 100 == 0:
            metrics = aux.metrics()
            print(
                f"step {step:3}: loss {loss.item():.3f}, temperature {metrics['temperature']:.3f}, "
                f"CV(Importance) {metrics['cv_importance']:.2f}"
            )

    with torch.no_grad():
        x, _, kind = tokens(4000)
        _, aux = moe(x)
    counts = torch.zeros(NUM_KINDS, moe.num_experts)
    counts.index_put_((kind[:, None], aux.expert_index), torch.ones(()), accumulate=True)
    shares = counts.max(dim=1).values / kind.bincount(minlength=NUM_KINDS)
    print("share of the most frequent expert:", " ".join(f"{share:.0%}" for share in shares))


if __name__ == "__main__":
    main()
