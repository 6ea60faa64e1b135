"""Fine-tune a saved model in less memory, with recompute and FactoredAdam.

    python examples/fine_tuning.py

A small model learns the bytes of Python's language manual and is saved. A second model loads the
weights and is fine-tuned on Python code. Its experts recompute activations in the backward pass.
FactoredAdam stores one number for each row and column of an expert's matrix; Adam stores two
numbers for each weight. The script prints the loss in nats per byte and the memory:

    trained on the manual: loss 2.72 on code
      optimizer state: Adam 8,718,364 bytes
      saved for backward: 4,669,846 bytes
    fine-tuned on code: loss 1.87 on code
      optimizer state: FactoredAdam 49,160 bytes, Adam of the rest 329,748 bytes
      saved for backward: 2,572,694 bytes
"""

import io
import tokenize
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer

from moe_ext import MoE
from moe_ext.optim import FactoredAdam, split_parameters

CONTEXT, BATCH, STEPS = 8, 1_024, 150


class ByteModel(nn.Module):
    """Predicts a byte from the CONTEXT bytes before it."""

    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        d_model = 16 * CONTEXT
        self.bytes = nn.Embedding(256, 16)
        self.moe = MoE(d_model, num_experts=16, k=2, hidden_sizes=[256], recompute=recompute)
        self.logits = nn.Linear(d_model, 256)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the logits of the next byte, and the balancing losses."""
        x = self.bytes(ids).flatten(1)
        y, aux = self.moe(x)
        return self.logits(x + y), aux.loss


def nll(model: ByteModel, text: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the nats per byte at the positions of the text, and the balancing losses."""
    window = text[positions[:, None] + torch.arange(CONTEXT + 1)]
    logits, aux_loss = model(window[:, :-1])
    return F.cross_entropy(logits, window[:, -1]), aux_loss


def train(model: ByteModel, text: Tensor, optimizers: Sequence[Optimizer]) -> None:
    """Trains the model on random pieces of the text."""
    model.train()
    for _ in range(STEPS):
        loss, aux_loss = nll(model, text, torch.randint(len(text) - CONTEXT, (BATCH,)))
        (loss + aux_loss).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@torch.no_grad()
def evaluate(model: ByteModel, text: Tensor) -> float:
    """Returns the nats per byte of the text."""
    return nll(model.eval(), text, torch.arange(len(text) - CONTEXT))[0].item()


def saved_bytes(model: ByteModel, text: Tensor) -> int:
    """Returns the bytes of activations that a training step on the text saves for backward."""
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    saved = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            saved[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        nll(model.train(), text, torch.arange(BATCH))
    return sum(saved.values())


def state_bytes(optimizer: Optimizer) -> int:
    """Returns the bytes of the tensors that the optimizer keeps."""
    states = optimizer.state.values()
    return sum(v.nbytes for state in states for v in state.values() if isinstance(v, Tensor))


def main() -> None:
    """Runs the example."""
    torch.manual_seed(1)
    manual = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
    code = torch.tensor(list(Path(tokenize.__file__).read_bytes()))
    train_code, test_code = code[:-4_000], code[-4_000:]

    model = ByteModel(recompute=False)
    adam = Adam(model.parameters(), lr=3e-3)
    train(model, manual, [adam])
    file = io.BytesIO()  # torch.save takes a path too
    torch.save(model.state_dict(), file)
    print(f"trained on the manual: loss {evaluate(model, test_code):.2f} on code")
    print(f"  optimizer state: Adam {state_bytes(adam):,} bytes")
    print(f"  saved for backward: {saved_bytes(model, manual):,} bytes")

    file.seek(0)
    model = ByteModel(recompute=True)  # recompute does not change the parameters
    model.load_state_dict(torch.load(file, weights_only=True))
    split = split_parameters(model)
    optimizers = [FactoredAdam(split.experts, lr=1e-3), Adam(split.rest, lr=1e-3)]
    train(model, train_code, optimizers)
    print(f"fine-tuned on code: loss {evaluate(model, test_code):.2f} on code")
    factored, rest = (state_bytes(optimizer) for optimizer in optimizers)
    print(f"  optimizer state: FactoredAdam {factored:,} bytes, Adam of the rest {rest:,} bytes")
    print(f"  saved for backward: {saved_bytes(model, train_code):,} bytes")


if __name__ == "__main__":
    main()
