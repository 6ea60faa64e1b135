"""Errors name the op, the argument, the rule and what came, as
"<op>: <argument> must <rule>, got <value>".
"""

import re

import pytest
import torch

from moe_ext import (
    ops,
)

T, E, K, D, F = 4, 5, 2, 3, 7


def arguments():
    """Valid arguments of every op, by name."""
    clean, raw, noise = torch.randn(3, T, E)
    gating = ops.noisy_topk_gating(clean, raw, noise, K)
    plan = ops.dispatch_plan(gating.expert_index, E)
    gates, index = gating.gates, gating.expert_index
    rows, weight, bias = torch.randn(T * K, D), torch.randn(E, D, F), torch.randn(E, F)
    stddev, threshold = gating.noise_stddev, gating.threshold
    return {
        "noisy_topk_gating": dict(clean_logits=clean, raw_noise_stddev=raw, noise=noise, k=K),
        "load": dict(
            clean_logits=clean,
            noise_stddev=stddev,
            threshold=threshold,
            expert_index=index,
            group_offsets=torch.tensor([0, 3, T]),
        ),
        "batchwise_topm": dict(scores=torch.randn(2, T, E), m=K),
        "selected_softmax": dict(
            logits=clean, expert_index=index.flatten(), token_offsets=torch.arange(0, T * K + 1, K)
        ),
        "importance": dict(gates=gates, expert_index=index, num_experts=E),
        "dispatch_plan": dict(expert_index=index, num_experts=E),
        "dispatch": dict(x=torch.randn(T, D), inverse=plan.inverse),
        "combine": dict(expert_output=rows, gates=gates, inverse=plan.inverse),
        "experts": dict(x=rows, weights=[weight], biases=[bias], offsets=plan.offsets),
    }


FLOATS = [
    ("noisy_topk_gating", "clean_logits"),
    ("noisy_topk_gating", "raw_noise_stddev"),
    ("noisy_topk_gating", "noise"),
    ("load", "clean_logits"),
    ("load", "noise_stddev"),
    ("load", "threshold"),
    ("batchwise_topm", "scores"),
    ("selected_softmax", "logits"),
    ("importance", "gates"),
    ("combine", "expert_output"),
    ("combine", "gates"),
    ("experts", "x"),
]
INDICES = [
    ("load", "expert_index"),
    ("load", "group_offsets"),
    ("selected_softmax", "expert_index"),
    ("selected_softmax", "token_offsets"),
    ("importance", "expert_index"),
    ("dispatch_plan", "expert_index"),
    ("dispatch", "inverse"),
    ("combine", "inverse"),
    ("experts", "offsets"),
]
TENSORS = [*FLOATS, *INDICES, ("dispatch", "x")]


def refuses(op, exception, pattern, **changes):
    call = {**arguments()[op], **changes}
    with pytest.raises(exception, match=rf"^{op}: {pattern}") as caught:
        getattr(ops, op)(**call)
    message = str(caught.value).splitlines()[0]
    assert " must " in message and ", got " in message
    return message


def test_valid_arguments_pass():
    for op, call in arguments().items():
        getattr(ops, op)(**call)


@pytest.mark.parametrize("op, name", FLOATS)
def test_integers_in_place_of_numbers(op, name):
    refuses(op, TypeError, name, **{name: arguments()[op][name].long()})


@pytest.mark.parametrize("op, name", INDICES)
@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.bool, torch.float32])
def test_indices_are_int64_or_int32(op, name, dtype):
    wrong = arguments()[op][name].to(dtype)
    message = refuses(op, TypeError, name, **{name: wrong})
    assert "int64" in message and "int32" in message and str(dtype).split(".")[1] in message


def test_a_type_that_is_not_the_weights():
    message = refuses("experts", TypeError, "x must", x=arguments()["experts"]["x"].bfloat16())
    assert "float32" in message and message.endswith("got bfloat16")


@pytest.mark.parametrize("op, name", TENSORS)
def test_number_of_dimensions(op, name):
    refuses(op, ValueError, name, **{name: arguments()[op][name][None]})


