"""Checkpoints of earlier versions of moe_ext, and of newer ones of torch."""

import pytest
import torch
from assertions import assert_same_bits
from checkpoint_model import D, compiled, contents, numbers_of
from torch import nn

import moe_ext.distributed.checkpoint
from moe_ext import MoE
from moe_ext.distributed import CheckpointError, Checkpoints, full_state_dict, load_full_state_dict


def test_a_newer_torch_is_named(tmp_path, monkeypatch):
    model = nn.Linear(2, 2)
    checkpoints = Checkpoints(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "99.0")
        checkpoints.save(1, model, (), "state")

    def read_metadata(folder):
        raise ValueError("too many values to unpack")

    monkeypatch.setattr(moe_ext.distributed.checkpoint, "read_metadata", read_metadata)
    message = "torch .* cannot read a checkpoint written by torch 99.0: too .*; use torch 99.0"
    with pytest.raises(CheckpointError, match=message):
        checkpoints.load(model)
    assert checkpoints.load().state == "state"


def layer_with_biases(group=None):
    return MoE(D, 5, 2, hidden_sizes=(3,), bias=True, process_group=group).double()


def former_name(name):
    return name.replace("weight_", "weights.").replace("bias_", "biases.")


class Former(nn.Module):
    """A layer with the parameter names from before version 0.1."""

    def __init__(self, layer):
        super().__init__()
        self.gate, self.experts = layer.gate, nn.Module()
        self.experts.weights = nn.ParameterList(weight.detach() for weight in layer.experts.weights)
        self.experts.biases = nn.ParameterList(bias.detach() for bias in layer.experts.biases)


def read_former(group, rank, folder):
    """Loads weights and optimizer; returns the weights and the moments of all ranks."""
    layer = layer_with_biases(group)
    optimizer = torch.optim.Adam(layer.parameters())
    Checkpoints(folder, group).load(layer, [optimizer])
    state = full_state_dict(layer, group)
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(optimizer.state[param]["exp_avg"])
    return state, full_state_dict(layer, group)


def test_checkpoints_without_the_names_of_groups(tmp_path, monkeypatch):
    """Earlier versions saved no names of groups, and names with the prefix of torch.compile."""
    state = moe_ext.distributed._state
    layer = nn.ModuleDict({"moe": compiled(layer_with_biases())})
    optimizer = torch.optim.Adam(layer.parameters(), amsgrad=True)
    for param in layer.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    with monkeypatch.context() as patch:
        patch.setattr(state, "plain_names", lambda model, names: {name: name for name in names})
        patch.setattr(
            moe_ext.distributed.checkpoint,
            "merged_options",
            lambda options, ranks: [
                (kind, [{k: v for k, v in group.items() if k != "param_names"} for group in groups])
                for kind, groups in options
            ],
        )
        Checkpoints(tmp_path).save(1, layer, [optimizer])
    assert "_orig_mod" in next(iter(contents(tmp_path, 1)[0]))
    loaded = nn.ModuleDict({"moe": layer_with_biases()})
    adam = torch.optim.Adam(loaded.parameters(), amsgrad=True)
    Checkpoints(tmp_path).load(loaded, [adam])
    for value, wanted in zip(numbers_of(loaded, adam), numbers_of(layer, optimizer), strict=True):
        assert_same_bits(value, wanted)
    with pytest.raises(CheckpointError, match=r"Adam \(amsgrad\), .* instead of Adam, group 0"):
        Checkpoints(tmp_path).load(loaded, [torch.optim.Adam(loaded.parameters())])


@pytest.mark.parametrize("world", [1, 2])
def test_checkpoints_of_former_versions(workers, tmp_path, world):
    layer = layer_with_biases()
    former = Former(layer)
    optimizer = torch.optim.Adam(former.parameters())
    for param in former.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    Checkpoints(tmp_path).save(1, former, [optimizer])
    state, moments = workers.run(world, read_former, tmp_path)[0]
    params = dict(former.named_parameters())
    for name in layer.state_dict():
        param = params[former_name(name)]
        assert_same_bits(state[name], param.detach())
        assert_same_bits(moments[name], optimizer.state[param]["exp_avg"])
    load_full_state_dict(layer, former.state_dict(), None)
    for name, value in layer.state_dict().items():
        assert_same_bits(value, state[name])
