"""The translation model of App. E: its parts, its arithmetic, its cost."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from assertions import assert_exact
from moe_lab.analysis.costs import cost
from moe_lab.data import PairBatch
from moe_lab.decoding.beam_search import BeamSearch
from moe_lab.models import (
    FeedForwardConfig,
    MoEConfig,
    TranslationModel,
    TranslationModelConfig,
    evaluating,
)
from torch.nn import functional as F

from moe_ext import MoE
from moe_ext.distributed import expert_parameters
from moe_ext.optim import split_parameters

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB, EOS = 40, 0
GATES = {
    "noisy": {},
    "noisy hierarchical": {"num_groups": 2},
    "topk": {"gate": "topk", "w_load": 0},
    "balanced": {"gate": "balanced", "w_load": 0},
    "balanced hierarchical": {"gate": "balanced", "w_load": 0, "num_groups": 2},
}


def small_config(gate="noisy", **changes):
    options = {
        "d_model": 8,
        "lstm_units": 12,
        "attention_units": 6,
        "dropout": 0.0,
        "moe": MoEConfig(num_experts=6, k=2, hidden_sizes=[10], **GATES[gate]),
        "ffn": FeedForwardConfig(hidden_sizes=[16]),
    }
    return TranslationModelConfig(**(options | changes))


def build(gate="noisy", process_group=None, **changes):
    """Builds a model in float64, with random gates and biases."""
    torch.manual_seed(1)
    noise = torch.Generator().manual_seed(2)
    config = small_config(gate, **changes)
    model = TranslationModel(config, VOCAB, process_group=process_group, noise_generator=noise)
    model.double()
    if process_group is not None:  # a rank has its part of the gates of groups
        whole = build(gate, **changes).state_dict()
        for name, p in model.named_parameters():
            rank = process_group.rank() if len(p) < len(whole[name]) else 0
            p.data.copy_(whole[name][rank * len(p) : (rank + 1) * len(p)])
        return model
    generator = torch.Generator().manual_seed(3)
    for name, p in model.named_parameters():
        if "w_gate" in name or "w_noise" in name or "bias" in name:
            torch.nn.init.normal_(p, generator=generator)
    return model


def random_batch(source_lengths, lengths, padding=0, fill=EOS):
    """Makes random pairs, padded with id `fill` to the longest plus `padding`."""
    generator = torch.Generator().manual_seed(4)

    def side(lengths, number):
        ids = torch.randint(1, VOCAB, (number, len(lengths), max(lengths)), generator=generator)
        mask = torch.arange(max(lengths) + padding) < torch.tensor(lengths)[:, None]
        return (*F.pad(ids, (0, padding)).masked_fill(~mask, fill), mask)

    source, source_mask = side(source_lengths, 1)
    targets, mask = side(lengths, 1)
    inputs = F.pad(targets, (1, -1), value=EOS).masked_fill(~mask, fill)
    index = torch.arange(len(lengths))
    return PairBatch(inputs, targets, mask, index, source, source_mask)


BATCH = ([5, 2, 4, 5, 1], [3, 4, 1, 6, 2])


def run(model, batch):
    return model(batch.source, batch.source_mask, batch.inputs, batch.mask)


def objective(parts):
    return parts.nll_sum / parts.num_tokens + parts.aux_loss


# A plain implementation, for sentences of equal length


def lstm(layer, batch_size, inputs):
    """Runs an LSTM word by word; each input is a function of m_{t-1}."""
    weights = {name.removeprefix("lstm."): p for name, p in layer.named_parameters()}
    W = torch.cat([weights["weight_ih_l0"], weights["weight_hh_l0"]], 1)
    b = weights["bias_ih_l0"] + weights["bias_hh_l0"]
    P = weights.get("weight_hr_l0", weights.get("projection"))
    c = W.new_zeros(batch_size, len(b) // 4)
    P = torch.eye(c.shape[1], dtype=c.dtype) if P is None else P
    m, outputs = c @ P.T, []
    for x in inputs:
        i, f, j, o = (torch.cat([x(m), m], 1) @ W.T + b).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * j.tanh()
        m = (o.sigmoid() * c.tanh()) @ P.T
        outputs.append(m)
    return torch.stack(outputs, 1)


class Dropout(torch.nn.Module):
    """Dropout whose masks depend only on the order of calls, not on strides."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, y):
        return y * (torch.rand(y.shape, generator=self.generator) < 0.75) / 0.75


