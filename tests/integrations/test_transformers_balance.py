"""The balance of the experts in models of transformers, against loops over the routers' outputs."""

import copy
import sys
from functools import partial

import pytest
import reference as ref
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

pytest.importorskip("transformers", minversion="5.23")

from tiny_models import tiny  # noqa: E402

from moe_ext.integrations.transformers import (  # noqa: E402
    ModelBalance,
    balance,
    experts_modules,
)

E, K, LAYERS, VOCABULARY = 6, 2, 2, 48
KINDS = ["mixtral", "qwen3_moe", "gpt_oss"]


def make_model(model_type="mixtral", dtype=torch.float64, **options):
    """Returns a tiny model; its routers prefer some experts."""
    model = tiny(model_type, "eager", **options)  # "eager" has every dtype
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=1.0 if "router" in name or ".gate." in name else 0.1)
    return model.to(dtype).train()


def ids(*shape):
    return torch.randint(VOCABULARY, shape or (3, 7))


def routers(model):
    """Returns the routers by the name of the experts module next to them."""
    modules = {}
    for name in experts_modules(model):
        block = model.get_submodule(name.rpartition(".")[0])
        modules[name] = block.router if hasattr(block, "router") else block.gate
    return modules


class Recorded:
    """Records the weights and the indices that each router returns."""

    def __init__(self, model):
        self.calls = {}
        for name, router in routers(model).items():
            router.register_forward_hook(
                lambda _, arguments, output, name=name: self.calls.setdefault(name, []).append(
                    (output[1], output[2])
                )
            )

    def sums(self, name, mask=None):
        """Returns importance (Eq. 6) and load of a layer, as loops over all recorded calls."""
        importance, load = [0.0] * E, [0] * E
        for gates, expert_index in self.calls[name]:
            for t in range(len(gates)):
                for j in range(K):
                    if mask is None or mask.flatten()[t]:
                        importance[expert_index[t, j]] += gates[t, j].double()
                        load[expert_index[t, j]] += 1
        return torch.stack([torch.as_tensor(v, dtype=torch.float64) for v in importance]), load


def assert_measures(measured, recorded, num_tokens, mask=None, tolerance=1e-12):
    assert [layer.name for layer in measured.layers] == list(recorded.calls)
    for layer in measured.layers:
        importance, load = recorded.sums(layer.name, mask)
        torch.testing.assert_close(
            layer.importance, importance.detach(), rtol=tolerance, atol=tolerance
        )
        assert layer.load.tolist() == load and layer.load.dtype == torch.int64
        assert layer.num_tokens == num_tokens
        cv = ref.CV_squared(torch.tensor(load, dtype=torch.float64)).sqrt()
        assert layer.cv_load == pytest.approx(float(cv), abs=1e-12)
        cv = ref.CV_squared(importance.detach()).sqrt()
        assert layer.cv_importance == pytest.approx(float(cv), abs=max(tolerance, 1e-9))
        assert layer.max_over_mean_load == pytest.approx(max(load) / (sum(load) / E))
        assert layer.num_idle == load.count(0)
        assert layer.num_experts == E


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", KINDS)
def test_importance_and_load_are_those_of_the_routers(kind, implementation):
    model = make_model(kind, torch.float32)
    model.set_experts_implementation(implementation)
    recorded = Recorded(model)
    with balance(model) as measured:
        model(ids(3, 7))
        with torch.no_grad():
            model(ids(2, 5))
        with torch.inference_mode():
            model(ids(1, 4))
    assert_measures(measured, recorded, 21 + 10 + 4)


@pytest.mark.parametrize("kind", KINDS)
def test_results_of_the_model_are_bitwise_identical(kind):
    model, tokens = make_model(kind, torch.float32), ids()

    def step():
        model.zero_grad()
        output = model(tokens, labels=tokens)
        output.loss.backward()
        return [output.logits, *(parameter.grad for parameter in model.parameters())]

    expected = step()
    with balance(model):
        actual = step()
    assert all(map(torch.equal, actual, expected))


def test_hooks_are_removed_and_results_stay():
    model = make_model()
    measured = balance(model)
    model(ids(1, 3))
    (layer, _), sums = measured.layers, measured.layers[0].importance.clone()
    model(ids(1, 2))
    assert torch.equal(layer.importance, sums) and layer.load.sum() == 3 * K  # results stay
    measured.remove()
    model(ids(1, 3))
    assert [layer.num_tokens for layer in measured.layers] == [5] * LAYERS
    with pytest.raises(RuntimeError, match="stop"), balance(model) as measured:
        raise RuntimeError("stop")
    assert not any(module._forward_pre_hooks for module in experts_modules(model).values())
    measured.reset()
    assert [layer.load.sum() for layer in measured.layers] == [0] * LAYERS
    assert all(recorder.last_importance is None for recorder in measured._recorders)


