"""The grouped GEMM of QuACK in plain torch, as a plugin of pytest that counts its calls.

`pytest -p fake_quack` defines the operator quack::gemm_out, which csrc/cuda_host/quack.h calls.
"""

import torch

# Of quack-kernels 0.6.5.
SCHEMA = (
    "gemm_out(Tensor A, Tensor B, Tensor(a2!) out, Tensor? bias=None, float alpha=1., "
    "Tensor? alpha_tensor=None, Tensor? cu_seqlens_m=None, Tensor? cu_seqlens_k=None, "
    "Tensor? A_idx=None, Tensor? batch_idx_permute=None, bool dynamic_scheduler=False, "
    "bool tuned=True, SymInt rounding_mode=0, SymInt sr_seed=0, Tensor? sr_seed_tensor=None, "
    "str? concat_layout=None, Tensor? SFA=None, Tensor? SFB=None, str? bs_format_a=None, "
    "str? bs_format_b=None, SymInt? split_k=1, SymInt split_k_mode=0) -> ()"
)

calls = {"cu_seqlens_m": 0, "cu_seqlens_k": 0}


def gemm_out(
    A, B, out, bias=None, alpha=1.0, alpha_tensor=None, cu_seqlens_m=None, cu_seqlens_k=None,
    A_idx=None, batch_idx_permute=None, dynamic_scheduler=False, tuned=True,
):  # fmt: skip
    """Has the shapes and memory layouts that QuACK requires."""
    assert not tuned
    if cu_seqlens_k is None:
        calls["cu_seqlens_m"] += 1
        assert cu_seqlens_m.dtype == torch.int32 and len(cu_seqlens_m) == len(B) + 1
        assert A.stride(1) == out.stride(1) == 1 and out.shape == (len(A), B.shape[2])
        for e, (begin, end) in enumerate(cu_seqlens_m.unfold(0, 2, 1).tolist()):
            out[begin:end] = A[begin:end] @ B[e]
        return
    calls["cu_seqlens_k"] += 1
    assert cu_seqlens_k.dtype == torch.int32 and len(cu_seqlens_k) == len(out) + 1
    assert A.stride(0) == B.stride(1) == 1 and out.shape[1:] == (len(A), B.shape[1])
    for e, (begin, end) in enumerate(cu_seqlens_k.unfold(0, 2, 1).tolist()):
        # QuACK does not say what it writes for a group without columns.
        out[e] = A[:, begin:end] @ B[begin:end] if begin < end else torch.nan


def pytest_configure(config):
    config.quack = torch.library.Library("quack", "DEF")  # exists as long as config
    config.quack.define(SCHEMA)
    config.quack.impl("gemm_out", gemm_out, "CPU")


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"calls of QuACK: {[*calls.values()]}")
