"""Writes what the C++ tests compare with, as files of named tensors; ctest calls it.

    python tests/cpp/export.py FOLDER           # writes FOLDER/operators.pt, modules.pt, ...
    python tests/cpp/export.py FOLDER --check   # reads what the C++ tests wrote to FOLDER

A name is a path: "load 3/arguments/expert_index". Numbers and texts are tensors too. The layers are
those of modules.h, whose names are Python code.
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from assertions import assert_same_bits  # noqa: E402
from operators import TABLE, evaluate, upstream_of  # noqa: E402
from samples.experts import ACTIVATION_ARGS, ACTIVATIONS  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import moe_ext  # noqa: E402
from moe_ext import (  # noqa: E402
    BalancedGate,
    Gate,
    MoE,
    MoEAux,
    NoisyTopKGate,
    SwitchLoss,
    TopKGate,
    ZLoss,
    losses,
    update_gates,
)
from moe_ext.optim import FactoredAdam  # noqa: E402

Tensors = dict[str, Tensor]


def named(value: object, name: str) -> Tensors:
    """Names every tensor in a value: lists and dicts add a part to the path, None is left out."""
    if value is None:
        return {}
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
    elif isinstance(value, Tensor):
        return {name: value.detach().clone(memory_format=torch.contiguous_format)}
    elif isinstance(value, (str, torch.dtype)):
        return {name: torch.tensor(list(str(value).encode()), dtype=torch.uint8)}
    elif isinstance(value, float):
        return {name: torch.tensor(value, dtype=torch.float64)}
    else:
        return {name: torch.tensor(int(value))}
    prefix = f"{name}/" if name else ""
    return {key: x for part, v in parts for key, x in named(v, f"{prefix}{part}").items()}


# Operators


def operator_cases() -> Tensors:
    """Makes results and gradients of the samples of tests/samples; ctest compares bits."""
    cases = {}
    for name, row in TABLE.items():
        for number, sizes in enumerate(row.samples):
            torch.manual_seed(number)
            arguments = row.make(torch.float32, **sizes)
            if name == "batchwise_topm" and arguments["scores"].dim() == 2:
                arguments["scores"] = arguments["scores"][None]  # only Python takes one batch
            outputs, grads = evaluate(row, arguments)
            leaves = named({key: arguments.get(key) for key in row.differentiable}, "")
            leaves = [leaf for leaf in leaves if not re.fullmatch(r"lora/\d/[23]", leaf)]
            cases[f"{name} {number}"] = dict(
                arguments=arguments,
                outputs=outputs,
                upstream=upstream_of(outputs),
                gradients=dict(zip(leaves, grads, strict=True)),
            )
    return named(cases, "")


def error_of(call: Callable[[], object]) -> Tensors | None:
    """Returns the class and the text of the error that a call raises; None without an error."""
    try:
        call()
    except (ValueError, TypeError, IndexError) as error:
        return named(dict(kind=type(error).__name__, message=str(error)), "")
    return None


# Modules

D = 8
Maker = Callable[[], nn.Module]


def layer(gate: Gate | None = None, **options: object) -> nn.Module:
    num_experts, k = (gate.num_experts, gate.k) if gate else (6, 2)
    return MoE(D, num_experts, k, gate=gate, **options)


def batchwise(gate: BalancedGate) -> BalancedGate:
    gate.batchwise = True
    return gate


def named_in(header: str) -> list[str]:
    """Returns the keys of the tables of a C++ file that are calls in Python."""
    text = Path(__file__).with_name(header).read_text()
    keys = re.findall(r'^ +{((?:\s*"[^"\n]*"\s*)+),', text, re.M)
    keys = ["".join(re.findall(r'"(.*)"', key)) for key in keys]
    return [key for key in keys if key.endswith(")")]


def evaluated(code: str) -> object:
    return eval(code, vars(torch) | vars(losses) | vars(moe_ext) | globals())


CLAMPED = dict(activation="clamped_swiglu", activation_args=ACTIVATION_ARGS["clamped_swiglu"])
LAYERS: dict[str, Maker] = {
    code: lambda code=code: evaluated(code) for code in named_in("modules.h")
} | {
    f"activation {name}": lambda name=name: layer(
        hidden_sizes=(5, 6), activation=name, activation_args=ACTIVATION_ARGS.get(name), bias=True
    )
    for name in ACTIVATIONS
}


def all_losses() -> list[losses.RouterLoss]:
    return [SwitchLoss(0.3), SwitchLoss(0.1, per_sequence=True), ZLoss(0.2)]


def call(module: nn.Module, inputs: Tensors) -> Tensors:
    """Names the results of a layer; the tensors stay in their graph."""
    given = {"expert_index": inputs["expert_index"]} if "expert_index" in inputs else {}
    y, aux = module(inputs["x"], inputs.get("mask"), **given)
    assert isinstance(aux, MoEAux)
    results = dict(y=y)
    for name, value in aux._asdict().items():
        if isinstance(value, Tensor):
            results[name] = value
        elif isinstance(value, dict):
            results |= {f"{name}/{key}": x for key, x in value.items()}
        elif isinstance(value, tuple):
            results |= {f"{name}/{i}": x for i, x in enumerate(value)}
    return results


def inputs_of(tokens: int, masked: bool) -> Tensors:
    """Draws tokens with two leading dimensions, and a mask."""
    mask = dict(mask=torch.rand(2, tokens // 2) < 0.7) if masked else {}
    return dict(x=torch.randn(2, tokens // 2, D)) | mask


def adapts(module: nn.Module) -> bool:
    return any(name.endswith("selection_bias") for name in module.state_dict())


def step(module: nn.Module, inputs: Tensors, seed: int) -> dict[str, object]:
    """Runs forward and backward; the upstream gradients are of every result that has a graph."""
    inputs["x"].requires_grad_()
    module.zero_grad()
    torch.manual_seed(seed)
    results = call(module, inputs)
    with_graph = {key: x for key, x in sorted(results.items()) if x.requires_grad}
    upstream = {key: torch.randn(x.shape).to(x.dtype) for key, x in with_graph.items()}
    if with_graph:
        torch.autograd.backward(list(with_graph.values()), list(upstream.values()))
    if adapts(module):
        update_gates(module)
    grads = dict(module.named_parameters()) | dict(x=inputs["x"])
    return dict(
        inputs=inputs,
        training=module.training,
        seed=seed,
        upstream=upstream,
        results=results,
        gradients={key: x.grad for key, x in grads.items() if x.grad is not None},
        state=module.state_dict(),
    )


def module_case(make: Maker) -> Tensors:
    """Makes initial weights, other weights, and steps in training and evaluation from these."""
    torch.manual_seed(7)
    module = make()
    case: dict[str, object] = named(module.state_dict(), "initial")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.5)
    case |= named(module.state_dict(), "weights")
    for number, (training, tokens, masked) in enumerate(
        [(True, 24, False), (True, 30, True), (False, 24, True), (True, 0, False)]
    ):
        module.train(training)
        inputs = inputs_of(tokens, masked)
        case |= named(step(module, inputs, 100 + number), f"steps/{number}")
    if isinstance(module.gate, (TopKGate, NoisyTopKGate)):
        inputs = inputs_of(30, masked=True)
        scores = torch.rand(2, 15, module.gate.num_experts)
        inputs["expert_index"] = scores.argsort(-1)[..., : module.k].contiguous()
        case |= named(step(module.train(), inputs, 104), "steps/4")
    torch.manual_seed(3)
    with torch.no_grad():
        _, aux = module.eval()(torch.ones(5, D))
    return case | named(aux.metrics(), "metrics")


def module_cases() -> Tensors:
    """Makes every layer; ctest compares bits."""
    return named({name: module_case(make) for name, make in LAYERS.items()}, "")


def autocast_case() -> Tensors:
    """Makes a step under autocast of a layer whose experts share x with a shared expert."""
    torch.manual_seed(5)
    module = layer(shared_expert=nn.Linear(D, D)).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.5)
    weights = named(module.state_dict(), "weights")
    with torch.autocast("cpu", torch.bfloat16):
        return weights | named(step(module, dict(x=torch.randn(24, D)), seed=0), "step")


def save_state_dicts(folder: Path) -> None:
    """Saves the weights of every layer as a user does."""
    for number, (name, make) in enumerate(LAYERS.items()):
        torch.manual_seed(number)
        torch.save(dict(make().state_dict()), folder / f"{name}.python.pt")
    torch.save(nn.Linear(2, 3).state_dict(), folder / "ordered.pt")  # a mistake
    writer = torch._C.PyTorchFileWriter(str(folder / "corrupted.pt"))
    pickle = b"\x80\x02}r\xff\xff\xff\x3f."  # LibTorch takes memory for 2^30 entries or more
    writer.write_record("data.pkl", pickle, len(pickle))
    writer.write_end_of_file()


class Sum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(0, keepdim=True)


class WiderExperts(moe_ext.Experts):
    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return x.new_zeros(len(x), x.shape[1] + 1)


def replay(expert_index: Tensor) -> None:
    MoE(8, 6, 2, gate=TopKGate(8, 6, 2))(torch.zeros(3, 8), expert_index=expert_index)


def step_with(gradient: Tensor) -> None:
    weight = nn.Parameter(torch.zeros(3, 3))
    weight.grad = gradient
    FactoredAdam([weight]).step()


def module_errors() -> Tensors:
    """Makes the texts of the errors of errors_test.cpp, where the name of a call is Python code."""
    errors = {}
    for call in named_in("errors_test.cpp"):
        errors[call] = error_of(lambda call=call: evaluated(call))
        if errors[call] is None:
            raise RuntimeError(f"no error from {call}")
    return named(errors, "")


# The optimizer

OPTIONS = {
    "default": {},
    "mean_of_roots": dict(mean_of_roots=True, lr=0.1, eps=1e-3),
    "full": dict(factored=False, beta2=0.9),
}


def optimizer_cases() -> Tensors:
    """Makes five steps with each of OPTIONS: a stack of matrices, a bias and half precision."""
    cases = {}
    for name, options in OPTIONS.items():
        torch.manual_seed(1)
        shapes = [(3, 4, 5), (6,), (4, 3)]
        dtypes = [torch.float32, torch.float32, torch.bfloat16]
        weights = [
            nn.Parameter(torch.randn(shape).to(dtype))
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        case = named(weights, "weights")
        optimizer = FactoredAdam(weights, **options)
        for number in range(5):
            for weight in weights:
                weight.grad = torch.randn(weight.shape).to(weight.dtype)
            optimizer.step()
            grads = [weight.grad for weight in weights]
            case |= named(dict(gradients=grads, weights=weights), f"steps/{number}")
        cases[name] = case
    return named(cases, "")


FILES: dict[str, Callable[[], Tensors]] = {
    "operators": operator_cases,
    "modules": module_cases,
    "autocast": autocast_case,
    "module_errors": module_errors,
    "optimizer": optimizer_cases,
}


def check(folder: Path) -> None:
    """Loads the weights of every layer that C++ wrote; the output must be bitwise identical."""
    for name, make in LAYERS.items():
        layer = make().eval()
        layer.load_state_dict(torch.load(folder / f"{name}.cpp.pt", weights_only=True))
        result = torch.load(folder / f"{name}.result.pt", weights_only=True)
        with torch.no_grad():
            y, aux = layer(result["x"])
        assert_same_bits(result["y"], y)
        assert_same_bits(result["loss"], aux.loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if arguments.check:
        check(arguments.folder)
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, make in FILES.items():
        torch.save(make(), arguments.folder / f"{name}.pt")
    save_state_dicts(arguments.folder)


if __name__ == "__main__":
    main()
