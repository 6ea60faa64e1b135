"""Which checkpoints a folder has: of other runs, saved in the background, after a crash."""

import contextlib
import itertools
import os
import resource
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from checkpoint_model import Model, assert_same_contents, contents, optimizers_of, train
from one_process import files_in
from torch import nn
from workers import on_ranks

from moe_ext.distributed import CheckpointError, Checkpoints, Ranks


def test_checkpoints_of_an_abandoned_run_do_not_come_back(tmp_path):
    model, checkpoints = nn.Linear(1, 1), Checkpoints(tmp_path, keep=9)
    for step in range(1, 6):
        checkpoints.save(step, model)
    checkpoints.load(step=3)  # only looks at the other state
    checkpoints.load(model, step=2)
    assert checkpoints.steps() == [1, 2, 3, 4, 5]
    checkpoints.save(6, model)
    assert checkpoints.steps() == [1, 2, 6]
    checkpoints.save(7, model)
    assert checkpoints.steps() == [1, 2, 6, 7]


@on_ranks(2)
def test_a_new_run_does_not_delete_later_checkpoints(group, rank, tmp_path):
    model = nn.Linear(1, 1)
    Checkpoints(tmp_path, group).save(100, model)
    dist.barrier()
    checkpoints = Checkpoints(tmp_path, group)
    checkpoints.load()  # only looks at the other state
    message = (
        rf"step must be at least 100, the newest step in {tmp_path}, unless .*, got 50 \(rank 0"
    )
    with pytest.raises(CheckpointError, match=message):
        checkpoints.save(50, model)
    checkpoints.async_save(60, model)
    with pytest.raises(CheckpointError, match="got 60"):
        checkpoints.wait()
    assert checkpoints.steps() == [100]
    checkpoints.load(model)
    checkpoints.save(50, model)  # goes back
    assert checkpoints.steps() == [50]