def restated(model, batch):
    """Computes what `forward` returns: [B, T, D]."""
    config, drop = model.config, model.dropout

    def between(layer, h):
        if layer is None:
            return h
        if isinstance(layer, MoE):
            y = layer(h)[0]
        else:
            w1, w2 = (w.squeeze(0) for w in layer.weights)
            y = F.relu(h @ w1) @ w2
        return h + drop(1 / (1 + torch.exp(-y)))

    def along(layer, h):
        return lstm(layer, len(h), [lambda m, x=x: x for x in h.unbind(1)])

    def against(layer, h):
        return along(layer, h.flip(1)).flip(1)

    h = drop(model.embedding.weight[batch.source])
    if config.encoder == "parallel":
        h = h + drop(along(model.forwards, h) + against(model.backwards, h))
    else:
        h = h + drop(along(model.forwards, h))
        h = h + drop(against(model.backwards, h))
    h = between(model.encoder_between, h)
    source = h + drop(along(model.encoder_top, h))

    table = model.embedding if config.shared_embedding else model.target_embedding
    x = drop(table.weight[batch.inputs])
    attention = model.attention_lstm.attention
    if not config.attend_language:
        source = source[:, 1:]

    def context(m):
        u, w = source @ attention.u, (m @ attention.w)[:, None]
        a = u.tanh() * w.tanh() if config.attention == "product" else (u + w).tanh()
        weights = torch.softmax((a * attention.v).sum(2), 1)
        return (weights[:, :, None] * source).sum(1)

    reading = [lambda m, x=x: torch.cat([x, context(m)], 1) for x in x.unbind(1)]
    h = x + drop(lstm(model.attention_lstm.lstm, len(x), reading))
    h = between(model.decoder_between, h)
    return h + drop(along(model.decoder_top, h))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"between": "ffn", "attention": "gnmt", "encoder": "stacked"},
        {"between": "none", "lstm_units": 0, "shared_embedding": False},
        {"encoder": "stacked", "lstm_units": 8, "attend_language": False},
        {"gate": "balanced hierarchical", "attention": "gnmt"},
    ],
)
def test_layers_are_put_together_as_in_the_paper(changes):
    """Residuals around all layers, sigmoid of the MoE, dropout of each output and embedding."""
    batch = random_batch([5] * 3, [4] * 3)
    results = []
    for function in (lambda *given: run(*given)[0], restated):
        model = build(dropout=0.25, **changes)
        assert type(model.dropout) is torch.nn.Dropout and model.dropout.p == 0.25
        model.dropout = Dropout()
        h = function(model, batch)
        results.append([h, *torch.autograd.grad(h.square().sum(), used(model))])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


def used(model):
    """Returns the parameters that affect the input of the softmax."""
    unused = {*model.softmax.parameters(), *split_parameters(model).thresholds}
    return [p for p in model.parameters() if p not in unused]


@pytest.mark.parametrize("encoder", ["parallel", "stacked"])
@pytest.mark.parametrize("gate", GATES)
def test_padding_changes_nothing(gate, encoder):
    def result(batch):
        model = build(gate, encoder=encoder)
        parts = model.loss(batch)
        gradients = torch.autograd.grad(objective(parts), list(model.parameters()))
        return parts, gradients

    parts, gradients = result(random_batch(*BATCH))
    padded, padded_gradients = result(random_batch(*BATCH, padding=3, fill=33))
    assert parts.num_tokens == padded.num_tokens == sum(BATCH[1])
    assert_exact(padded.nll_sum, parts.nll_sum)
    assert_exact(padded.aux_loss, parts.aux_loss)
    for aux, padded_aux, lengths in zip(parts.aux, padded.aux, BATCH, strict=True):
        assert torch.equal(padded_aux.expert_index, aux.expert_index)
        assert aux.token_offsets is not None or len(aux.gates) == sum(lengths)
    for actual, expected in zip(padded_gradients, gradients, strict=True):
        assert_exact(actual, expected)


def trained(gate="noisy", **changes):
    """Returns a model in evaluation mode after one batch, which sets balanced gates' thresholds."""
    model = build(gate, **changes)
    model.loss(random_batch([6] * 9, [6] * 9))
    return model.eval()


