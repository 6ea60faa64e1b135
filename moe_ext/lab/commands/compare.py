"""MoE against a dense model of equal operations, or any two options, over paired seeds.

    python scripts/compare.py configs/small/moe-32.toml data.corpus=path/to/text --seeds 1 2 3
    python scripts/compare.py configs/small/moe-32.toml --seeds 1 2 3 --output runs/a steps=500
    python scripts/compare.py configs/small/moe-32.toml optimizer.experts=factored_adam \\
        --against optimizer.experts=adam
    python scripts/compare.py configs/small/moe-32.toml --at-once 2   # half of the threads for each

Both models of a seed see the same batches and dropout masks and start from the same embedding,
softmax and LSTMs. The dense one has one expert k times as wide, which every token uses. With
--against the second model is the first with these options changed. Writes OUTPUT/comparison.json
and OUTPUT/comparison.md.

With --at-once N the script trains N runs at the same time. Each has a process of its own with an
equal share of the threads, and the words/s are those of runs that share the processor. You can also
start the same command several times. The scripts then share the runs, and the last one to end has
all seeds in its report.

Ctrl-C or SIGTERM saves the runs in progress and ends the script with status 130, because there is
no report yet. The same command continues: finished runs are kept, the others resume. Status 1:
training diverged; 2: an option, file or folder that can't be used, in one sentence.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_ext.lab.training.command import add_overrides, at_least, make_parser
from moe_ext.lab.training.comparison import (
    arm_titles,
    arms,
    comparison_page,
    comparison_report,
)
from moe_ext.lab.training.config import AnyConfig, ConfigError, read_config
from moe_ext.lab.training.device import set_up_for
from moe_ext.lab.training.report import write_report
from moe_ext.lab.training.study import run_study, runs_at_once
from moe_ext.lab.training.text import load_text


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = make_parser(__doc__)
    parser.add_argument("config", help="a TOML file of a model with an MoE layer")
    add_overrides(parser)
    parser.add_argument("--seeds", type=at_least(0), nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--against", nargs="+", metavar="key=value", help="compare with these options changed"
    )
    parser.add_argument("--output", help="folder of all runs; runs/NAME-compare if not given")
    parser.add_argument(
        "--at-once", type=at_least(1), default=1, help="train this many runs at the same time"
    )
    options = parser.parse_intermixed_args(arguments)
    changes = [*options.overrides, *(options.against or [])]
    if any(change.startswith("seed=") for change in changes):
        raise ConfigError("seed must be given as --seeds")
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
