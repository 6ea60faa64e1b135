"""The work of ``moe-lab train``: runs a trainer, and prints its sizes and its result."""

import torch

from moe_lab.analysis.costs import cost
from moe_lab.data import EncodedPairs, PairBatches
from moe_lab.training.logging import read_metrics
from moe_lab.training.loop import Trainer
from moe_lab.training.model import make_model


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
