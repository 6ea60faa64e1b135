"""Samples of `factored_step_`."""

import math

import reference as ref
import torch
from samples import draw, wrong
from samples.row import NO_GRADIENT, Operator


def factored_step(**arguments):
    """Runs the operator on copies; returns the changed tensors."""
    arguments |= {name: arguments[name].clone() for name in ("param", "row", "column")}
    torch.ops.moe_ext.factored_step_(**arguments)
    return arguments["param"], arguments["row"], arguments["column"]


def make_step(dtype, shape, rule="adam"):
    grad = draw.normal(*shape, dtype=dtype)
    grad[..., :1, :] = 0
    if len(shape) > 2:
        grad[:1] = 0  # an expert without tokens
    beta2, t = 0.9, 2
    decay, gain, correction = (1, 1, 1) if rule == "adagrad" else (beta2, 1 - beta2, 1 - beta2**t)
    return dict(
        param=draw.normal(*shape, dtype=dtype),
        grad=grad,
        row=torch.rand(shape[:-1]).to(draw.wide(dtype)),
        column=torch.rand(*shape[:-2], shape[-1]).to(draw.wide(dtype)),
        lr=torch.tensor(0.1, dtype=torch.float64),
        correction=torch.tensor(1 / correction, dtype=torch.float64),
        decay=float(decay),
        gain=float(gain),
        eps=1e-3,
        mean_of_roots=rule == "diet",
    )


def reference_step(param, grad, row, column, lr, decay, mean_of_roots, **rest):
    results = []
    matrices = zip(
        *(x.reshape(-1, *x.shape[param.dim() - 2 :]) for x in (param, grad)),
        row.reshape(-1, row.shape[-1]),
        column.reshape(-1, column.shape[-1]),
        strict=True,
    )
    for w, g, vr, vc in matrices:
        if decay == 1:
            results.append(ref.FactoredAdagrad(w, g, vr, vc, lr, rest["eps"]))
        else:
            rule = "diet" if mean_of_roots else "paper"
            results.append(ref.FactoredAdam(w, g, vr, vc, 2, lr, decay, rest["eps"], rule))
    w, vr, vc = (torch.stack(values) for values in zip(*results, strict=True))
    return w.view_as(param), vr.view_as(row), vc.view_as(column)


# fmt: off
TABLE = {
    "factored_step_": Operator(
        function=factored_step, make=make_step, reference=reference_step,
        equations=("App. D",),
        lacks=NO_GRADIENT | {
            "half_types": "layer/test_optim.py has its precision",
            "limits": "it counts nothing", "nan": "every number depends on it",
            
        },
        samples=[
            dict(shape=shape, rule=rule) for rule in ("adam", "diet", "adagrad")
            for shape in ((4, 7, 5), (9, 3), (2, 2, 3, 4), (3, 1, 4), (3, 4, 1))
        ],
        typical=[dict(shape=(3, 5, 4)), dict(shape=(6, 7), rule="diet"), dict(shape=(0, 4, 3)),
                 dict(shape=(2, 0, 3)), dict(shape=(2, 3, 0))],
        # Threads share few matrices; each of many matrices has one thread.
        large=[dict(shape=shape, rule=rule) for shape, rule in [
            ((1, 200, 130), "adam"), ((2, 130, 70), "diet"),
            ((40, 65, 20), "diet"), ((1, 3, 4096), "adam"),
        ]],
        precise=[dict(shape=(3, 70, 43), rule=rule) for rule in ("adam", "diet")],
        free=dict(dimensions=("param",)),
        bad=[
            (ValueError, "param", dict(param=torch.zeros(3))),
            (ValueError, "grad", wrong.shorter("grad", 2)),
            (ValueError, "row", dict(row=torch.zeros(3, 4))),
            *wrong.doubles("grad", "row"),
            (ValueError, "column", dict(column=torch.zeros(4))),
            (TypeError, "lr", dict(lr=torch.zeros(()))),
            *wrong.numbers("decay", -0.1), *wrong.numbers("gain", math.nan),
            *wrong.numbers("eps", 0, 1e-50),
        ],
    ),
}
