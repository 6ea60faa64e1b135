"""Files of checkpoints that are corrupted, or changed by an attacker."""

import dataclasses
import io
import os
import pickle
import shutil
import subprocess
import tracemalloc

import pytest
import torch
from assertions import assert_same_bits
from checkpoint_model import Model, optimizers_of, train
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from moe_ext.distributed import CheckpointError, Checkpoints
from moe_ext.distributed._checkpoint_folder import sums_of
from moe_ext.distributed._safe_files import read_metadata


@pytest.fixture
def saved(tmp_path):
    """Returns a small model, its checkpoints and the folder of the only one."""
    model, checkpoints = nn.Linear(2, 2), Checkpoints(tmp_path / "there")
    checkpoints.save(1, model, (), {"tokens": 1}, {"rank": 0})
    return model, checkpoints, tmp_path / "there" / "step-00000001"


def flip_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def corrupted(group, rank, folder):
    model = Model(group, seed=7)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    checkpoints = Checkpoints(folder, group)
    with pytest.raises(CheckpointError) as raised:
        checkpoints.load(model)
    for name, value in model.state_dict().items():
        assert_same_bits(value, before[name])
    with pytest.warns(UserWarning, match="step-00000002/.*; .*loading .*step-00000001 instead"):
        loaded = checkpoints.load(model, fallback=True)
    assert loaded.step == checkpoints.load(model, step=1).step == 1
    return str(raised.value)


@pytest.mark.guarantee("Crashes do not corrupt checkpoints")
def test_corrupted_files_are_named(workers, tmp_path):
    model = Model()
    optimizers = optimizers_of("factored", model)
    checkpoints = Checkpoints(tmp_path / "good")
    for step in (1, 2):
        train(model, optimizers, None, 0, [step])
        checkpoints.save(step, model, optimizers, {"tokens": step}, [step])
    names = {path.name for path in (tmp_path / "good/step-00000002").iterdir()}
    assert names == {".metadata", "__0_0.distcp", "state.pt", "rank-0.pt", "SHA256SUMS"}
    subprocess.run(
        ["sha256sum", "--check", "--quiet", "SHA256SUMS"],
        cwd=tmp_path / "good/step-00000002",
        check=True,
    )
    for number, name in enumerate(sorted(names)):
        for how, corrupt in (("corrupted", flip_byte), ("No such file", os.unlink)):
            folder = tmp_path / f"{number} {how}"
            shutil.copytree(tmp_path / "good", folder)
            path = folder / "step-00000002" / name
            corrupt(path)
            message = corrupted(None, 0, folder)
            assert how in message and (str(path) in message or name == "SHA256SUMS")
            assert str(folder) in message
    *_, message = workers.run(3, corrupted, folder := tmp_path / "0 corrupted")
    assert f"{folder}/step-00000002/.metadata is corrupted" in message and "(rank " in message


def test_sums_cut_short_are_noticed(saved):
    model, checkpoints, folder = saved
    sums = folder / "SHA256SUMS"
    lines = sums.read_text().splitlines(keepends=True)
    for count in range(len(lines)):
        sums.write_text("".join(lines[:count]))
        with pytest.raises(CheckpointError, match="SHA256SUMS is corrupted: it has no checksum of"):
            checkpoints.load(model)


def test_a_flipped_bit_in_the_sums_is_noticed(saved):
    """Also if the file is no longer UTF-8, or the bit is in a name or a line end."""
    model, checkpoints, folder = saved
    sums = folder / "SHA256SUMS"
    content = sums.read_bytes()
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= (1, 32, 128)[position % 3]
        sums.write_bytes(flipped)
        with pytest.raises(CheckpointError, match="is corrupted: it"):
            checkpoints.load(model)
    sums.write_bytes(content)
    (folder.parent / "latest").write_bytes(b"\xb9")
    assert checkpoints.load(model).step == 1


class Runs:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def signed(folder):
    """Makes the checksums of a checkpoint valid again, as an attacker would."""
    names = [path.name for path in folder.iterdir() if path.name != "SHA256SUMS"]
    sums = sums_of(folder, names)
    (folder / "SHA256SUMS").write_text("".join(f"{sums[name]}  {name}\n" for name in names))


