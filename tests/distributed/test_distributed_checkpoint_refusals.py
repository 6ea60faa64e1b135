"""Ranks, models, optimizers and states that do not fit a checkpoint are refused by name."""

import re
from fractions import Fraction

import pytest
import torch
from assertions import assert_same_bits
from checkpoint_model import D, Model, numbers_of, optimizers_of, train
from torch import nn
from workers import on_ranks

import moe_ext.distributed.checkpoint
from moe_ext import MoE, SharedExpert
from moe_ext.distributed import (
    CheckpointError,
    Checkpoints,
    _planners,
    full_state_dict,
    load_full_state_dict,
    parallelize,
)
from moe_ext.optim import FactoredAdagrad, FactoredAdam, split_parameters


@on_ranks(2)
def test_what_one_rank_refuses_changes_no_rank(group, rank, tmp_path):
    model, checkpoints = Model(group), Checkpoints(tmp_path, group)
    adam = torch.optim.Adam(model.parameters())
    checkpoints.save(1, model, [adam])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    changed = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = adam if rank == 0 else torch.optim.SGD(model.parameters())
    with pytest.raises(CheckpointError, match=r"the saved optimizers must be .* \(rank 1\)$"):
        checkpoints.load(model, [optimizer])
    for name, value in model.state_dict().items():
        assert_same_bits(value, changed[name])
    for step, rule in ((-1, "at least 0, got -1"), (3, r"equal on all ranks, got \[2, 3\]")):
        with pytest.raises(ValueError, match=f"^Checkpoints: step must be {rule}"):
            checkpoints.save(step if rank == 1 else 2, model)
        with pytest.raises(ValueError, match=f"^Checkpoints: step must be {rule}"):
            checkpoints.load(model, step=step if rank == 1 else 2)
    assert checkpoints.load(model, [adam]).step == 1
    for name, value in model.state_dict().items():
        assert_same_bits(value, before[name])


def without_its_group(group, rank, folder):
    """Saves and loads sharded experts without their process group."""
    model, alone = Model(group), Checkpoints(folder / f"of-{rank}")
    message = r"process_group must have the ranks \[0, 1\] of the layers .*, got None"
    for call in (
        lambda: alone.save(1, model),
        lambda: alone.load(model),
    ):
        with pytest.raises(CheckpointError, match=message):
            call()
    with pytest.raises(ValueError, match=message):
        full_state_dict(model, None)
    with pytest.raises(ValueError, match=message):
        load_full_state_dict(model, Model().state_dict(), None)
    if rank == 0:  # writes a partial checkpoint anyway
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(moe_ext.distributed.checkpoint, "require_ranks", lambda *_: None)
            with pytest.raises(CheckpointError, match=r"a part of model\.experts\.bias_0, model"):
                Checkpoints(folder / "part").save(1, model.flat)
            patch.setattr(_planners, "require", lambda *_: None)
            Checkpoints(folder / "part").save(1, model.flat)


def test_a_part_of_the_experts_is_no_checkpoint(workers, tmp_path):
    for rank in range(2):
        Checkpoints(tmp_path / f"of-{rank}").save(0, nn.Linear(1, 1))
    workers.run(2, without_its_group, tmp_path)
    with pytest.raises(CheckpointError, match=r"does not have all elements of .*experts\."):
        Checkpoints(tmp_path / "part").load(Model().flat)


@on_ranks(2)
def test_experts_that_one_rank_froze(group, rank, tmp_path):
    layer = MoE(D, 4, 2, process_group=group)
    layer.experts.requires_grad_(rank == 0)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.randn(5, D))[0].sum().backward()
    optimizer.step()
    match = "a part of optimizer.experts.weight_0.exp_avg, "
    with pytest.raises(CheckpointError, match=match):
        Checkpoints(tmp_path / "run", group).save(1, layer, [optimizer])


