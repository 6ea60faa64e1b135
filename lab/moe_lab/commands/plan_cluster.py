"""Computes the memory, network traffic, step time and efficiency of a language model on a cluster.

    moe-lab plan-cluster small/moe-32 --devices 1 2 4 --device a100
    moe-lab plan-cluster small/moe-32 model.moe.num_experts=64 \\
        --devices 8 --device h200 link=450e9 memory=140e9 --exchange tokens

The next command plans the largest model of the paper, 131,072 experts on 128 K40s (App. D). It also
adds experts in proportion to devices, up to a trillion parameters (Sec. 3.1). Memory, traffic and
time for each device stay about the same:

    moe-lab plan-cluster news/moe-131072-h data.tokens_per_batch=19531 \\
        --devices 128 256 512 1024 --device k40 --weak

Arguments after the configuration are overrides, as in `moe-lab train`. data.tokens_per_batch is
the number of tokens for each device. With --weak, the configuration's numbers of experts and groups
are for the first value of --devices and grow in proportion to the devices. In a hierarchical
mixture, each device holds the secondary gates of its own groups, as in the paper. With --placement
experts, every device holds a replica of all secondary gates. With 1,024 devices, these replicas
need more memory than the rest of the model. A device is a preset, a set of values, or a preset with
some values replaced. lab/moe_lab/analysis/devices.py has the presets and their sources.
lab/moe_lab/analysis/cluster.py says which numbers are estimates.

    memory       GB by use, on the device with the most experts; "fits": the device has this memory
    wire         MB that a device sends in a step, for the experts and for the dense gradients
    intensity    an expert's flops per byte that its rows send, and the device's flops per byte of
                 its link; if the first is larger, forward computing takes longer than sending
    step         ms, two values: without overlap, compute + network + optimizer; with complete
                 overlap, max(compute, network) + optimizer
    efficiency   step time without network, divided by the step time; two values as above
    share of peak  flops of the model in a step, divided by the flops that the device can do in this
                 time; two values as above
    expected     with --efficiency: the step without overlap, if GEMMs reach a part of the peak.
                 dense=0.5 is the part outside the experts, experts=0.7 half_rows=1000 that of an
                 expert: half of 0.7 with 1,000 rows. "paper" has the values that are fitted to the
                 15 mixtures of Tables 7 and 8 on k40. Values for other devices are assumptions
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from moe_lab.cli import CONFIG, OVERRIDES, Option, at_least, flag, one, parse, several
from moe_lab.errors import ConfigError

EXCHANGES, PLACEMENTS = ("rows", "tokens"), ("experts", "groups")  # of moe_ext.distributed


OPTIONS: dict[str, Option] = {
    "config": {"type": Path, "help": f"{CONFIG}, of a language model"},
    **OVERRIDES,
    "--devices": several(at_least(1), [1, 2, 4], "numbers of devices"),
    "--device": several(str, ["a100"], "a preset, values, or both") | {"metavar": "NAME|key=value"},
    "--exchange": {"choices": EXCHANGES, "default": "rows", "help": "what the all-to-all sends"},
    "--placement": {"choices": PLACEMENTS, "help": "what a device owns: experts, or groups with "
                                                   "their gates (default: groups if any)"},
    "--efficiency": several(str, None, "also print an expected step: efficiency of GEMMs outside "
                                       "and in the experts") | {"metavar": "paper|key=value"},
    "--weak": flag("grow the experts in proportion to the devices"),
    "--json": one(Path, None, "also write the cluster plans to this file"),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    args = parse(__doc__, OPTIONS, arguments)

    from moe_lab.analysis.cluster import plan
    from moe_lab.commands._plan_cluster import grown, parse_device, parse_efficiency, table
    from moe_lab.files import write_json
    from moe_lab.training.config import Config, read_config

    config = read_config(args.config, args.overrides, Config)
    device = parse_device(args.device)
    efficiency = None if args.efficiency is None else parse_efficiency(args.efficiency)
    plans = []
    for number in args.devices:
        if args.weak and number % args.devices[0]:
            raise ConfigError(
                f"--devices must be multiples of the first value with --weak, got {number}"
            )
        scaled = grown(config, number // args.devices[0]) if args.weak else config
        options = {name: getattr(args, name) for name in ("exchange", "placement")}
        plans.append(plan(scaled, device, number, **options))
    values = ", ".join(f"{name} {value:.4g}" for name, value in asdict(device).items())
    print(f"{args.config}, device: {values}\n\n{table(plans, device, efficiency)}")
    if args.json:
        write_json(args.json, {"device": asdict(device), "plans": [asdict(p) for p in plans]})