@pytest.mark.parametrize("cls", [_MEM_FORMAT_ENCODING, os])
def test_metadata_may_use_getattr_only_for_memory_formats(cls, monkeypatch, saved):
    """Python 3.11.0 to 3.11.3 write a member of an enumeration as getattr(class, name)."""
    folder = saved[-1]
    metadata = read_metadata(folder)
    reduced = getattr, (_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda *_: reduced)
    content = pickle.dumps(metadata, protocol=3)  # names as texts
    assert b"getattr" in content
    if cls is os:
        named = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
        content = content.replace(named, b"ctorch\nSize\n")
    (folder / ".metadata").write_bytes(content)
    if cls is os:
        with pytest.raises(ValueError, match="must not name an attribute of"):
            read_metadata(folder)
    else:
        assert read_metadata(folder) == metadata


def write_metadata(folder, metadata):
    content = metadata if isinstance(metadata, bytes) else pickle.dumps(metadata)
    (folder / ".metadata").write_bytes(content)
    signed(folder)


def code_in(name):
    """Replaces a file, or what the checkpoint holds for a tensor or a number, by code."""

    def tamper(folder, ran):
        if name.startswith("."):
            return write_metadata(folder, Runs(ran))
        if name.endswith(".pt"):
            torch.save(Runs(ran), folder / name)
            return signed(folder)
        metadata = read_metadata(folder)
        places = metadata.storage_data
        (index,) = (index for index in places if index.fqn.split(".")[-1] == name)
        path = folder / places[index].relative_path
        begin = path.stat().st_size
        with path.open("ab") as file:
            torch.save(Runs(ran), content := io.BytesIO())
            file.write(content.getvalue())
        length = path.stat().st_size - begin
        places[index] = dataclasses.replace(places[index], offset=begin, length=length)
        return write_metadata(folder, metadata)

    return tamper


def path_in_metadata(path):
    def tamper(folder, ran):
        metadata = read_metadata(folder)
        for index, place in metadata.storage_data.items():
            metadata.storage_data[index] = dataclasses.replace(place, relative_path=path)
        write_metadata(folder, metadata)

    return tamper


def path_in_sums(path):
    def tamper(folder, ran):
        sums = (folder / "SHA256SUMS").read_text()
        (folder / "SHA256SUMS").write_text(f"{sums}{sums.partition(' ')[0]}  {path}\n")

    return tamper


def link(name):
    def tamper(folder, ran):
        (folder / name).rename(folder.parent / "other")
        (folder / name).symlink_to(folder.parent / "other")

    return tamper


CHANGES_A_CLASS = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n}X\x01\0\0\0aNsb."
ASKS_FOR_MEMORY = pickle.PROTO + b"\x05" + pickle.BYTEARRAY8 + (2**28).to_bytes(8, "little") + b"."
OUTSIDE = ["../../other", "/tmp/other", "..", "a/../../../other"]
TAMPERED = [
    *((code_in(name), "mkdir") for name in (".metadata", "state.pt", "rank-0.pt")),
    *((code_in(name), "mkdir") for name in ("weight", "step")),
    (lambda folder, _: write_metadata(folder, CHANGES_A_CLASS), "must not change a class"),
    (lambda folder, _: write_metadata(folder, ASKS_FOR_MEMORY), "must hold the metadata of a"),
    *((path_in_metadata(path), r"\.metadata must .*: it must name files") for path in OUTSIDE),
    *((path_in_sums(path), "SHA256SUMS is corrupted: it must name files") for path in OUTSIDE),
    *(
        (link(name), f"{name} must be a regular file, got a link")
        for name in (".metadata", "state.pt", "__0_0.distcp")
    ),
]


@pytest.mark.parametrize("tamper, message", TAMPERED)
def test_hostile_checkpoints(tmp_path, tamper, message):
    """No file runs code, changes a class, asks for memory, or names a file of another folder."""
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())  # its step is a number
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    checkpoints = Checkpoints(tmp_path / "there")
    checkpoints.save(1, model, [optimizer], {"tokens": 1}, {"rank": 0})
    tamper(tmp_path / "there" / "step-00000001", tmp_path / "ran")
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message):
            checkpoints.load(model, [optimizer])
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
    assert not (tmp_path / "ran").exists() and not hasattr(Metadata, "a")