@pytest.mark.parametrize("attention", ["product", "gnmt"])
@pytest.mark.parametrize("gate", GATES)
def test_steps_equal_the_teacher_forced_pass(gate, attention):
    model, batch = trained(gate, attention=attention), random_batch(*BATCH, padding=1)
    h, _ = run(model, batch)
    expected = model.softmax(h).log_softmax(2).detach()
    state = model.start(model.encode(batch.source, batch.source_mask))
    for t in range(batch.inputs.shape[1]):
        log_probs, attention, state = model.step(batch.inputs[:, t], state)
        assert not log_probs.requires_grad
        assert_exact(log_probs[batch.mask[:, t]], expected[:, t][batch.mask[:, t]])
        assert attention.shape == batch.source.shape
        assert attention[~batch.source_mask].count_nonzero() == 0
        assert_exact(attention.sum(1), torch.ones(len(attention), dtype=torch.float64))
    nll = -expected.gather(2, batch.targets[:, :, None]).squeeze(2)[batch.mask]
    assert_exact(model.token_nll(batch), nll)


def test_states_are_selected():
    model, batch = trained("balanced hierarchical"), random_batch([5, 3, 4], [4, 4, 4])
    index = torch.tensor([2, 0, 0, 2, 1])
    tokens = torch.arange(5)

    def after_two_steps(state, rows):
        for t in range(2):
            *_, state = model.step(batch.inputs[rows, t], state)
        return state

    state = after_two_steps(model.start(model.encode(batch.source, batch.source_mask)), slice(None))
    actual = model.step(tokens, state.select(index))
    again = model.encode(batch.source[index], batch.source_mask[index])
    expected = model.step(tokens, after_two_steps(model.start(again), index))
    for a, e in zip(actual[:2], expected[:2], strict=True):
        assert_exact(a, e)
    none = actual[2].select(torch.tensor([], dtype=torch.int64))
    assert none.first.m.shape == (0, 8) and len(none.encoded.output) == 0


def test_selecting_translations_leaves_their_sources_where_they_are():
    model, batch = trained(), random_batch([5, 3, 4], [4, 4, 4])
    start = model.start(model.encode(batch.source, batch.source_mask))
    state = start.select(torch.tensor([1, 1, 1, 0, 2]))
    assert state.encoded.output is start.encoded.output
    assert state.source.tolist() == [1, 1, 1, 0, 2]
    state = state.select(torch.tensor([4, 1, 4]))
    assert torch.equal(state.encoded.output, start.encoded.output[1:])
    assert torch.equal(state.encoded.keys, start.encoded.keys[1:])
    assert state.source.tolist() == [1, 0, 1]


@pytest.mark.parametrize("gate", GATES)
def test_gradients_reach_every_parameter(gate):
    model, batch = build(gate, shared_embedding=False), random_batch(*BATCH)
    with torch.no_grad():
        model.loss(batch)  # sets the thresholds, with which both masks agree
        for threshold in split_parameters(model).thresholds:
            threshold.mul_(1.5)
    objective(model.loss(batch)).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.count_nonzero() > 0, name
    for table, ids in (("embedding", batch.source), ("target_embedding", batch.inputs)):
        rows = model.get_parameter(f"{table}.weight").grad.any(1).nonzero().squeeze(1)
        mask = batch.source_mask if table == "embedding" else batch.mask
        assert torch.equal(rows, ids[mask].unique())


def test_learns_a_batch_by_heart():
    """Learns to reverse the source; beam search then finds the translations."""
    torch.manual_seed(1)
    model = TranslationModel(small_config("balanced", d_model=12), VOCAB)
    batch = random_batch([4] * 6, [5] * 6)
    targets = F.pad(batch.source.flip(1), (0, 1), value=EOS)
    inputs = F.pad(targets, (1, -1), value=EOS)
    batch = replace(batch, inputs=inputs, targets=targets)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        parts = model.loss(batch)
        optimizer.zero_grad()
        objective(parts).backward()
        optimizer.step()
    assert parts.nll_sum.item() / parts.num_tokens < 0.3 < math.log(VOCAB)
    with evaluating(model):
        state = model.start(model.encode(batch.source, batch.source_mask))
        best = BeamSearch(beam=3)(model, state, batch.source_mask, EOS)
    assert [hypotheses[0].tokens for hypotheses in best] == targets.tolist()