def test_a_model_is_copied_while_it_is_measured():
    model = make_model()
    with balance(model, w_importance=0.1) as measured:
        model(ids(1, 3))
        copied = copy.deepcopy(model)
        copied(ids(1, 5))
        assert measured.loss().requires_grad
        assert [layer.num_tokens for layer in measured.layers] == [3] * LAYERS


def test_a_measurement_that_begins_in_inference_mode():
    model = make_model()
    with torch.inference_mode():
        measured = balance(model)
        model(ids(1, 3))
    model(ids(1, 5))
    assert [layer.num_tokens for layer in measured.layers] == [8] * LAYERS
    measured.reset()
    measured.remove()


def enable_checkpointing(model, reentrant):
    model.activation_checkpointing_enable(
        activation_checkpointing_kwargs={"use_reentrant": reentrant}
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_pass_does_not_count(reentrant):
    model, tokens = make_model(), ids()
    recorded = Recorded(model)
    enable_checkpointing(model, reentrant)
    with balance(model) as measured:
        loss = model(tokens, labels=tokens, use_cache=False).loss
        first = {name: list(calls) for name, calls in recorded.calls.items()}
        loss.backward()
        assert [len(calls) for calls in recorded.calls.values()] == [2] * LAYERS  # recomputed
    recorded.calls = first
    assert_measures(measured, recorded, 21)


def direct_losses(recorded, w, mask=None):
    """Returns L_importance = w CV(Importance(X))² (Eq. 7) of each layer, as loops in float64."""
    return {name: w * ref.CV_squared(recorded.sums(name, mask)[0]) for name in recorded.calls}


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(actual, expected, tolerance):
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm() <= tolerance * gradient.norm() + 1e-15, name


# The router of Qwen3-MoE has a softmax in float32, with a gradient in float32.
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind, tolerance", [("qwen3_moe", 1e-6), ("gpt_oss", 1e-10)])
def test_losses_and_gradients_equal_the_formula(kind, tolerance, checkpointing):
    model, tokens = make_model(kind), ids()
    mask = torch.ones_like(tokens)
    mask[1:, :3] = 0
    recorded = Recorded(model)
    task_loss = model(tokens, labels=tokens).loss
    direct = direct_losses(recorded, 0.3, mask)
    expected = gradients(model, task_loss + sum(direct.values()))
    without = gradients(model, model(tokens, labels=tokens).loss)
    router = next(iter(routers(model).values())).weight
    name = next(name for name, parameter in model.named_parameters() if parameter is router)
    assert (expected[name] - without[name]).norm() > 1e-2 * expected[name].norm()
    if checkpointing:
        enable_checkpointing(model, reentrant=False)
    with balance(model, w_importance=0.3) as measured:
        measured.mask = mask
        for _ in range(2):  # the loss covers only the last forward pass
            task_loss = model(tokens, labels=tokens, use_cache=False).loss
            losses = measured.losses()
            actual = gradients(model, task_loss + measured.loss())
    assert losses.keys() == direct.keys()
    for part, loss in losses.items():
        torch.testing.assert_close(loss, direct[part], rtol=1e-12, atol=0)
    assert_same_gradients(actual, expected, tolerance)


def test_a_loss_needs_checkpointing_without_reentrance():
    model, tokens = make_model(), ids()
    enable_checkpointing(model, reentrant=True)
    with balance(model, w_importance=0.1) as measured:
        loss = model(tokens, labels=tokens, use_cache=False).loss + measured.loss()
        with pytest.raises(ValueError, match="w_importance must be 0 .*; pass use_reentrant=False"):
            loss.backward()


def test_padding_is_left_out():
    model, tokens = make_model(), ids(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    recorded = Recorded(model)
    with balance(model) as measured:
        measured.mask = mask
        model(tokens, attention_mask=mask)
    assert_measures(measured, recorded, 10, mask)


@pytest.mark.parametrize(
    "checkpointing, w_importance, fullgraph",
    [
        (False, 0.1, True),
        pytest.param(True, 0, True, marks=pytest.mark.long),
        pytest.param(True, 0.1, False, marks=pytest.mark.long),
    ],
)
def test_compiled_models(checkpointing, w_importance, fullgraph):
    torch._dynamo.reset()
    model, tokens = make_model(dtype=torch.float32, num_hidden_layers=1), ids()
    model.set_experts_implementation("grouped_mm")
    if checkpointing:
        enable_checkpointing(model, reentrant=False)

    def run(forward):
        with balance(model, w_importance) as measured:
            for _ in range(2):
                loss = forward(tokens, labels=tokens, use_cache=False).loss
                grads = gradients(model, loss + (measured.loss() if w_importance else 0))
        return measured.layers, grads

    expected, expected_gradients = run(model)
    compiled = torch.compile(model, fullgraph=fullgraph, backend="aot_eager")
    actual, actual_gradients = run(compiled)
    for stats, wanted in zip(actual, expected, strict=True):
        assert (
            stats.load.tolist() == wanted.load.tolist() and stats.num_tokens == 2 * tokens.numel()
        )
        torch.testing.assert_close(stats.importance, wanted.importance, rtol=1e-5, atol=1e-5)
    assert_same_gradients(actual_gradients, expected_gradients, 1e-4)


@pytest.mark.parametrize(
    "wrap",
    [partial(torch.compile, backend="eager"), checkpoint_wrapper],
    ids=["compile", "checkpoint"],
)
def test_names_and_counts_of_wrapped_modules(wrap):
    model, tokens = make_model(dtype=torch.float32), ids()
    with balance(model) as measured:
        model(tokens)
    names = [layer.name for layer in measured.layers]
    block = model.get_submodule(names[0].rpartition(".")[0])
    block.experts = wrap(block.experts)
    with balance(wrap(model)) as measured_again:
        model(tokens)
    assert [layer.name for layer in measured_again.layers] == names
    for layer, wanted in zip(measured_again.layers, measured.layers, strict=True):
        assert layer.load.tolist() == wanted.load.tolist()


class OwnExperts(torch.nn.Module):
    """An experts module without parameters, which returns its input."""

    def __init__(self, num_experts):
        super().__init__()
        self.num_experts = num_experts

    def _apply_gate(self, gate_up):
        raise NotImplementedError

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states


def test_slots_of_other_ranks_do_not_count():
    """With expert parallelism, an index of E or more is an expert of another rank."""
    experts = OwnExperts(3)
    index = torch.tensor([[0, 3], [5, 2], [2, 0]], dtype=torch.int32)
    gates = torch.tensor([[0.5, 0.0], [0.0, 0.25], [1.0, 2.0]])
    with balance(experts) as measured:
        experts(torch.zeros(3, 4), index, gates)
        experts(torch.zeros(0, 4), index[:0], gates[:0])
    (layer,) = measured.layers
    assert layer.load.tolist() == [2, 0, 2] and layer.importance.tolist() == [2.5, 0, 1.25]
    assert layer.num_tokens == 3 and layer.num_idle == 1
    assert layer.max_over_mean_load == pytest.approx(1.5)


def test_slots_with_the_weight_0_do_not_count():
    """Zaya gives a token that skips the experts expert 0 with the weight 0."""
    experts = OwnExperts(2)
    with balance(experts) as measured:
        experts(torch.zeros(3, 4), torch.tensor([[0], [0], [1]]), torch.tensor([[0.0], [0.5], [1]]))
    (layer,) = measured.layers
    assert layer.load.tolist() == [1, 1] and layer.num_tokens == 3


def test_table_has_a_row_for_each_layer():
    model = torch.nn.ModuleDict({"a": OwnExperts(2), "longer": OwnExperts(4)})
    with balance(model) as measured:
        gates = torch.tensor([[0.75], [0.25]])
        model["longer"](torch.zeros(2, 3), torch.tensor([[1], [0]]), gates)
    assert measured.table().splitlines() == [
        "layer   experts  idle  tokens  cv_importance  cv_load  max/mean load",
        "a             2     2       0          0.000    0.000          0.000",
        "longer        4     2       2          1.225    1.000          2.000",
    ]


def test_plot_is_an_image(tmp_path):
    pytest.importorskip("matplotlib")
    model = torch.nn.ModuleList([OwnExperts(2), OwnExperts(4)])
    with balance(model) as measured:
        model[1](torch.zeros(2, 3), torch.tensor([[1], [0]]), torch.ones(2, 1))
    measured.plot(tmp_path / "balance.png")
    assert (tmp_path / "balance.png").read_bytes().startswith(b"\x89PNG")


def test_plot_names_the_missing_package(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="ModelBalance.plot: matplotlib must be installed"):
        balance(OwnExperts(2)).plot(tmp_path / "balance.png")


def test_errors_name_the_argument_and_the_value():
    with pytest.raises(ValueError, match="model must have a module .*, got 'Linear'"):
        balance(torch.nn.Linear(2, 2))
    experts = OwnExperts(2)
    with pytest.raises(ValueError, match="balance: w_importance must be at least 0, got -1"):
        balance(experts, w_importance=-1)
    with pytest.raises(ValueError, match="w_importance must be above 0, got 0"):
        balance(experts).losses()
    with pytest.raises(ValueError, match="run a forward pass before the loss"):
        balance(experts, w_importance=1).loss()
    measured = ModelBalance(experts)
    measured.mask = torch.ones(2, 2)
    rule = r"one element for each of the 3 tokens, got shape \(2, 2\)"
    with pytest.raises(ValueError, match=rule):
        experts(torch.zeros(3, 2), torch.zeros(3, 1).long(), torch.ones(3, 1))
