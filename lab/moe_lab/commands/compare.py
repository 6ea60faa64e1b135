"""Compares a MoE with a dense model of equal operations, or two settings, over paired seeds.

    moe-lab compare small/moe-32 data.corpus=path/to/text --seeds 1 2 3
    moe-lab compare small/moe-32 --seeds 1 2 3 --output runs/a steps=500
    moe-lab compare small/moe-32 optimizer.experts=factored_adam \\
        --against optimizer.experts=adam
    moe-lab compare small/moe-32 --at-once 2   # half of the threads for each

Both models of a seed see the same batches and dropout masks. They start from the same weights of
embedding, softmax and LSTMs. The dense model has one expert, k times as wide, for every token. With
--against, the second model is the first model with these options changed. The script writes
OUTPUT/comparison.md and .json.

--at-once N trains N runs at the same time. Each run has its own process with an equal share of the
threads. The measured words/s are then those of runs that share the processor. You can also start
the same command several times to share the runs. The last command to end reports all seeds.

Ctrl-C or SIGTERM saves the current runs. The script then ends with status 130 and without a report.
Run the same command again to continue the runs. Status 1: training diverged. Status 2: an option,
file or folder is invalid; stderr says which.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_lab.cli import add_overrides, add_seeds, at_least, make_parser
from moe_lab.errors import ConfigError
from moe_lab.experiments.comparison import (
    arm_titles,
    arms,
    comparison_page,
    comparison_report,
)
from moe_lab.experiments.report import write_report
from moe_lab.experiments.study import run_study, runs_at_once
from moe_lab.training.config import AnyConfig, read_config
from moe_lab.training.device import set_up_for
from moe_lab.training.text import load_text


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the command and returns its report."""
    parser = make_parser(__doc__)
    parser.add_argument("config", help="TOML file of a model with a MoE layer")
    add_overrides(parser)
    add_seeds(parser)
    parser.add_argument(
        "--against", nargs="+", metavar="key=value", help="options to change in the second model"
    )
    parser.add_argument("--output", help="folder of all runs (default: runs/NAME-compare)")
    parser.add_argument(
        "--at-once", type=at_least(1), default=1, help="number of concurrent runs (%(default)s)"
    )
    options = parser.parse_intermixed_args(arguments)
    changes = [*options.overrides, *(options.against or [])]
    if any(change.startswith("seed=") for change in changes):
        raise ConfigError("seed must be omitted; give --seeds instead")
    if len(set(options.seeds)) != len(options.seeds):
        raise ConfigError(f"--seeds must be distinct, got {options.seeds}")

    def with_changes(*changes: str) -> AnyConfig:
        seed = f"seed={options.seeds[0]}"
        return read_config(options.config, [*options.overrides, *changes, seed])

    config = with_changes()
    against = with_changes(*options.against) if options.against else None
    configs, at_once = runs_at_once(arms(config, against), options.at_once)
    output = Path(options.output or f"{config.output}-compare")
    set_up_for(config)
    text = load_text(config.data)
    results = run_study(configs, options.seeds, text, output, at_once=at_once)
    report = {"models": arm_titles(config, against), **comparison_report(results, text)}
    page = comparison_page(report, config)
    write_report(output, "comparison", page, report)
    return report
