"""Trains a small MoE language model and its dense counterpart, and compares them.

    moe-lab quickstart             # 5 minutes on 2 cores
    moe-lab quickstart --quick     # seconds: tiny models, for a quick check

The models are configs/small/moe-64.toml with a width of 96, and its dense counterpart. Both learn
from the same batches of wordpieces with equal operations. The corpus is "sources": Python code, the
C++ headers of torch, and documentation. The models train at the same time, each in its own process
with half of the threads. On one core or on a GPU, they train in sequence.

Prints the test perplexity of both, the load balance of the experts, and the specialisation of three
experts. Writes the learning curves and the load of the experts to OUTPUT/quickstart.png, and the
results of both models to OUTPUT/quickstart.json.

After the runs are finished, the same command prints the report at once. Ctrl-C or SIGTERM saves
both models and ends the command with status 130; the same command continues the runs. Status 1:
training of a model diverged; the other model is saved. Status 2: an option, file or folder is
invalid; stderr says which.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_lab.cli import OVERRIDES, flag, parse

_SETTINGS = [
    "steps=1200",
    "data.corpus=sources",
    "data.kind=bpe",
    "data.vocab_size=2000",
    "model.d_model=96",
    "model.dropout=0.0",
    "model.moe.hidden_sizes=[192]",
    "log.log_every=20",
    "log.eval_every=200",
    "log.eval_sentences=1000",
]
_QUICK = [
    "steps=30",
    "data.vocab_size=1000",
    "data.max_train_sentences=3000",
    "data.tokens_per_batch=512",
    "model.d_model=32",
    "model.moe.num_experts=8",
    "model.moe.k=2",
    "model.moe.hidden_sizes=[32]",
    "optimizer.warmup_steps=10",
    "log.log_every=5",
    "log.eval_every=10",
    "log.eval_sentences=200",
]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the command and returns the runs by model."""
    quick, folder = "train tiny models for a few seconds", "runs/quickstart[-quick]"
    own = {"--quick": flag(quick), "--output": {"help": f"folder of the runs (default: {folder})"}}
    options = parse(__doc__, OVERRIDES | own, arguments)
    output = Path(options.output or f"runs/quickstart{'-quick' if options.quick else ''}")
    settings = [
        f"data.encoded={output / 'encoded'}",
        *_SETTINGS,
        *(_QUICK if options.quick else []),
    ]
    options.output, options.overrides = output, [*settings, *options.overrides]

    from moe_lab.commands._quickstart import train_and_report

    return train_and_report(options)
