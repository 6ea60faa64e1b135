"""A device without hardware: what a layer would do on CUDA with NCCL.

A `Far` tensor reports the device "far:0" and holds a CPU tensor. Operators compute on the CPU
tensors inside, and collectives run on gloo. An operator that mixes `Far` tensors with CPU tensors
of more than 0 dimensions raises an error, as on CUDA. So does a collective with a CPU tensor or
a non-contiguous tensor, as with NCCL.

torch cannot run autograd for "cuda" without a driver. So the device is PrivateUse1, which is "not
the CPU" for the layer, as CUDA is.
"""

import contextlib
from collections import Counter
from unittest.mock import patch

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

# Operators that make the host wait for the device.
_WAITS = {
    f"aten::{name}"
    for name in (
        "_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero",
        "unique_dim", "_unique2", "unique_consecutive",
    )
}  # fmt: skip
_COPIES = {"aten::copy_", "aten::_to_copy", "aten::_foreach_copy_"}
_COLLECTIVES = {
    "c10d::alltoall_base_": "all-to-all",
    "c10d::allreduce_": "all-reduce",
    "c10d::_allgather_base_": "all-gather",
}
_noted: Counter[str] | None = None


def note(what):
    if _noted is not None:
        _noted[what] += 1


class Far(torch.Tensor):
    """A tensor on the device."""

    @staticmethod
    def __new__(cls, elem):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            elem.shape,
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            device=torch.device("far", 0),
        )

    def __init__(self, elem):
        self.elem = elem

    def tolist(self):  # of C++, which would read the memory
        note("synchronization")
        return self.elem.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def run(func, args, kwargs):
    """Runs an operator on the CPU tensors inside; notes collectives and synchronizations."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    far = [t for t in tensors if isinstance(t, Far)]
    near = [t for t in tensors if not isinstance(t, Far)]
    name = func._schema.name
    if func.namespace == "c10d":
        assert not near, f"{name} gets a CPU tensor"
        assert all(t.is_contiguous() for t in tensors), f"{name} gets a tensor with gaps"
        note(_COLLECTIVES[name])
    elif far and name not in _COPIES:
        mixed = [tuple(t.shape) for t in near if t.dim()]
        assert not mixed, f"{name} mixes tensors of two devices: {mixed}"
    target = kwargs.get("device")
    is_far = bool(far) if target is None else torch.device(target).type == "far"
    if is_far and target is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    leaves = far and not is_far and torch.device(target).type == "cpu"
    if name == "aten::copy_" and not isinstance(args[0], Far):
        leaves = bool(far)
    masks = func._opname in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
        t.dtype == torch.bool for t in tree_leaves(args[1]) if isinstance(t, torch.Tensor)
    )
    if leaves or masks or (far and name in _WAITS):
        note("synchronization")
    inside = tree_map_only(Far, lambda t: t.elem, (args, kwargs))
    out = func(*inside[0], **inside[1])
    if not is_far or name == "aten::_local_scalar_dense":
        return out
    own = {id(t.elem): t for t in far}  # operators in place return their own argument
    return tree_map_only(torch.Tensor, lambda t: own[id(t)] if id(t) in own else Far(t), out)


class _Mode(TorchDispatchMode):
    """Lets factory functions make `Far` tensors."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


@contextlib.contextmanager
def device():
    """Provides the device in the block."""
    if torch._C._get_privateuse1_backend_name() != "far":
        backend_registration._setup_privateuseone_for_python_backend("far")
    tensor = torch.tensor

    def make(data, *, device=None, **options):  # C++ would copy without the mode
        if device is None or torch.device(device).type != "far":
            return tensor(data, device=device, **options)
        return Far(tensor(data, **options))

    with (
        patch.object(torch, "tensor", make),
        torch.autograd.set_multithreading_enabled(False),
        _Mode(),
    ):
        yield


@contextlib.contextmanager
def counted():
    """Yields the numbers of collectives and synchronizations of the block, by name."""
    global _noted
    _noted = counts = Counter()
    try:
        yield counts
    finally:
        _noted = None


def moved(module):
    """Moves a module to the device, as module.to would."""
    done = {}

    def move(tensor):
        far = tensor if isinstance(tensor, Far) else Far(tensor.detach())
        return done.setdefault(id(tensor), (far, tensor))[0]  # keeps the tensor, so its id

    swaps = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return module._apply(move)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(swaps)
