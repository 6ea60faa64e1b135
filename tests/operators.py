"""Inputs of the operators that several test files share."""

import math

import torch

GATED = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu", "glu": "sigmoid"}
ACTIVATIONS = ["relu", "gelu", "silu", "tanh", "sigmoid", "identity", *GATED]


def offsets_of(counts, device="cpu"):
    return torch.tensor([0, *counts], device=device).cumsum(0)


def normal(*shape, device="cpu", dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64).to(dtype).to(device)


def make_linear(counts, D, F, device="cpu", dtype=torch.float64, bias=True):
    """rows, weight and bias of one grouped linear map"""
    tensors = [
        normal(sum(counts), D, device=device, dtype=dtype),
        normal(len(counts), D, F, device=device, dtype=dtype) / math.sqrt(D),
    ]
    return [*tensors, normal(len(counts), F, device=device, dtype=dtype)] if bias else tensors


def make_experts(counts, widths, activation, device="cpu", dtype=torch.float64):
    """rows, weights and biases of experts with hidden layers"""
    weights, biases = [], []
    for i, (d_in, d_out) in enumerate(zip(widths, widths[1:], strict=False)):
        d_out *= 2 if activation in GATED and i < len(widths) - 2 else 1
        _, w, b = make_linear(counts, d_in, d_out, device, dtype)
        weights.append(w)
        biases.append(b)
    return normal(sum(counts), widths[0], device=device, dtype=dtype), weights, biases


def tie_break(column, row):
    """What decides between equal scores of batchwise_topm: the larger of these."""
    hash = (column * 0x9E3779B9 + row) % 2**32
    hash = (hash ^ (hash >> 16)) * 0x7FEB352D % 2**32
    hash = (hash ^ (hash >> 15)) * 0x846CA68B % 2**32
    return (hash ^ (hash >> 16)) >> 2
