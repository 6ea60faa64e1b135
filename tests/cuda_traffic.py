"""Counts the bytes that `experts` reads and writes on CUDA, and its launches.

    python tests/cuda_traffic.py
    python tests/cuda_traffic.py --tokens 4096 --experts 8 --k 2 --width 4096 --hidden 14336

Needs no GPU. The kernels run in the emulation of compute capability 9.0, compiled so that they
count the bytes of tensors that they read and write. A byte that a kernel reads several times counts
once, as if the caches were infinite. For an operator of torch, such as the grouped GEMM, the bytes
are those of its arguments and results.

The counts of some small layers give the formula of each kernel: a sum of products of T tokens,
R = T·k rows, E experts, D = --width and n = --hidden. More layers check the formula. The table has
its values for the sizes of the command line. The experts are SwiGLU networks in bfloat16 without
biases, D to n to D. Each expert has rows, and all gradients are computed. The first run compiles
the kernels for a minute or two.
"""

import argparse
import re
import subprocess
from typing import NamedTuple

import emulated
import torch

from moe_ext import ops


class Sizes(NamedTuple):
    """The sizes of a layer of experts."""

    tokens: int
    experts: int
    k: int
    width: int
    hidden: int


# The products in a formula.
TERMS = {
    "T·D": lambda s: s.tokens * s.width,
    "R·D": lambda s: s.tokens * s.k * s.width,
    "R·n": lambda s: s.tokens * s.k * s.hidden,
    "E·D·n": lambda s: s.experts * s.width * s.hidden,
    "R": lambda s: s.tokens * s.k,
    "T": lambda s: s.tokens,
    "E": lambda s: s.experts,
    "1": lambda s: 1,
}
# Small layers. The first ones give the coefficients of TERMS, the others check them.
LAYERS = [
    *(Sizes(24, 4, 2, 16, 8), Sizes(40, 4, 2, 16, 8), Sizes(24, 4, 3, 16, 8)),
    *(Sizes(24, 5, 2, 16, 8), Sizes(24, 4, 2, 32, 8), Sizes(24, 4, 2, 16, 24)),
    *(Sizes(32, 6, 4, 24, 16), Sizes(48, 3, 1, 40, 32), Sizes(56, 7, 3, 8, 40)),
    *(Sizes(64, 8, 5, 48, 24), Sizes(72, 6, 2, 24, 56), Sizes(80, 9, 6, 56, 16)),
]
NUM_FITTED = 9


class Step(NamedTuple):
    """A kernel or an operator of torch, with the bytes that it reads and writes."""

    name: str
    read: int
    written: int


def names_of_kernels():
    """Returns the names of the functions of the emulation by their places in the library."""
    library = emulated.BUILD / "counting" / "moe_ext_emulated.so"
    lines = subprocess.check_output(["nm", "-C", library], text=True).splitlines()
    matches = (re.match(r"(\w+) [tTW] (.*)", line) for line in lines)
    return {int(line[1], 16): line[2] for line in matches if line}


def short(name):
    """Returns the name of a function without return type, namespaces, arguments and parameters."""
    return re.search(r"(\w+)(?:<.*)?\(", name.replace("(anonymous namespace)::", ""))[1]


def counts(names):
    """Returns the steps since the last call."""
    steps = []
    for line in torch.ops.moe_ext_emulated.counts().splitlines():
        name, read, written = line.rsplit(" ", 2)
        name = short(names[int(name[1:])]) if name.startswith("@") else name
        steps.append(Step(name, int(read), int(written)))
    return steps


def steps_of(sizes, names):
    """Returns the steps of forward and of backward of a layer."""
    T, E, k, D, n = sizes
    torch.ops.moe_ext_emulated.start_counting()
    try:
        # All experts have rows, whose numbers differ.
        expert_index = torch.stack([(torch.arange(T) ** 2 + j) % E for j in range(k)], dim=1)
        expert_index[:E] = (torch.arange(E)[:, None] + torch.arange(k)) % E
        plan = ops.dispatch_plan(expert_index, E)
        options = {"dtype": torch.bfloat16, "requires_grad": True}
        x, dy = torch.randn(T, D, **options), torch.randn(T, D, dtype=torch.bfloat16)
        gates = torch.rand(T, k, requires_grad=True)
        weights = [torch.randn(E, D, 2 * n, **options), torch.randn(E, n, D, **options)]

        counts(names)
        y = ops.experts(
            x, weights, activation="swiglu", offsets=plan.offsets, inverse=plan.inverse, gates=gates
        )
        forward = counts(names)
        torch.autograd.grad(y, [x, gates, *weights], dy)
        return {"forward": forward, "backward": counts(names)}
    finally:
        torch.ops.moe_ext_emulated.stop_counting()


