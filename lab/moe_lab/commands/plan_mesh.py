"""Estimates the days that a transformer with mixtures trains on a mesh of accelerators.

    moe-lab plan-mesh kimi-k2 --devices 1024 --device h200
    moe-lab plan-mesh deepseek-v3 --devices 256 --device gb300 --mesh pp=2 ep=32

Lists the fastest meshes that fit, by the estimate of lab/moe_lab/analysis/mesh.py, which names its
limits. lab/moe_lab/analysis/devices.py has the sources of the accelerators' rates. A mesh has pp
stages of a pipeline, tp devices that split matrices, dp replicas of the dense parameters, ep shards
of the experts and efsdp replicas of each.

    options      sequences in a micro-batch; vp parts of a stage; FSDP: weights and gradients are
                 sharded over replicas too; recompute: backward recomputes each layer
    memory       GB of a device; a tenth of its memory stays free
    days         for all tokens, if no transfer overlaps with computation; then, if all transfers do
    bottleneck   what takes the largest part of a step
"""

from collections.abc import Sequence
from dataclasses import asdict

from moe_lab.analysis.devices import ACCELERATORS
from moe_lab.cli import Option, at_least, one, parse, positive, several
from moe_lab.errors import ConfigError

MODELS = ("gpt-oss-120b", "qwen3-235b", "deepseek-v3", "kimi-k2")
TRANSFERS = ("all-to-all", "tensor parallel", "stages", "replicas")

OPTIONS: dict[str, Option] = {
    "model": {"choices": MODELS, "help": "a model with public sizes"},
    "--device": {"choices": [*ACCELERATORS], "default": "h200", "help": "the kind of accelerator"},
    "--devices": one(at_least(1), 1024, "number of accelerators"),
    "--tokens": one(positive(), 1e12, "number of tokens to train on"),
    "--batch": one(at_least(1), 4096, "number of sequences in a step"),
    "--length": one(at_least(1), 4096, "number of tokens in a sequence"),
    "--imbalance": one(positive(), 1.1, "rows of the busiest experts, divided by the mean"),
    "--mesh": several(str, [], "only meshes with these sizes") | {"metavar": "key=value"},
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    args = parse(__doc__, OPTIONS, arguments)

    from moe_lab.analysis.mesh import TRANSFORMERS, Mesh, Step, estimate, meshes
    from moe_lab.markdown import markdown_table

    model, device = TRANSFORMERS[args.model], ACCELERATORS[args.device]
    wanted = dict(word.partition("=")[::2] for word in args.mesh)
    tokens = args.batch * args.length
    flops = 3 * tokens * sum(model.flops(args.length))  # without recomputing
    best_of_place: dict[tuple[int, ...], tuple[Step, Mesh]] = {}
    for mesh in meshes(model, device, args.devices, args.batch):
        sizes = asdict(mesh) | {"efsdp": mesh.efsdp}
        if any(key not in sizes or str(int(sizes[key])) != wanted[key] for key in wanted):
            continue
        step = estimate(model, device, mesh, tokens, args.length, args.imbalance)
        place = mesh.pp, mesh.tp, mesh.dp, mesh.ep
        fits = step.memory <= 0.9 * device.memory
        if fits and (place not in best_of_place or step.total < best_of_place[place][0].total):
            best_of_place[place] = step, mesh
    if not best_of_place:
        raise ConfigError("--mesh, --devices and --batch must allow a mesh that fits, got none")

    def row(step: Step, mesh: Mesh) -> list[str]:
        used = f"micro-batch {mesh.sequences}, vp {mesh.vp}"
        used += ", FSDP" * mesh.sharded + ", recompute" * mesh.recompute
        days = args.tokens / tokens / 86400
        hidden = sum(step.seconds[name] for name in TRANSFERS)
        largest = max(step.seconds, key=lambda name: step.seconds[name])
        return [
            *map(str, (mesh.pp, mesh.tp, mesh.dp, mesh.ep, mesh.efsdp)),
            used,
            f"{step.memory / 1e9:.0f}",
            f"{days * step.total:.1f} / {days * (step.total - hidden):.1f}",
            f"{24 * days * step.total * args.devices:,.0f}",
            f"{flops / step.total / args.devices / device.flops:.0%}",
            f"{largest}, {step.seconds[largest] / step.total:.0%}",
        ]

    best = sorted(best_of_place.values(), key=lambda pair: pair[0].total)[:5]
    header = ["pp", "tp", "dp", "ep", "efsdp", "options", "memory, GB", "days", "device-hours"]
    parameters = (model.dense + model.experts) / 1e9
    print(f"{args.model}: {parameters:,.0f} billion parameters, {args.devices} {args.device}\n")
    print(markdown_table([*header, "of the peak", "bottleneck"], [row(*pair) for pair in best]))
    first = best[0][0]
    parts = sorted(first.seconds.items(), key=lambda part: -part[1])
    shares = ", ".join(f"{name} {seconds / first.total:.0%}" for name, seconds in parts)
    print(f"A step of the first mesh takes {first.total:.2f} s: {shares}.")