def test_what_does_not_fit_is_named(tmp_path):
    model = Model()
    optimizers = optimizers_of("factored", model)
    train(model, optimizers, None, 0, [1])
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match="must contain a checkpoint, got none"):
        checkpoints.load(model)
    checkpoints.save(1, model, optimizers)
    with pytest.raises(CheckpointError, match="must contain step 2, got 1"):
        checkpoints.load(model, step=2)
    with pytest.raises(ValueError, match="^Checkpoints.load: model must be given with optimizers"):
        checkpoints.load(optimizers=optimizers)
    with pytest.raises(ValueError, match="^Checkpoints: step must be below 1e.18, got 1000000"):
        checkpoints.save(10**18, model)

    for number, experts in (
        (4, r"\[5, 4, 6\] instead of \[4, 4, 6\]"),
        (6, "no tensor instead of"),
    ):
        changed = Model(num_experts=number)
        before = changed.dense.weight.clone()
        with pytest.raises(CheckpointError, match=f"state must have the names .*, got .*{experts}"):
            checkpoints.load(changed)
        assert_same_bits(changed.dense.weight, before)
    with pytest.raises(CheckpointError) as raised:
        checkpoints.load(model, optimizers_of("adam", model))
    assert str(raised.value) == (
        f"loading {tmp_path}/step-00000001: the saved optimizers must be ['Adam with 1 group(s)'], "
        "got ['FactoredAdam with 1 group(s)', 'Adam with 2 group(s)']"
    )
    with pytest.raises(
        CheckpointError, match="params must belong to the model, got a parameter of"
    ):
        checkpoints.save(2, model.dense, optimizers)
    assert checkpoints.steps() == [1]
    for keep, rule in ((0, "at least 1"), (None, "a whole number")):
        with pytest.raises(ValueError, match=f"keep must be {rule}, got {keep}"):
            Checkpoints(tmp_path, keep=keep)


def parts(kind_of_experts, kind_of_rest, **options):
    """Returns a function that makes an optimizer for the experts and one for the rest."""

    def make(model):
        split = split_parameters(model)
        return [kind_of_experts(split.experts, **options), kind_of_rest(split.rest)]

    return make


def one_group(kind, **options):
    return lambda model: [kind(model.parameters(), **options)]


def split_groups(*names):
    def make(model):
        split = split_parameters(model)
        return [FactoredAdam([{"params": getattr(split, name)} for name in names])]

    return make


ADAM, SGD, FACTORED = torch.optim.Adam, torch.optim.SGD, FactoredAdam
FIRST, SECOND = "group 0 of optimizer 0", "group 0 of optimizer 1"
OTHER_OPTIMIZERS = {
    "changed places": (
        parts(FACTORED, FACTORED),
        lambda model: parts(FACTORED, FACTORED)(model)[::-1],
        f"experts.weight_0: FactoredAdam (factored), {FIRST} instead of FactoredAdam (factored), "
        f"{SECOND}",
    ),
    "other class": (
        parts(FACTORED, ADAM),
        lambda model: parts(ADAM, FACTORED)(model)[::-1],
        f"experts.weight_0: FactoredAdam (factored), {FIRST} instead of Adam, {SECOND}",
    ),
    "groups": (
        split_groups("experts", "rest"),
        split_groups("rest", "experts"),
        "experts.weight_0: FactoredAdam (factored), group 0 of optimizer 0 instead of "
        "FactoredAdam (factored), group 1 of optimizer 0",
    ),
    "fewer": (
        split_groups("experts"),
        one_group(FACTORED),
        f"gate.w_gate: no optimizer instead of FactoredAdam (factored), {FIRST}",
    ),
    "more": (
        one_group(FACTORED),
        split_groups("experts"),
        f"gate.w_gate: FactoredAdam (factored), {FIRST} instead of no optimizer",
    ),
    "amsgrad": (
        one_group(ADAM),
        one_group(ADAM, amsgrad=True),
        f"gate.w_gate: Adam, {FIRST} instead of Adam (amsgrad), {FIRST}",
    ),
    "momentum": (
        one_group(SGD, momentum=0.9),
        one_group(SGD),
        f"gate.w_gate: SGD (momentum), {FIRST} instead of SGD, {FIRST}",
    ),
    "centered": (
        one_group(torch.optim.RMSprop),
        one_group(torch.optim.RMSprop, centered=True),
        f"gate.w_gate: RMSprop, {FIRST} instead of RMSprop (centered), {FIRST}",
    ),
    "factored": (
        one_group(FactoredAdagrad, factored=False),
        one_group(FactoredAdagrad),
        f"gate.w_gate: FactoredAdagrad, {FIRST} instead of FactoredAdagrad (factored), {FIRST}",
    ),
}