class Formula(NamedTuple):
    """A number of bytes: the coefficients of TERMS, which are whole numbers."""

    coefficients: tuple[int, ...]

    def __call__(self, sizes):
        """Returns the value for the sizes."""
        terms = zip(self.coefficients, TERMS.values(), strict=True)
        return sum(coefficient * term(sizes) for coefficient, term in terms)

    def __str__(self):
        """Returns the formula without the terms that do not grow with rows or weights."""
        parts = [
            f"{coefficient} {name}"
            for coefficient, name in zip(self.coefficients, TERMS, strict=True)
            if coefficient and len(name) > 1
        ]
        return " + ".join(parts).replace("+ -", "- ") or "–"


def formula_of(counts):
    """Returns the formula of one count in each of LAYERS; checks it."""
    matrix = torch.tensor([[term(s) for term in TERMS.values()] for s in LAYERS]).double()
    known = torch.tensor(counts).double()
    solution = torch.linalg.lstsq(matrix[:NUM_FITTED], known[:NUM_FITTED, None]).solution
    formula = Formula(tuple(int(value) for value in solution[:, 0].round()))
    predicted = [formula(sizes) for sizes in LAYERS]
    if predicted != counts:
        raise ValueError(f"no sum of {', '.join(TERMS)} gives {counts}; {formula} is {predicted}")
    return formula


class Row(NamedTuple):
    """A step with formulas."""

    name: str
    read: Formula
    written: Formula

    @property
    def is_ours(self):
        """Whether the step is a kernel of moe_ext."""
        return not self.name.startswith("aten::")


def rows_of_passes():
    """Returns the rows of forward and of backward."""
    emulated.counts_traffic = True
    with emulated.kernels(major=9):
        names = names_of_kernels()
        measured = [steps_of(sizes, names) for sizes in LAYERS]
    rows = {}
    for which in measured[0]:
        sequences = [passes[which] for passes in measured]
        if len({tuple(step.name for step in steps) for steps in sequences}) > 1:
            raise ValueError(f"{which}: the layers have different kernels: {sequences}")
        rows[which] = [
            Row(
                steps[0].name,
                formula_of([step.read for step in steps]),
                formula_of([step.written for step in steps]),
            )
            for steps in zip(*sequences, strict=True)
        ]
    return rows


def table(rows, sizes):
    """Returns the tables in Markdown."""
    text = ""
    for which, steps in rows.items():
        text += f"{which.capitalize()}:\n\n"
        text += "| kernel | bytes read | bytes written | GB read | GB written |\n"
        text += "|---|---|---|---|---|\n"
        for row in steps:
            giga = [f"{formula(sizes) / 1e9:.3f}" for formula in (row.read, row.written)]
            text += f"| `{row.name}` | {row.read} | {row.written} | {' | '.join(giga)} |\n"
        for name, is_ours in (("launches of moe_ext", True), ("calls of torch", False)):
            chosen = [row for row in steps if row.is_ours == is_ours]
            giga = [
                sum(formula(sizes) for formula in formulas) / 1e9
                for formulas in ([row.read for row in chosen], [row.written for row in chosen])
            ]
            text += f"| **{len(chosen)} {name}: {sum(giga):.2f} GB** | | "
            text += f"| {giga[0]:.3f} | {giga[1]:.3f} |\n"
        text += "\n"
    return text.rstrip() + "\n"


def main():
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in Sizes(32768, 128, 8, 4096, 1536)._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=default)
    print(table(rows_of_passes(), Sizes(**vars(parser.parse_args()))), end="")


if __name__ == "__main__":
    main()