@pytest.mark.parametrize(
    "op, name, axis",
    [
        ("noisy_topk_gating", "raw_noise_stddev", 0),
        ("noisy_topk_gating", "raw_noise_stddev", 1),
        ("noisy_topk_gating", "noise", 0),
        ("noisy_topk_gating", "noise", 1),
        ("load", "noise_stddev", 0),
        ("load", "noise_stddev", 1),
        ("load", "threshold", 0),
        ("load", "threshold", 1),
        ("load", "expert_index", 0),
        ("selected_softmax", "token_offsets", 0),
        ("importance", "expert_index", 0),
        ("importance", "expert_index", 1),
    ],
)
def test_sizes_that_do_not_fit(op, name, axis):
    """The message holds the shape that came."""
    tensor = arguments()[op][name]
    wrong = tensor.narrow(axis, 0, tensor.shape[axis] - 1)
    message = refuses(op, ValueError, r"\w+", **{name: wrong})
    assert name in message
    assert str(wrong.shape[axis]) in re.findall(r"\d+", message.split(", got ")[1])


@pytest.mark.parametrize(
    "op, name",
    [
        ("dispatch", "inverse"),
        ("combine", "inverse"),
        ("combine", "gates"),
        ("experts", "offsets"),
    ],
)
def test_lengths_that_do_not_fit(op, name):
    """Which of two arguments is the wrong one cannot be known; either may be named."""
    tensor = arguments()[op][name]
    refuses(op, ValueError, r"\w+ must", **{name: tensor[:-1]})


