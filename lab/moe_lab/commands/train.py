"""Trains a language model or a translation model.

    moe-lab train small/moe-32
    moe-lab train small/moe-32 steps=500 model.moe.k=2 output=runs/k2
    moe-lab train runs/k2/config.toml resume=true            # continue an interrupted run
    moe-lab train small/moe-32 autocast=bfloat16 num_threads=1
    moe-lab train mt/small-moe-32 data.corpus=path/to/parallel/text
    torchrun --standalone --nproc-per-node=2 -m moe_lab train small/moe-32
    torchrun --standalone --nproc-per-node=2 --max-restarts=3 -m moe_lab train CONFIG timeout=60

Under torchrun, the ranks share the experts and the rows of each batch. A run can continue with
another number of ranks. If a rank dies, torchrun ends the others. With --max-restarts, torchrun
then restarts all ranks from the last checkpoint. A hanging rank is detected after `timeout`
seconds.

The options are dotted keys of lab/moe_lab/training/config.py and of the model classes in
lab/moe_lab/models. The config.toml of a run lists all of them. The run's folder is output=FOLDER
(default: runs/NAME for NAME.toml). The run writes checkpoints, metrics.jsonl and TensorBoard events
to this folder. View the events with `tensorboard --logdir runs`.

Ctrl-C or SIGTERM saves a checkpoint after the current step. The script then prints how to continue
and ends with status 0. A second Ctrl-C ends the script at once with status 130 and keeps the last
checkpoint. Status 1: training diverged. Status 2: an option, file or folder is invalid; stderr says
which.
"""

from collections.abc import Sequence

import torch

from moe_lab.analysis import cost
from moe_lab.cli import add_overrides, make_parser
from moe_lab.data import EncodedPairs, PairBatches
from moe_lab.training.config import read_config
from moe_lab.training.launch import process_group_of_run
from moe_lab.training.logging import read_metrics
from moe_lab.training.loop import Trainer
from moe_lab.training.model import make_model


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = make_parser(__doc__)
    parser.add_argument("config", help="a TOML file, or a name such as small/moe-32")
    add_overrides(parser)
    options = parser.parse_args(arguments)

    config = read_config(options.config, options.overrides)
    with process_group_of_run(config) as (config, process_group):
        train(Trainer(config, process_group=process_group))


def train(trainer: Trainer) -> None:
    """Trains to the last step or to an interruption; rank 0 prints sizes and the result."""
    if trainer.ranks.rank > 0:
        trainer.run()
        return
    with torch.device("meta"):  # a trainer's own model has only the experts of its rank
        whole = make_model(trainer.config.model, len(trainer.text.vocabulary))
    print(f"model   {cost(whole)}")
    text = trainer.text
    if isinstance(text.train, EncodedPairs):
        for line in text.train.report().splitlines():
            print(f"data    {line}")
    if isinstance(trainer.batches, PairBatches) and trainer.batches.num_left_out:
        print(f"data    {trainer.batches.num_left_out:,} pairs longer than max_length are left out")
    print(
        f"data    {len(text.vocabulary):,} entries in the vocabulary, "
        f"{trainer.batches.num_tokens:,} training tokens, {trainer.batches.num_batches:,} batches"
    )
    if trainer.step:
        print(f"resume  from step {trainer.step} of {trainer.config.steps}")
    if trainer.run():
        measured = read_metrics(trainer.folder, "dev")
        dev = f"dev perplexity {measured[-1]['perplexity']:.2f} after " if measured else ""
        print(f"done    {dev}{trainer.step} steps")
        print(f"next    moe-lab evaluate {trainer.folder}")
    else:
        print(
            f"stopped step {trainer.step} is saved; continue with "
            f"moe-lab train {trainer.folder / 'config.toml'} resume=true"
        )
