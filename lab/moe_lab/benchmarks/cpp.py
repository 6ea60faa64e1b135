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
from functools import partial
from pathlib import Path
from statistics import median
from timeit import timeit
from typing import Any

import torch
from torch import nn

from moe_ext import MoE, ops
from moe_lab.benchmarks.harness import OutputOnly, Quartiles, Row, interleaved, pinned, ratio
from moe_lab.data import Vocabulary
from moe_lab.errors import ConfigError
from moe_lab.models import LanguageModel, LanguageModelConfig
from moe_lab.models.export import NextWord, export
from moe_lab.models.parts import MoEConfig

TITLE = "T = 1, E = {experts}, k = {k}, D = {width}, F = {hidden}, V = {words}, float32, one thread"
HEADER = "call | µs | quartiles | above the kernel, µs | x | quartiles"
CELLS = "{call} | {us:.2f|} | {above_kernel_us:.2f} | {ratio:.2f|}"


class _Program:
    """Runs tests/cpp/benchmark.cpp, which answers the time of its calls."""

    def __init__(self, *command: object) -> None:
        self._process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def microseconds(self, name: str, calls: int) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{name} {calls}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise ConfigError(f"--program ended with status {self._process.wait()}")
        return float(answer)

    def close(self) -> None:
        self._process.communicate()


def _in_python(function: Callable[[], object], calls: int) -> float:
    """Returns the mean microseconds of the calls of a function."""
    return 1e6 * timeit(function, number=calls) / calls


def _experts_calls(D: int, E: int, k: int, F: int) -> dict[str, Callable[[], object]]:
    """Returns the calls of the operator: by the dispatcher, and by `moe_ext.ops.experts`."""
    x, gates = torch.randn(1, D), torch.rand(1, k)
    weights = [torch.randn(E, D, F), torch.randn(E, F, D)]
    plan = ops.dispatch_plan(torch.arange(k)[None], E)
    op = torch.ops.moe_ext.experts.default
    call = partial(ops.experts, x, weights, offsets=plan.offsets, inverse=plan.inverse, gates=gates)
    return {
        "experts, Python, torch.ops.moe_ext.experts": partial(
            op, x, plan.offsets, plan.inverse, None, gates, weights, None, "relu", False
        ),
        "experts, Python, moe_ext.ops.experts": call,
    }


def _compile_layer(layer: nn.Module, d_model: int, path: Path) -> None:
    tokens = {0: torch.export.Dim.DYNAMIC}
    program = torch.export.export(layer, (torch.randn(5, d_model),), dynamic_shapes=(tokens,))
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))


@torch.no_grad()
def measure(args: Any) -> list[Row]:
    with pinned(1), tempfile.TemporaryDirectory() as folder:
        times = _times(args, Path(folder))
    kernel, rows = median(times["kernel"]), []
    for name, samples in times.items():
        us, what = Quartiles.from_values(samples), name.split(",")[0]
        above = us.median - kernel if what == "experts" else None
        cpp = next((t for n, t in times.items() if n.startswith(f"{what}, C++")), samples)
        by_cpp = ratio(samples, cpp) if "Python" in name else None
        rows.append(Row(call=name, us=us, above_kernel_us=above, ratio=by_cpp))
    return rows


def _times(args: Any, folder: Path) -> dict[str, list[float]]:
    """Returns the microseconds of a call in each round, by name."""
    D, E, k, F = args.width, args.experts, args.k, args.hidden
    layer = OutputOnly(MoE(D, E, k, hidden_sizes=[F])).eval()
    mixture = MoEConfig(num_experts=E, k=k, hidden_sizes=[F])
    model = LanguageModel(LanguageModelConfig(d_model=D, moe=mixture), args.words).eval()
    vocabulary = Vocabulary(["</s>", "<unk>", *map(str, range(args.words - 2))])
    next_word, x, word = NextWord(model), torch.randn(1, D), torch.zeros(1, 1, dtype=torch.int64)
    packages = folder / "layer.pt2", folder / "model.pt2"
    _compile_layer(layer, D, packages[0])
    export(model, vocabulary, packages[1])
    program = _Program(args.program, *packages, D, E, k, F)
    in_cpp = partial(partial, program.microseconds)
    in_python = partial(partial, _in_python)
    calls: dict[str, Callable[[int], float]] = {
        "kernel": in_cpp("kernel"),
        "experts, C++": in_cpp("experts"),
        **{name: in_python(call) for name, call in _experts_calls(D, E, k, F).items()},
        "layer, C++ package": in_cpp("layer"),
        "layer, eager Python": in_python(lambda: layer(x)),
        "model, C++ package": in_cpp("model"),
        "model, eager Python": in_python(lambda: next_word(word)),
    }
    # A call of C++ returns its own time.
    functions = {name: partial(call, args.calls) for name, call in calls.items()}
    times = interleaved(functions, args.rounds, clock=lambda function: function())
    program.close()
    return times
