"""Checkpoints in folders that are not shared, show files late, are in use or cannot be locked."""

import errno
import gc
import itertools
import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from one_process import files_in
from torch import nn
from workers import on_ranks

import moe_ext.distributed.checkpoint
from moe_ext import MoE
from moe_ext.distributed import CheckpointError, Checkpoints
from moe_ext.distributed import _checkpoint_folder as checkpoint_folder

NEVER = 0.1  # seconds; what a rank does not see after this time, it never sees


@on_ranks(2)
def test_a_folder_that_is_not_shared(group, rank, tmp_path):
    """Each machine writes to its own disk, where one has the files of another save."""
    model, checkpoints = nn.Linear(2, 2), Checkpoints(tmp_path / f"disk {rank}", group)
    if rank == 1:
        left = checkpoints._folder.temporary(1)
        left.mkdir(parents=True)
        (left / "SHA256SUMS").write_text("of another save")
    message = rf"{tmp_path}/disk 1 must be a folder that all ranks share; .* \(rank 1\)$"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_folder, "PATIENCE", NEVER)
        with pytest.raises(CheckpointError, match=message):
            checkpoints.save(1, model)
        checkpoints.async_save(2, model)
        with pytest.raises(CheckpointError, match=message):
            checkpoints.wait()
    assert checkpoints.steps() == []


@on_ranks(2)
def test_a_file_system_that_shows_files_late(group, rank, tmp_path):
    """Rank 1 sees each file of rank 0 at its third look only."""
    reads, looks = checkpoint_folder._reads, itertools.count()

    def reads_late(path, text):
        return reads(path, text) and (rank == 0 or next(looks) % 3 == 2)

    checkpoints = Checkpoints(tmp_path, group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_folder, "_reads", reads_late)
        checkpoints.save(1, nn.Linear(2, 2))
    assert rank == 0 or next(looks) == 6
    assert checkpoints.load().step == 1


@on_ranks(2)
def test_a_file_that_another_rank_does_not_see(group, rank, tmp_path):
    model, checkpoints = nn.Linear(2, 2), Checkpoints(tmp_path, group)
    reads, write_files = checkpoint_folder._reads, moe_ext.distributed.checkpoint._write_files
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_folder, "PATIENCE", NEVER)
        with patch.context() as inner:
            name = "_write_files"
            lost = lambda *arguments: write_files(*arguments) | {f"rank-{rank}.pt": "0"}  # noqa: E731
            inner.setattr(moe_ext.distributed.checkpoint, name, lost)
            message = r"step-00000001 must have .* does not see rank-0.pt, rank-1.pt \(rank 0\)$"
            with pytest.raises(CheckpointError, match=message):
                checkpoints.save(1, model)
        assert checkpoints.steps() == []
        unseen = lambda path, text: reads(path, text) and (rank == 0 or path.name != "latest")  # noqa: E731
        patch.setattr(checkpoint_folder, "_reads", unseen)
        with pytest.raises(
            CheckpointError, match=r"latest must name step-00000002; .* \(rank 1\)$"
        ):
            checkpoints.save(2, model)


@on_ranks(2)
def test_the_process_group_is_destroyed_before_the_save_has_ended(group, rank, tmp_path):
    """Without a group, torch saves on each rank as if it were alone."""
    model, checkpoints = MoE(4, 4, 2, process_group=group), Checkpoints(tmp_path, group)
    checkpoints.save(1, model)
    destroyed = threading.Event()
    write_tensors = moe_ext.distributed.checkpoint._write_tensors

    def write_late(*arguments):
        destroyed.wait()
        write_tensors(*arguments)

    message = r"process_group must exist until the save has ended \(call wait before destroy_proc"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe_ext.distributed.checkpoint, "_write_tensors", write_late)
        checkpoints.async_save(2, model)
        dist.destroy_process_group()
        destroyed.set()
        with pytest.raises(CheckpointError, match=message):
            checkpoints.wait()
    with pytest.raises(CheckpointError, match=message):
        checkpoints.save(3, model)
    assert checkpoints.steps() == [1]
    place = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2)  # for `workers`


def refuse(patch, owner, name, refused, number):
    """Makes a function of owner raise OSError(number) for the arguments that refused accepts."""
    function = getattr(owner, name)

    def call(*arguments, **options):
        if refused(*arguments):
            raise OSError(number, os.strerror(number))
        return function(*arguments, **options)

    patch.setattr(owner, name, call)


