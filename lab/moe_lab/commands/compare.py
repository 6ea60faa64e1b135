"""Compares a MoE with a dense model of equal operations, or two settings, over paired seeds.

    moe-lab compare small/moe-32 data.corpus=path/to/text --seeds 1 2 3
    moe-lab compare small/moe-32 --seeds 1 2 3 --output runs/a steps=500
    moe-lab compare small/moe-32 optimizer.experts=factored_adam \\
        --against optimizer.experts=adam
    moe-lab compare small/moe-32 --report

Both models of a seed see the same batches and dropout masks. They start from the same weights of
embedding, softmax and LSTMs. The dense model has one expert, k times as wide, for every token. With
--against, the second model is the first model with these options changed. The file
OUTPUT/comparison.json keeps every finished run. The command also writes OUTPUT/comparison.md;
--report writes it from the file, without runs and without the corpus.

To train several runs at the same time, start the same command several times: the commands share the
runs. The last command to end reports all seeds.

Ctrl-C or SIGTERM saves the current run. The command then ends with status 130 and without a
report. Run the same command again to continue the run. Status 1: training diverged. Status 2: an
option, file or folder is invalid; stderr says which.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_lab.cli import CONFIG, OVERRIDES, REPORT, SEEDS, Option, parse, several
from moe_lab.errors import ConfigError

OPTIONS: dict[str, Option] = {
    "config": {"help": CONFIG},
    **(OVERRIDES | SEEDS),
    "--against": several(str, [], "options to change in the second model")
    | {"metavar": "key=value"},
    "--output": {"help": "folder of all runs (default: runs/NAME-compare)"},
    **REPORT,
}


def main(arguments: Sequence[str] | None = None) -> Any:
    """Runs the command and returns the stored runs."""
    options = parse(__doc__, OPTIONS, arguments)
    if any(change.startswith("seed=") for change in [*options.overrides, *options.against]):
        raise ConfigError("seed must be omitted; give --seeds instead")
    if len(set(options.seeds)) != len(options.seeds):
        raise ConfigError(f"--seeds must be distinct, got {options.seeds}")

    from moe_lab.experiments.comparison import Comparison
    from moe_lab.training.config import read_config

    options.name = "comparison"
    output = read_config(options.config, options.overrides).output
    options.output = Path(options.output or f"{output}-compare")
    return Comparison(options).main()