@pytest.mark.parametrize("between", ["moe", "ffn"])
def test_autocast(between):
    model, batch = build("topk", between=between), random_batch(*BATCH)
    exact = model.loss(batch).nll_sum
    model = model.float()
    with torch.autocast("cpu", torch.bfloat16):
        parts = model.loss(batch)
        state = model.start(model.encode(batch.source, batch.source_mask))
        for t in range(2):
            log_probs, _, state = model.step(batch.inputs[:, t], state)
    assert parts.nll_sum.dtype == log_probs.dtype == torch.float32
    assert parts.nll_sum.item() == pytest.approx(exact.item(), rel=0.02)
    objective(parts).backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


# Several ranks


def step_of(model, batch, num_tokens, world):
    """Computes losses and gradients on one rank, for the mean loss over the tokens of all ranks."""
    parts = model.loss(batch)
    (parts.nll_sum * world / num_tokens + parts.aux_loss).backward()
    experts = expert_parameters(model)
    names = {entry.param: name for name, entry in experts.items()} if world > 1 else {}
    gradients = {}
    for name, p in model.named_parameters():
        if p not in names and world > 1:
            dist.all_reduce(p.grad)
            p.grad /= world
        gradients[name] = p.grad
    return parts.nll_sum.item(), parts.aux_loss.item(), gradients


def step_of_process(group, rank, gate, lengths, changes):
    model = build(gate, group, **changes)
    batch = random_batch(*lengths)
    return step_of(model, batch.part(rank, group.size()), sum(lengths[1]), group.size())


@pytest.mark.parametrize(
    ("gate", "changes"),
    [
        ("topk", {}),
        ("balanced", {"encoder": "stacked"}),
        ("balanced hierarchical", {}),
        ("topk", {"between": "ffn", "attention": "gnmt"}),
        ("topk", {"between": "none", "shared_embedding": False}),
    ],
)
@pytest.mark.parametrize("lengths", [BATCH, ([3], [4])])
def test_processes_equal_one(workers, gate, changes, lengths):
    """Also if a rank has no sentence."""
    model = build(gate, **changes)
    nll_sum, aux_loss, gradients = step_of(model, random_batch(*lengths), sum(lengths[1]), 1)
    results = workers.run(2, step_of_process, gate, lengths, changes)
    assert sum(result[0] for result in results) == pytest.approx(nll_sum, rel=1e-12)
    for result in results:
        assert result[1] == pytest.approx(aux_loss, rel=1e-12)
    for name, expected in gradients.items():
        actual = [result[2][name] for result in results]
        if len(actual[0]) < len(expected):  # experts, and the gates of groups
            assert_exact(torch.cat(actual), expected)
        else:
            assert_exact(actual[0], expected)
            assert_exact(actual[1], expected)


# Sizes


def test_cost_worked_by_hand():
    D, UNITS, A, E, K, F = 8, 12, 6, 6, 2, 10
    plain = 4 * UNITS * 2 * D + UNITS * D
    reading = 4 * UNITS * 3 * D + UNITS * D
    attention = 2 * D * A
    gate, expert = 2 * D * E, 2 * D * F
    counted = cost(build())
    ops = 4 * plain + reading + 2 * (gate + K * expert) + D * VOCAB
    parameters = 4 * plain + reading + 2 * (gate + E * expert)
    assert counted.ops_per_timestep == ops
    assert counted.parameters == parameters + attention
    biases = 5 * 8 * UNITS + VOCAB
    assert counted.total_parameters == counted.parameters + 2 * D * VOCAB + biases + A


ERRORS = {"between": "mlp", "encoder": "both", "attention": "dot", "attention_units": -1}
ERRORS |= {"dropout": 1.0, "lstm_units": 4, "d_model": 0}


@pytest.mark.parametrize(("option", "value"), ERRORS.items())
def test_configuration_errors(option, value):
    with pytest.raises(ValueError, match=f"{option} must .*got {value!r}"):
        small_config(**{option: value})


def test_decoding_allows_no_capacity():
    with pytest.raises(ValueError, match=r"^moe.capacity_factor must be 0: decoding .*, got 1.5$"):
        small_config(moe=MoEConfig(capacity_factor=1.5))
