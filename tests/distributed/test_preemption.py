"""SIGTERM: the script of the guide saves a checkpoint on all ranks before it ends."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from workers import on_ranks

import moe_ext.distributed
from moe_ext.distributed import Checkpoints

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "checkpoints.md"


@on_ranks(2)
def test_sigterm_saves_on_all_ranks(group, rank, tmp_path):
    """Only rank 1 gets the signal, in the third of ten steps. The next start continues."""
    script = re.search(r"<!-- file: train.py -->\n```python\n(.*?)```", PAGE.read_text(), re.S)[1]
    zero_grad, steps = torch.optim.Optimizer.zero_grad, []

    def zero_grad_and_signal(*arguments, **options):
        steps.append(1)
        if rank == 1 and len(steps) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        zero_grad(*arguments, **options)

    checkpoints = Checkpoints(tmp_path / "checkpoints", group)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            patch.setattr(moe_ext.distributed, "init_process_group", lambda *_: group)
            patch.setattr(torch.optim.Optimizer, "zero_grad", zero_grad_and_signal)
            exec(script, {})
            assert (len(steps), checkpoints.steps()) == (3, [3])
            exec(script, {})
            assert (len(steps), checkpoints.steps()) == (3 + 10, [3, 5, 10])
    finally:
        signal.signal(signal.SIGTERM, before)