@pytest.mark.parametrize("case", OTHER_OPTIMIZERS)
def test_the_state_of_another_optimizer_is_refused(tmp_path, case):
    make_saved, make_here, message = OTHER_OPTIMIZERS[case]

    def trained(make):
        model = MoE(D, 4, 2, hidden_sizes=[3])
        optimizers = make(model)
        model(torch.randn(6, D))[0].sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        return model, optimizers

    Checkpoints(tmp_path).save(1, *trained(make_saved))
    model, optimizers = trained(make_here)
    before = [value.clone() for optimizer in optimizers for value in numbers_of(model, optimizer)]
    with pytest.raises(CheckpointError, match=re.escape(message)):
        Checkpoints(tmp_path).load(model, optimizers)
    after = [value for optimizer in optimizers for value in numbers_of(model, optimizer)]
    for value, unchanged in zip(after, before, strict=True):
        assert_same_bits(value, unchanged)


def save_shared_expert(group, rank, folder):
    layer = MoE(D, 4, 2, shared_expert=SharedExpert(D, [3]), process_group=group)
    model = parallelize(layer, group, dense="fsdp")  # its shared expert is in Adam
    Checkpoints(folder, group).save(1, model, parts(FACTORED, ADAM)(model))


def test_a_shared_expert_of_fsdp_in_another_optimizer(workers, tmp_path):
    workers.run(2, save_shared_expert, tmp_path)
    layer = MoE(D, 4, 2, shared_expert=SharedExpert(D, [3]))
    message = (
        f"got shared_expert.expert.weight_0: Adam, {SECOND} instead of FactoredAdam (factored), "
        f"{FIRST}; shared_expert.expert.weight_1: "
    )
    with pytest.raises(CheckpointError, match=re.escape(message)):
        Checkpoints(tmp_path).load(layer, parts(FACTORED, ADAM)(layer))


def test_options_of_the_computation_stay(tmp_path):
    """Another machine may have written the checkpoint, for example without a GPU."""
    layer = MoE(D, 4, 2)
    Checkpoints(tmp_path).save(1, layer, one_group(FACTORED, lr=0.25)(layer))
    lr = torch.tensor(1.0)
    (optimizer,) = one_group(FACTORED, lr=lr, capturable=True)(layer)
    Checkpoints(tmp_path).load(layer, [optimizer])
    group = optimizer.param_groups[0]
    assert group["capturable"] and isinstance(group["lr"], torch.Tensor) and group["lr"] == 0.25
    Checkpoints(tmp_path).save(2, layer, [optimizer])
    (optimizer,) = one_group(FACTORED)(layer)
    Checkpoints(tmp_path).load(layer, [optimizer])
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert isinstance(optimizer.param_groups[0]["lr"], float)


def test_a_state_of_another_class_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    message = "{} must hold tensors, numbers, texts and containers of these, got .*Fraction"
    model = nn.Linear(2, 2)
    for states in ((Fraction(1, 2), None), (None, [Fraction(1, 2)])):
        name = "state" if states[0] else "rank_state"
        for save in (checkpoints.save, checkpoints.async_save):
            with pytest.raises(CheckpointError, match=message.format(name)):
                save(1, model, (), *states)
    assert checkpoints.steps() == []
    with torch.serialization.safe_globals([Fraction]):
        checkpoints.save(1, model, (), {"share": Fraction(1, 2)})
        assert checkpoints.load().state == {"share": Fraction(1, 2)}
    with pytest.raises(CheckpointError, match="state.pt cannot be read: it must hold .*Fraction"):
        checkpoints.load()


def test_optimizers_must_be_a_list(tmp_path):
    model, checkpoints = nn.Linear(2, 2), Checkpoints(tmp_path)
    adam = torch.optim.Adam(model.parameters())
    for wrong, got in ((adam, "Adam"), ({"adam": adam}, "dict of str"), (None, "NoneType")):
        message = f"^Checkpoints: optimizers must be a list of torch.optim.Optimizer, got {got}$"
        for save in (checkpoints.save, checkpoints.async_save):
            with pytest.raises(TypeError, match=message):
                save(1, model, wrong)
        with pytest.raises(TypeError, match=message):
            checkpoints.load(model, wrong)
    assert checkpoints.steps() == []


def test_state_of_an_optimizer_that_has_no_parameter(tmp_path):
    model, checkpoints = nn.Linear(2, 2), Checkpoints(tmp_path)
    optimizer = torch.optim.SGD(model.parameters())
    checkpoints.save(1, model, [optimizer])
    optimizer.state["global"] = {"norm": 1.0}
    message = r": SGD: state must have parameters as keys \(.*\), got \['global'\]$"
    with pytest.raises(CheckpointError, match=message):
        checkpoints.save(2, model, [optimizer])
    with pytest.raises(CheckpointError, match=message):
        checkpoints.load(model, [optimizer])
