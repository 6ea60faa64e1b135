"""Prints the speed of bfloat16 experts on one thread; scripts/test_amx.sh --time calls it.

"rows" and "p.mT" are the layouts of the weights, dX and dW the gradients of the input and of the
weights. Each figure is a median, in GF/s.
"""

import itertools

import torch
from torch.utils.benchmark import Timer

from moe_ext.ops import experts

SHAPES = (  # experts, rows of each, widths
    (1, 2048, (2048, 2048)),
    (1, 512, (2048, 2048)),
    (1, 32, (2048, 2048)),
    (4, 1024, (512, 1024, 512)),
    (32, 512, (512, 1024, 512)),
    (8, 512, (4096, 3584, 4096)),
    (64, 64, (2048, 1024, 2048)),
    (128, 16, (2048, 768, 2048)),
)


def make_weight(num_experts, rows, columns, transposed):
    """Returns a weight [num_experts, rows, columns]."""
    shape = (num_experts, columns, rows) if transposed else (num_experts, rows, columns)
    weight = torch.zeros(shape, dtype=torch.bfloat16)
    return (weight.mT if transposed else weight).requires_grad_()


def measure(num_experts, rows, widths, transposed):
    """Returns the speed of the forward pass, of dX and of dW."""
    x = torch.zeros(num_experts * rows, widths[0], dtype=torch.bfloat16, requires_grad=True)
    pairs = [*itertools.pairwise(widths)]
    weights = [make_weight(num_experts, *pair, transposed) for pair in pairs]
    offsets = torch.arange(num_experts + 1) * rows
    y = experts(x, weights, offsets=offsets)
    values = {
        "experts": lambda: experts(x.detach(), [w.detach() for w in weights], offsets=offsets),
        "gradients": lambda *to: torch.autograd.grad(y, to, torch.zeros_like(y), retain_graph=True),
        "x": x,
        "weights": weights,
    }

    def seconds_of(call):
        return Timer(call, globals=values).blocked_autorange(min_run_time=1).median

    forward, dx = seconds_of("experts()"), seconds_of("gradients(x)")
    dw = seconds_of("gradients(x, *weights)") - dx
    billions = sum(2 * a * b for a, b in pairs) * num_experts * rows / 1e9
    return [billions / seconds for seconds in (forward, dx, dw)]


def main():
    """Measures all shapes."""
    torch.set_num_threads(1)
    print("| experts x rows, widths | layout | forward | dX | dW |\n|---|---|---|---|---|")
    for num_experts, rows, widths in SHAPES:
        for layout in ("rows", "p.mT"):
            speeds = measure(num_experts, rows, widths, transposed=layout == "p.mT")
            cells = [f"{num_experts} x {rows}, {' to '.join(map(str, widths))}", layout]
            print(f"| {' | '.join([*cells, *(f'{speed:.0f}' for speed in speeds)])} |", flush=True)


if __name__ == "__main__":
    main()