def backward_arguments():
    """Of the operators that autograd calls, which look at what they are given as well."""
    call = arguments()
    load, combine, experts = (call[op] for op in ("load", "combine", "experts"))
    clean, raw, noise, k = call["noisy_topk_gating"].values()
    gates, index, _, limits, _ = torch.ops.moe_ext.noisy_topk_gating(clean, raw, noise, k, 0.01)
    return {
        "_noisy_topk_gating_backward": dict(
            grad_gates=gates, grad_threshold=None, grad_noise_stddev=None, gates=gates,
            expert_index=index, threshold_index=limits, clean_logits=clean, raw_noise_stddev=raw,
            noise=noise,
        ),
        "_load_backward": dict(grad_load=torch.randn(2, E), **load),
        "_combine_backward": dict(grad_y=torch.randn(T, D), token_offsets=None, **combine),
        "_experts_backward": dict(
            grad_y=torch.randn(T * K, F), inverse=None, token_offsets=None, gates=None, hidden=[],
            activation="relu", needs_x=True, needs_parameters=True, **experts,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("place", ["cpu", "meta"])
@pytest.mark.parametrize(
    "op, name",
    [
        ("_noisy_topk_gating_backward", "grad_gates"),
        ("_noisy_topk_gating_backward", "noise"),
        ("_load_backward", "grad_load"),
        ("_load_backward", "threshold"),
        ("_combine_backward", "grad_y"),
        ("_combine_backward", "gates"),
        ("_experts_backward", "grad_y"),
        ("_experts_backward", "offsets"),
    ],
)
def test_backward_operators_look_at_their_arguments(op, name, place):
    def there(value):
        if isinstance(value, list):
            return [there(each) for each in value]
        return value.to(place) if isinstance(value, torch.Tensor) else value

    call = {key: there(value) for key, value in backward_arguments()[op].items()}
    operator = getattr(torch.ops.moe_ext, op)
    operator(**call)
    with pytest.raises(ValueError, match=rf"^{op}: {name} must have shape .*, got "):
        operator(**call | {name: call[name][:-1]})


@pytest.mark.parametrize("wrong", [-2, E])
def test_threshold_indices_out_of_range(wrong):
    call = backward_arguments()["_noisy_topk_gating_backward"]
    call["threshold_index"][1, 1] = wrong
    message = f"threshold_index must be at least -1 and below {E}, got {wrong}"
    with pytest.raises(IndexError, match=f"^_noisy_topk_gating_backward: {message}"):
        torch.ops.moe_ext._noisy_topk_gating_backward(**call)


@pytest.mark.parametrize(
    "offsets, got", [([0, 5, 3, 9, 10, 10], "3 after 5"), ([0, 1, 2, 3, 4, 5], "0 to 5")]
)
def test_offsets_that_do_not_fit(offsets, got):
    refuses("experts", ValueError, f"offsets must .*, got {got}", offsets=torch.tensor(offsets))


@pytest.mark.parametrize("k", [-1, 0, E + 1, 1000])
def test_k_out_of_range(k):
    """Both numbers, k and the number of experts, are named."""
    message = refuses("noisy_topk_gating", ValueError, "k must", k=k)
    assert str(k) in message.split("got")[1]
    if k > 0:
        assert str(E) in message


@pytest.mark.parametrize("m", [-1, T + 1, 1000])
def test_m_out_of_range(m):
    message = refuses("batchwise_topm", ValueError, "m must", m=m)
    assert str(m) in message.split("got")[1] and str(T) in message


@pytest.mark.parametrize("nu", [-0.1, float("nan")])
def test_noise_epsilon_out_of_range(nu):
    refuses("noisy_topk_gating", ValueError, "noise_epsilon must", noise_epsilon=nu)


@pytest.mark.parametrize("missing", ["raw_noise_stddev", "noise"])
def test_noise_and_its_scale_come_together(missing):
    refuses("noisy_topk_gating", ValueError, r"raw_noise_stddev and noise must", **{missing: None})


@pytest.mark.parametrize(
    ("op", "num_experts"), [("importance", 0), ("importance", -1), ("dispatch_plan", -1)]
)
def test_number_of_experts_out_of_range(op, num_experts):
    refuses(op, ValueError, "num_experts must", num_experts=num_experts)


@pytest.mark.parametrize("bad", [-1, E, 10**12])
@pytest.mark.parametrize("op", ["importance", "dispatch_plan", "load"])
def test_expert_index_out_of_range(op, bad):
    index = arguments()[op]["expert_index"].clone()
    index[2, 1] = bad
    message = refuses(op, IndexError, "expert_index must", expert_index=index)
    assert str(bad) in message.split("got")[1]


@pytest.mark.parametrize("bad", [-1, E, 10**12])
def test_selected_expert_out_of_range(bad):
    index = arguments()["selected_softmax"]["expert_index"].clone()
    index[2] = bad
    message = refuses("selected_softmax", IndexError, "expert_index must", expert_index=index)
    assert str(bad) in message.split("got")[1]


@pytest.mark.parametrize("offsets", [[1, 2, 4, 6, 8], [0, 4, 2, 6, 8], [0, 2, 4, 6, 9]])
def test_token_offsets_run_from_0_to_the_number_of_slots(offsets):
    refuses(
        "selected_softmax", ValueError, "token_offsets must", token_offsets=torch.tensor(offsets)
    )


@pytest.mark.parametrize("bad", [-1, T * K, 10**12])
@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_inverse_out_of_range(op, bad):
    inverse = arguments()[op]["inverse"].clone()
    inverse[2, 1] = bad
    message = refuses(op, IndexError, "inverse must", inverse=inverse)
    assert str(bad) in message.split("got")[1]


@pytest.mark.parametrize(
    "offsets", [[1, 2, 3, 4, 5, 8], [0, 4, 2, 6, 7, 8], [0, 1, 2, 3, 4, 9], [0, 1, 2, 3, 4, 5]]
)
def test_offsets_run_from_0_to_the_number_of_rows(offsets):
    with pytest.raises((ValueError, IndexError), match="^experts: offsets must .*, got "):
        ops.experts(**{**arguments()["experts"], "offsets": torch.tensor(offsets)})


def test_rows_need_an_expert():
    arguments = dict(offsets=torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="^experts: offsets must .*, got none for 200 rows"):
        ops.experts(torch.ones(200, 8), [torch.ones(0, 8, 8)], **arguments)


@pytest.mark.parametrize("offsets", [[1, T], [0, 3, 2, T], [0, T + 1], [0, T - 1], [T], []])
def test_group_offsets_run_from_0_to_the_number_of_tokens(offsets):
    offsets = torch.tensor(offsets, dtype=torch.int64)
    refuses("load", ValueError, "group_offsets must", group_offsets=offsets)


@pytest.mark.parametrize(
    "op, name",
    [
        ("noisy_topk_gating", "noise"),
        ("load", "threshold"),
    ],
)
def test_types_that_do_not_fit(op, name):
    tensor = arguments()[op][name]
    refuses(op, TypeError, r"\w+ must", **{name: tensor.double()})


@pytest.mark.parametrize(
    "op, name",
    [
        (op, name)
        for op, name in TENSORS
        if sum(isinstance(x, torch.Tensor) for x in arguments()[op].values()) > 1
    ],
)
def test_devices_that_do_not_fit(op, name):
    refuses(op, ValueError, r"\S+ must", **{name: arguments()[op][name].to("meta")})


def test_experts_op():
    rows, offsets = torch.randn(6, D), torch.tensor([0, 2, 6])
    w1, w2 = torch.randn(2, D, F), torch.randn(2, F, D)
    b1, b2 = torch.randn(2, F), torch.randn(2, D)
    inverse, gates = torch.arange(6).view(3, 2), torch.rand(3, 2)
    call = dict(x=rows, weights=[w1, w2], biases=[b1, b2], offsets=offsets)
    ops.experts(**call)
    assert F % 2 == 1
    for error, pattern, changes in (
        (ValueError, "activation must .*'rely'", dict(activation="rely")),
        (ValueError, "activation must .*', '", dict(activation=", ")),
        (ValueError, r"weights\[1\] must", dict(weights=[w1, w1])),
        (ValueError, r"weights\[1\] must", dict(weights=[w1, w2[:1]])),
        (TypeError, "x must .*float64, got float32", dict(weights=[w1.double(), w2.double()])),
        (TypeError, r"weights\[0\] must", dict(weights=[w1.long(), w2])),
        (TypeError, r"weights\[1\] must", dict(weights=[w1, w2.double()])),
        (ValueError, r"weights\[0\] must have 3 dim", dict(weights=[w1[0], w2])),
        (
            ValueError,
            r"weights\[0\] must .*even",
            dict(activation="glu", weights=[w1, w2]),
        ),
        (ValueError, "weights and biases must", dict(biases=[b1])),
        (ValueError, "weights and biases must", dict(weights=[], biases=None)),
        (ValueError, r"biases\[1\] must", dict(biases=[b1, b1])),
        (TypeError, r"biases\[0\] must", dict(biases=[b1.double(), b2])),
        (ValueError, "inverse must be given", dict(gates=gates)),
        (ValueError, "gates must", dict(x=rows[:3], inverse=inverse, gates=gates[:2])),
        (ValueError, "x must", dict(inverse=inverse)),
        (ValueError, "the number of rows must be a multiple", dict(x=rows[:5], offsets=None)),
        (ValueError, "inverse must have 1 dim", dict(inverse=inverse, token_offsets=offsets)),
    ):
        with pytest.raises(error, match=f"^experts: {pattern}") as caught:
            ops.experts(**{**call, **changes})
        assert ", got " in str(caught.value)


def test_backward_operators_check_what_memory_depends_on():
    """They are out of reach through autograd, but must not crash whoever calls them."""
    x, rows = torch.randn(4, 3), torch.randn(8, 3)
    index = torch.tensor([[0, 1], [1, 2], [0, 2], [1, 0]])
    gates, inverse = torch.rand(4, 2), torch.arange(8).view(4, 2)
    weight, offsets = torch.randn(5, 3, 2), torch.tensor([0, 2, 4, 4, 4, 8])
    op = torch.ops.moe_ext
    grad = torch.randn(8, 2)

    def experts_backward(grad, offsets, inverse=None, token_offsets=None, gates=None, hidden=()):
        routing = (offsets, inverse, token_offsets, gates)
        layers = ([weight], [], hidden, "relu")
        return op._experts_backward(grad, rows, *routing, *layers, True, True)

    for error, call in (
        (ValueError, lambda: experts_backward(grad, torch.empty(0).long())),
        (ValueError, lambda: experts_backward(grad, offsets[:2])),
        (ValueError, lambda: experts_backward(rows, offsets)),
        (ValueError, lambda: experts_backward(grad, offsets, hidden=[grad])),
        (IndexError, lambda: experts_backward(grad, offsets, torch.arange(1, 9)[:, None])),
        (IndexError, lambda: op._dispatch_backward(rows, inverse + 1, None)),
        (TypeError, lambda: op._dispatch_backward(rows, inverse.float(), None)),
        (ValueError, lambda: op._dispatch_backward(rows[:7], inverse, None)),
        (ValueError, lambda: op._combine_backward(x[:3], rows, gates, inverse, None)),
        (ValueError, lambda: op._combine_backward(x, rows, gates, torch.zeros_like(inverse), None)),
        (
            IndexError,
            lambda: op._noisy_topk_gating_backward(
                gates, None, None, gates, index + 1, index[:, :2], x, None, None
            ),
        ),
        (
            ValueError,
            lambda: op._load_backward(gates[0], x, x.abs(), torch.zeros(4, 2), index, None),
        ),
        (
            ValueError,
            lambda: op._load_backward(x[:1], x, x.abs(), torch.zeros(4, 2), index, offsets[:2]),
        ),
    ):
        with pytest.raises(error, match=r"^\w+: \w+ must "):
            call()


def test_rows_named_twice_are_refused():
    repeated = torch.zeros(4, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="dispatch: inverse must hold each row once, got 0 twice"):
        ops.dispatch(torch.randn(4, 3), repeated)
    with pytest.raises(ValueError, match="combine: inverse must hold each row once"):
        ops.combine(torch.randn(8, 3), torch.rand(4, 2), repeated)
