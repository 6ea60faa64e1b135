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

Ctrl-C or SIGTERM saves a checkpoint after the current step. The command then prints how to
continue and ends with status 0. A second Ctrl-C ends it at once with status 130 and keeps the last
checkpoint. Status 1: training diverged. Status 2: an option, file or folder is invalid; stderr says
which.
"""

from collections.abc import Sequence

from moe_lab.cli import CONFIG, OVERRIDES, parse


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    options = parse(__doc__, {"config": {"help": CONFIG}, **OVERRIDES}, arguments)

    from moe_lab.training.config import read_config
    from moe_lab.training.device import set_up_for
    from moe_lab.training.folder import RunFolder
    from moe_lab.training.launch import process_group_of_run
    from moe_lab.training.text import load_text

    config = read_config(options.config, options.overrides)
    with process_group_of_run(config) as (config, process_group):
        set_up_for(config)
        RunFolder(config)  # an error of the folder comes before the text is encoded
        text = load_text(config.data)

        from moe_lab.commands._train import train
        from moe_lab.training.loop import make_trainer  # imports FSDP, which takes a second

        train(make_trainer(config, text, process_group))
