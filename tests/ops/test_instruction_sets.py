"""Every instruction set of the processor: its GEMMs, and which bits are those of the others.

A child process runs each one, because a process chooses its instruction set at the first call.
"""

import math
import os
import pickle

import operators
import pytest
import test_packed_experts as packed
import test_products as products
import torch
from machine import instruction_sets
from samples import draw
from workers import forkserver

from moe_ext import _build, ops

MULTIPLY_BFLOAT16 = {"avx512_bf16", "amx", "neon_bf16"}  # They do not round each product.


def hashes_of_every_depth():
    """Yields hashes of y, dx and dW at every depth, among 1 to 14 rows."""
    offsets, most = draw.offsets_of(range(1, 15)), max(products.DEPTHS)
    for dtype in products.DTYPES:
        numbers = draw.normal(14 * most * 48, dtype=dtype)  # those of each depth begin with these

        def first(*shape, numbers=numbers):
            return numbers[: math.prod(shape)].view(shape)

        for depth in products.DEPTHS:
            results = []
            for D, F in ((depth, 17), (depth, 48), (48, depth)):
                x, dy = first(105, D).clone(), first(105, F)
                leaves = x.requires_grad_(), first(14, D, F).clone().requires_grad_()
                y = ops.experts(x, [leaves[1]], offsets=offsets)
                results += [y.detach(), *torch.autograd.grad(y, leaves, dy)]
            yield f"experts depth {depth} {dtype}", operators.hash_of(results)


def hashes_of_integers():
    """Yields hashes of packed experts in integer arithmetic."""
    for format in packed.INTEGER:
        arguments = packed.layer(13, torch.float32, format)
        yield (
            f"packed_experts integers {format}",
            operators.hash_of([ops.packed_experts(**arguments, arithmetic="integer")]),
        )


def check_gemms():
    """Repeats tests of GEMMs on the instruction set of this process."""
    torch.manual_seed(0)
    for dtype in products.DTYPES:
        products.test_any_width(dtype)
        products.test_any_number_of_rows(dtype, 17, 33)
        products.test_layout_changes_nothing(dtype)
        for depth in products.DEPTHS[::10]:
            products.check_each_row_alone(depth, 17, range(2, 40), dtype)
            products.check_each_row_alone(48, depth, range(2, 40), dtype)
    for format in packed.FORMATS:
        for dtype in (torch.bfloat16, torch.float16):
            packed.test_results_are_those_of_experts(format, dtype, T=5)


def hashes_of(calls):
    """Returns hashes of all results on the instruction set of this process."""
    torch.manual_seed(0)
    return dict([*hashes_of_every_depth(), *hashes_of_integers(), *operators.hashes(calls)])


def send_results(isa, pipe, path):
    os.environ["MOE_EXT_ISA"] = isa
    assert _build.isa() == isa
    torch.set_num_threads(1)
    check_gemms()
    pipe.send(hashes_of(pickle.loads(path.read_bytes())))


def test_instruction_sets(one_thread, tmp_path):
    """Vectors of 2, 4 or 8 numbers use the same order of operations, so results are identical.

    GEMMs are the exception. Without fused multiply-adds each of their terms is rounded twice, and
    some instructions multiply bfloat16 numbers directly.
    """
    names = instruction_sets()
    if len(names) == 1:
        pytest.skip("only one instruction set on this processor")
    calls, path = [*operators.precise_calls()], tmp_path / "calls"
    path.write_bytes(pickle.dumps(calls))
    context, pipes = forkserver(), {}
    for isa in names:
        if isa != _build.isa():
            pipes[isa], sender = context.Pipe(duplex=False)
            context.Process(target=send_results, args=(isa, sender, path)).start()
            sender.close()
    hashes = {_build.isa(): hashes_of(calls)}
    for isa, pipe in pipes.items():
        try:
            hashes[isa] = pipe.recv()
        except EOFError:
            pytest.fail(f"{isa} failed; its error is above")
    expected, differing = hashes[names[1]], []
    for isa in names:
        assert hashes[isa].keys() == expected.keys()
        for line, bits in hashes[isa].items():
            rounds = isa == "default" or (isa in MULTIPLY_BFLOAT16 and "bfloat16" in line)
            rounds &= "integers" not in line
            if bits != expected[line] and not (operators.ROWS[line.split()[0]].products and rounds):
                differing.append((isa, line))
    assert not differing