def test_files_that_cannot_be_deleted(tmp_path):
    """Another program reads an old checkpoint: the save succeeds, a later one deletes the files."""
    model, checkpoints = nn.Linear(2, 2), Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, model)
    is_hidden = lambda path, *_: path.name.endswith(".deleted")  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        refuse(patch, shutil, "rmtree", is_hidden, errno.ENOTEMPTY)
        with pytest.warns(UserWarning, match=r"step-00000001\..*\.deleted cannot be deleted: Dir"):
            checkpoints.save(2, model)
        checkpoints.load(model)
        with pytest.warns(UserWarning, match="the next save tries again"):
            checkpoints.save(1, model)  # the name of the files that could not be deleted
        assert checkpoints.steps() == [1]
    with pytest.MonkeyPatch.context() as patch:
        refuse(patch, Path, "rename", lambda _, to: is_hidden(to), errno.EACCES)
        with pytest.warns(UserWarning, match="step-00000001 cannot be renamed: Permission denied"):
            checkpoints.save(2, model)
        assert checkpoints.steps() == [1, 2]
    checkpoints.save(3, model)
    assert files_in(tmp_path) == ["latest", "step-00000003"]


def test_a_checkpoint_that_is_a_link(tmp_path, recwarn):
    """The user moved it to another disk: only the link is deleted."""
    model, checkpoints = nn.Linear(2, 2), Checkpoints(tmp_path / "run", keep=1)
    checkpoints.save(1, model)
    link, elsewhere = tmp_path / "run" / "step-00000001", tmp_path / "elsewhere"
    shutil.move(link, elsewhere)
    link.symlink_to(elsewhere)
    assert checkpoints.load(model).step == 1
    checkpoints.save(2, model)
    assert not recwarn.list
    assert files_in(tmp_path / "run") == ["latest", "step-00000002"]
    assert (elsewhere / "state.pt").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", Mock(side_effect=OSError("no strerror")))
        with pytest.warns(UserWarning, match="cannot be deleted: no strerror; the next save"):
            checkpoints.save(3, model)


def test_an_interrupted_save_that_cannot_be_deleted(tmp_path):
    """Its files do not get into the checkpoint of the same step."""
    model, checkpoints = nn.Linear(2, 2), Checkpoints(tmp_path)
    left = checkpoints._folder.temporary(1)
    left.mkdir(parents=True)
    (left / "__7_0.distcp").touch()
    with pytest.MonkeyPatch.context() as patch:
        refuse(patch, shutil, "rmtree", lambda *_: True, errno.EBUSY)
        with pytest.warns(UserWarning, match="cannot be deleted: Device or resource busy"):
            checkpoints.save(1, model)
    assert checkpoints.load(model).step == 1


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_folders_that_cannot_be_synced(tmp_path, monkeypatch, number):
    """Some file systems do not have fsync of a folder; an error of a disk is an error."""
    refuse(monkeypatch, os, "fsync", lambda handle: stat.S_ISDIR(os.fstat(handle).st_mode), number)
    model, checkpoints = nn.Linear(2, 2), Checkpoints(tmp_path)
    if number == errno.EIO:
        with pytest.raises(CheckpointError, match="Input/output error"):
            checkpoints.save(1, model)
    else:
        checkpoints.save(1, model)
        assert checkpoints.load(model).step == 1


HOLDS_THE_LOCK = """
import fcntl, sys
with open(sys.argv[1], "w") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    file.write("process 7 on host0")
    file.flush()
    print(flush=True)
    sys.stdin.read()
"""


def test_two_runs_in_one_folder(tmp_path, monkeypatch):
    """The second one would delete the checkpoints of the first, as those of an abandoned run."""
    model, checkpoints = nn.Linear(2, 2), Checkpoints(tmp_path)
    command = [sys.executable, "-c", HOLDS_THE_LOCK, tmp_path / ".lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as second:
        second.stdout.readline()
        checkpoints._folder.temporary(1).mkdir()  # the other run saves the same step
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_folder, "PATIENCE", NEVER)
            with pytest.raises(
                CheckpointError, match=r"another run saves in .*: process 7 on host0"
            ):
                checkpoints.save(1, model)
        assert checkpoints._folder.temporary(1).exists()
        threading.Timer(0.2, second.stdin.close).start()  # as a run that is about to end
        checkpoints.save(1, model)
    assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    assert Checkpoints(tmp_path).load(model).step == 1  # without the lock
    del checkpoints
    gc.collect()
    subprocess.run(command, stdin=subprocess.DEVNULL, check=True, timeout=60)  # gets the lock


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    refuse(monkeypatch, checkpoint_folder.fcntl, "lockf", lambda *_: True, errno.ENOLCK)
    checkpoints = Checkpoints(tmp_path)
    with pytest.warns(UserWarning, match=r"\.lock cannot be locked \(No locks available\)"):
        checkpoints.save(1, nn.Linear(2, 2))
    checkpoints.save(2, nn.Linear(2, 2))  # warns once
    assert checkpoints.steps() == [1, 2]
