"""Shards the layers of an existing model by torch's parallelize_module."""

from dataclasses import replace

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from moe_ext._compiled import unwrapped_module
from moe_ext.checks import require
from moe_ext.dispatch._dispatchers import make_dispatcher
from moe_ext.dispatch._sharding import ExpertParallel, ExpertSharding, parallel_options
from moe_ext.distributed._dtensors import distribute_experts, require_even
from moe_ext.experts import FeedForwardExperts
from moe_ext.moe import MoE

__all__ = ["ExpertParallelStyle"]


class ExpertParallelStyle(ParallelStyle):
    """Shards the experts of a `MoE` layer that exists, for torch's ``parallelize_module``.

    The layer is made without a process group, so every rank has all of its experts, also on the
    meta device. All ranks start with the values of the rank ``src_data_rank`` of the mesh. Then
    each rank keeps its experts only, as DTensors; see `distribute_experts`. The gradients of all
    other parameters must be averaged over the ranks, as `parallelize` does.

    Args:
        parallel: how ranks share the experts; its process_group is None, as the mesh of
            ``parallelize_module`` takes its place. None: the defaults of `ExpertParallel`.

    Raises:
        TypeError: parallel has the wrong type, or the module is not a `MoE` with
            `FeedForwardExperts`.
        ValueError: parallel has a process_group, the layer has one already, or an option does not
            fit the layer.

    Example:
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> style = ExpertParallelStyle(ExpertParallel(None, exchange="tokens"))
        >>> def shard(model, mesh):
        ...     return parallelize_module(model, mesh, {"layers.*.moe": style})
    """

    def __init__(self, parallel: ExpertParallel | None = None) -> None:
        super().__init__()
        owner = type(self).__name__
        parallel = parallel_options(owner, None, parallel) or ExpertParallel(None)
        group = parallel.process_group
        require(group is None, f"{owner}: parallel", "have no process_group", type(group).__name__)
        self._parallel: ExpertParallel = parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Shards a layer over the ranks of a mesh of one dimension."""
        owner = type(self).__name__
        layer = unwrapped_module(module)
        experts = unwrapped_module(layer.experts) if isinstance(layer, MoE) else None
        if not isinstance(layer, MoE) or not isinstance(experts, FeedForwardExperts):
            kind = type(layer).__name__ + (f" with {type(experts).__name__}" if experts else "")
            rule = "must be a MoE with FeedForwardExperts"
            raise TypeError(f"{owner}: module {rule}, got {kind}")
        rule = "be made without a process group"
        require(layer.sharding is None, f"{owner}: module", rule, layer.sharding)
        options = replace(self._parallel, process_group=device_mesh)
        # The layer does not change before all checks.
        sharding = ExpertSharding(options, layer.gate, layer.num_experts)
        sharding.require_experts(experts)
        require_even(owner, sharding)
        group = device_mesh.get_group()
        if self.src_data_rank is not None:
            for value in (*layer.parameters(), *layer.buffers()):
                if not value.is_meta:
                    dist.broadcast(value.detach(), group_src=self.src_data_rank, group=group)
        layer.dispatcher = make_dispatcher(sharding, layer.gate, layer.num_experts)
        local = sharding.local_experts
        for name, param in experts.named_parameters():
            rows = param.detach()[local.start : local.stop].clone()
            setattr(experts, name, nn.Parameter(rows, param.requires_grad))
        experts.num_experts, experts.first_expert = len(local), local.start
        distribute_experts(layer, device_mesh)
        return module
