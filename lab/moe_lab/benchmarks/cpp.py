"""Compares calls from C++ with calls from Python for one token (T = 1), on one thread.

    prefix=$(python -m moe_ext.info --cmake-prefix)
    cmake -S tests/cpp -B build/cpp -G Ninja -DCMAKE_PREFIX_PATH="$prefix"
    cmake --build build/cpp --target benchmark
    moe-lab benchmark cpp --program build/cpp/benchmark      # one minute

"kernel" is the CPU kernel of the operator `experts`, without the dispatcher's other keys. The next
rows are the same call through the dispatcher, from C++ and from Python. "layer" is a MoE layer and
"model" a language model with LSTMs, in evaluation mode: an AOTInductor package, called from C++ as
examples/cpp/serve.cpp does, and eager mode. "µs" is the mean of a round's calls, median over the
interleaved rounds. "above the kernel" is the difference to the first row. "x" is the time of a
Python call divided by the time of the C++ call.
"""

import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from moe_ext import MoE, ops
from moe_lab.benchmarks.harness import (
    OutputOnly,
    Quartiles,
    environment,
    host_seconds,
    ratio,
    report_rows,
)
from moe_lab.cli import at_least, make_parser
from moe_lab.data import Vocabulary
from moe_lab.errors import ConfigError
from moe_lab.models import LanguageModel, LanguageModelConfig
from moe_lab.models.export import NextWord, export
from moe_lab.models.parts import MoEConfig


@dataclass
class Row:
    """The time of a call, in µs."""

    call: str
    us: Quartiles
    above_kernel_us: float | None
    ratio: Quartiles | None


class _Program:
    """Runs tests/cpp/benchmark.cpp, which answers the time of its calls."""

    def __init__(self, *command: object) -> None:
        self._process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def microseconds(self, name: str, calls: int) -> float:
        """Returns the mean time of the calls of a function."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{name} {calls}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise ConfigError(f"--program ended with status {self._process.wait()}")
        return float(answer)

    def close(self) -> None:
        self._process.communicate()


def _in_python(function: Callable[[], object]) -> Callable[[int], float]:
    def microseconds(calls: int) -> float:
        def run() -> None:
            for _ in range(calls):
                function()

        return 1e6 * host_seconds(run) / calls

    return microseconds


def _experts_calls(D: int, E: int, k: int, F: int) -> dict[str, Callable[[], object]]:
    """Returns the calls of the operator: by the dispatcher, and by `moe_ext.ops.experts`."""
    x, gates = torch.randn(1, D), torch.rand(1, k)
    weights = [torch.randn(E, D, F), torch.randn(E, F, D)]
    plan = ops.dispatch_plan(torch.arange(k)[None], E)
    op = torch.ops.moe_ext.experts.default

    def dispatcher() -> None:
        op(x, plan.offsets, plan.inverse, None, gates, weights, None, "relu", False)

    def function() -> None:
        ops.experts(x, weights, offsets=plan.offsets, inverse=plan.inverse, gates=gates)

    return {
        "experts, Python, torch.ops.moe_ext.experts": dispatcher,
        "experts, Python, moe_ext.ops.experts": function,
    }


def _compile_layer(layer: nn.Module, d_model: int, path: Path) -> None:
    tokens = {0: torch.export.Dim.DYNAMIC}
    program = torch.export.export(layer, (torch.randn(5, d_model),), dynamic_shapes=(tokens,))
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))


@torch.no_grad()
def main(arguments: list[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__)
    parser.add_argument("--program", type=Path, required=True, help="built from benchmark.cpp")
    parser.add_argument("--rounds", type=at_least(2), default=21)
    parser.add_argument("--calls", type=at_least(1), default=500, help="calls in a round")
    parser.add_argument("--width", type=at_least(1), default=64)
    parser.add_argument("--experts", type=at_least(1), default=16)
    parser.add_argument("--k", type=at_least(1), default=2)
    parser.add_argument("--hidden", type=at_least(1), default=128)
    parser.add_argument("--words", type=at_least(3), default=1000, help="size of the vocabulary")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    if not args.program.is_file():
        raise ConfigError(f"--program must be a built program, got {args.program}")
    D, E, k, F = args.width, args.experts, args.k, args.hidden

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = OutputOnly(MoE(D, E, k, hidden_sizes=[F])).eval()
    mixture = MoEConfig(num_experts=E, k=k, hidden_sizes=[F])
    model = LanguageModel(LanguageModelConfig(d_model=D, moe=mixture), args.words).eval()
    vocabulary = Vocabulary(["</s>", "<unk>", *map(str, range(args.words - 2))])
    next_word, x, word = NextWord(model), torch.randn(1, D), torch.zeros(1, 1, dtype=torch.int64)

    print(environment())
    print(f"T = 1, E = {E}, k = {k}, D = {D}, F = {F}, V = {args.words}, float32, one thread\n")
    with tempfile.TemporaryDirectory() as folder:
        packages = Path(folder) / "layer.pt2", Path(folder) / "model.pt2"
        _compile_layer(layer, D, packages[0])
        export(model, vocabulary, packages[1])
        program = _Program(args.program, *packages, D, E, k, F)
        calls: dict[str, Callable[[int], float]] = {
            "kernel": lambda n: program.microseconds("kernel", n),
            "experts, C++": lambda n: program.microseconds("experts", n),
        }
        for name, function in _experts_calls(D, E, k, F).items():
            calls[name] = _in_python(function)
        calls["layer, C++ package"] = lambda n: program.microseconds("layer", n)
        calls["layer, eager Python"] = _in_python(lambda: layer(x))
        calls["model, C++ package"] = lambda n: program.microseconds("model", n)
        calls["model, eager Python"] = _in_python(lambda: next_word(word))
        times: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(-2, args.rounds):  # two rounds warm up
            for name, microseconds in calls.items():
                took = microseconds(args.calls)
                if number >= 0:
                    times[name].append(took)
        program.close()

    kernel = Quartiles.of(times["kernel"]).median
    rows = []
    for name, each in times.items():
        us, what = Quartiles.of(each), name.split(",")[0]
        above = us.median - kernel if what == "experts" else None
        by_cpp = None
        if "Python" in name:
            by_cpp = ratio(each, next(t for n, t in times.items() if n.startswith(f"{what}, C++")))
        rows.append(Row(name, us, above, by_cpp))
    report_rows(
        rows,
        ["call", "µs", "quartiles", "above the kernel, µs", "x", "quartiles"],
        lambda row: [
            row.call,
            *row.us.cells(),
            "" if row.above_kernel_us is None else f"{row.above_kernel_us:.2f}",
            *(("", "") if row.ratio is None else row.ratio.cells()),
        ],
        args.json,
    )
    return rows
