"""Expert parallelism of transformers on `moe_ext.distributed.Exchange` (Sec. 3)."""

from math import ceil

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers.distributed.expert_parallel import EPImplementation, MoEParamShard

from moe_ext.checks import require
from moe_ext.distributed._rows import columns_of
from moe_ext.distributed.exchange import Exchange, _scale_grad
from moe_ext.distributed.placement import ExpertPlacement
from moe_ext.distributed.ranks import Ranks
from moe_ext.gates import Routing


class _ShardPlacement(ExpertPlacement):
    """Assigns experts to ranks as ``torch.distributed.tensor.Shard(0)`` does.

    Each rank has ceil(num_experts / num_ranks) experts. The last ranks may have fewer, or none.
    """

    def experts_of(self, rank: int) -> range:
        size = ceil(self.num_experts / self.num_ranks)
        return range(self.num_experts)[rank * size : (rank + 1) * size]


class ExchangeParallel(EPImplementation):
    """Computes an experts module of transformers whose experts are sharded over ranks.

    An all-to-all sends the row of each (token, expert) pair to the owner of the expert. The rows
    come back by a second all-to-all. The rank of the token computes their weighted sum.

    The gradients of the experts are the sum of the gradients of the ranks' losses, as with
    "all_to_all" of transformers. If the ranks of tp_mesh share a batch, each rank sends a slice.

    Args:
        experts: the experts module with the parameters of this rank.
        ep_mesh: the ranks that share the experts.
        tp_mesh: the ranks that share a batch.

    Raises:
        ValueError: the parameters of experts are not sharded over ep_mesh.
    """

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        parameters = list(experts.parameters(recurse=False))
        require(
            all(isinstance(each, DTensor) and each.device_mesh == ep_mesh for each in parameters),
            "ep_implementation='moe_ext': ep_plan",
            "shard each parameter of the experts, with 'grouped_gemm' or 'moe_ext_experts'",
            type(experts).__name__,
        )
        self._module = experts
        placement = _ShardPlacement(parameters[0].shape[0], ep_mesh.size())
        self.exchange = Exchange(placement, Ranks(ep_mesh.get_group()))

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Computes the output [T, D] of this rank's tokens.

        Args:
            hidden_states: [T, D].
            top_k_index: [T, K], over the experts of all ranks.
            top_k_weights: [T, K].
        """
        shape = hidden_states.shape
        x, expert_index, gates = (
            self._slice(each) for each in (hidden_states, top_k_index, top_k_weights)
        )
        # Exchange computes the gradients of the mean of the losses, transformers those of the sum.
        size = self.ep_mesh.size()
        x, gates = _scale_grad(x, 1 / size), _scale_grad(gates, 1 / size)
        unused = gates.new_empty(0)
        routing = Routing(gates, expert_index.long(), unused, unused)
        y, _ = self.exchange(x, routing, self._experts, fused=False)
        y = _scale_grad(y, size)
        if self.tp_mesh.size() == 1:
            return y
        # All ranks have the gradient of the whole batch; the backward pass takes this slice of it.
        stride = (shape[1], 1)
        shards = DTensor.from_local(
            y.contiguous(), self.tp_mesh, [Shard(0)], shape=shape, stride=stride
        )
        return shards.full_tensor()

    def _slice(self, whole: Tensor) -> Tensor:
        """Returns this rank's rows of a tensor that the ranks of tp_mesh share."""
        if self.tp_mesh.size() == 1:
            return whole
        shared = DTensor.from_local(whole, self.tp_mesh, [Replicate()], run_check=False)
        return shared.redistribute(self.tp_mesh, [Shard(0)]).to_local()

    def _experts(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Computes the outputs of rows sorted by expert, both [R, D]."""
        if self.num_local_experts == 0:  # the parameters, without elements, still need a gradient
            return rows + sum(each.sum() for each in self._module.parameters(recurse=False))
        num_rows = len(rows)
        index = columns_of(offsets.diff()[None], num_rows)
        if num_rows == 0:
            # Some implementations refuse 0 rows. The parameters still need a gradient.
            rows, index = rows.sum(0, keepdim=True), index.new_zeros(1)
        ones = torch.ones_like(index, dtype=rows.dtype)
        y: Tensor = self.experts_forward(rows, index[:, None], ones[:, None])
        return y[:num_rows]


class UnevenShard(MoEParamShard):
    """Shards the experts over the ranks; their number may be any.

    Use it in ep_plan in place of "grouped_gemm", which needs a multiple of the number of ranks.
    Only `ExchangeParallel` supports such shards.
    """

    def __init__(self) -> None:
        super().__init__(Shard(0))

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Replaces a parameter [E, ...] of the module by the shard of this rank."""
        whole = module._parameters[param]
        if whole is None:
            return
        shard = distribute_tensor(whole, mesh, [self.placement], src_data_rank=None)
        module._parameters[param] = nn.Parameter(shard, requires_grad=whole.requires_grad)
        placement = _ShardPlacement(whole.shape[0], mesh.size())
        module.num_experts = len(placement.experts_of(mesh.get_local_rank()))
        module._is_expert_parallel = True