def test_a_damaged_latest_hides_no_checkpoint(tmp_path):
    model, checkpoints = nn.Linear(1, 1), Checkpoints(tmp_path)
    for step in (1, 3):
        checkpoints.save(step, model)
    latest = tmp_path / "latest"
    content = latest.read_bytes()
    for number in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[number // 8] ^= 1 << number % 8
        latest.write_bytes(flipped)
        assert checkpoints.steps() == [1, 3]
    latest.write_text("step-00000001\n")  # of an earlier version
    assert checkpoints.steps() == [1]


def test_which_checkpoints_there_are(tmp_path):
    model = nn.Linear(2, 2)
    checkpoints = Checkpoints(tmp_path, keep=2)
    entries = lambda: files_in(tmp_path)  # noqa: E731
    assert checkpoints.steps() == []
    for step in (0, 1):
        nn.init.constant_(model.weight, step)
        checkpoints.save(step, model)
    assert checkpoints.load(model, step=0).step == 0 == model.weight[0, 0]
    for step in (2, 3):
        nn.init.constant_(model.weight, step)
        checkpoints.save(step, model)
    assert entries() == ["latest", "step-00000002", "step-00000003"]
    assert (tmp_path / "latest").read_text() == "step-00000003\nstep-00000003\n"

    nn.init.constant_(model.weight, 30)
    checkpoints.save(3, model)  # replaces step 3
    checkpoints.load(model)
    assert model.weight[0, 0] == 30 and checkpoints.steps() == [2, 3]

    # A crash leaves an unpublished folder, a replaced one and a partly deleted one.
    shutil.copytree(tmp_path / "step-00000003", tmp_path / ".step-00000004")
    shutil.copytree(tmp_path / "step-00000003", tmp_path / "step-00000004")
    (tmp_path / "step-00000003").rename(tmp_path / "step-00000003.old")
    (tmp_path / ".step-00000001.deleted").mkdir()
    (tmp_path / ".latest.abcd").touch()
    (tmp_path / "notes.txt").touch()
    assert checkpoints.load(model).step == 3
    assert checkpoints.steps() == [2, 3]
    checkpoints.save(3, model)
    assert entries() == ["latest", "notes.txt", "step-00000002", "step-00000003"]


def test_saved_in_the_background(tmp_path):
    model = Model()
    optimizers = optimizers_of("adam", model)
    state = {"random": torch.get_rng_state()}
    now, later = Checkpoints(tmp_path / "now"), Checkpoints(tmp_path / "later")
    train(model, optimizers, None, 0, [1, 2])
    now.save(2, model, optimizers, state)
    later.async_save(2, model, optimizers, state)
    state["random"].zero_()
    train(model, optimizers, None, 0, [3])  # while the thread writes
    later.async_save(3, model, optimizers)
    later.wait()
    assert later.steps() == [2, 3]
    assert_same_contents(contents(tmp_path / "later"), contents(tmp_path / "now"))
    assert torch.equal(later.load(step=2).state["random"], torch.get_rng_state())


@on_ranks(4)
def test_a_rank_that_cannot_write_fails_all(group, rank, tmp_path):
    """Rank 1 cannot write more than 1,000 bytes to a file."""
    model = Model(group)
    checkpoints = Checkpoints(tmp_path, group)
    checkpoints.async_save(1, model, (), {"tokens": 1})
    checkpoints.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    errors = []
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(CheckpointError) as raised:
            checkpoints.save(2, model)
        errors.append(str(raised.value))
        checkpoints.async_save(3, model)
        with pytest.raises(CheckpointError) as raised:
            checkpoints.async_save(4, model)
        errors.append(str(raised.value))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if rank == 0:
        assert not any(name[0] == "." for name in files_in(tmp_path))
    assert checkpoints.load(model).state == {"tokens": 1}
    checkpoints.save(5, model)
    assert checkpoints.steps() == [1, 5]
    assert Ranks(group).gather_objects(errors) == [errors] * 4
    for step, error in zip((2, 3), errors, strict=True):
        assert f"saving step {step} in {tmp_path}: " in error and "(rank 1)" in error
        assert "File too large" in error


class Crash(BaseException):
    pass


def crash_after(patch, number):
    """Raises `Crash` at every change of files and folders after the first `number` changes."""
    calls = itertools.count()

    def counted(change):
        def call(*args, **options):
            if next(calls) >= number:
                raise Crash
            return change(*args, **options)

        return call

    for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync"):
        patch.setattr(os, name, counted(getattr(os, name)))


@pytest.mark.guarantee("Crashes do not corrupt checkpoints")
@pytest.mark.parametrize("step", [1, 2], ids=["replaced", "next"])
def test_a_crash_between_any_changes_of_the_folder(tmp_path, step):
    model = nn.Linear(2, 2)
    for number in itertools.count():
        checkpoints = Checkpoints(tmp_path / str(number), keep=1)
        nn.init.constant_(model.weight, 1)
        checkpoints.save(1, model)
        nn.init.constant_(model.weight, 2)
        finished = False
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Crash):
            crash_after(patch, number)
            checkpoints.save(step, model)
            finished = True
        loaded = checkpoints.load(model).step, model.weight[0, 0]
        assert loaded == (step, 2) or (not finished and loaded == (1, 1))
        checkpoints.save(3, model)
        assert files_in(tmp_path / str(number)) == ["latest", "step-00000003"]
        if finished:
            break
    assert number > 15


FAILS_TO_SAVE = """
import sys, torch
from moe_ext.distributed import Checkpoints

Checkpoints(sys.argv[1]).async_save(1, torch.nn.Linear(2, 2))
"""


def test_the_error_of_an_unawaited_save_is_printed_at_exit(tmp_path):
    (folder := tmp_path / "no folder").touch()
    command = [sys.executable, "-c", FAILS_TO_SAVE, folder]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120, env=environ)
    assert f"CheckpointError: saving step 1 in {folder}" in done.stderr
