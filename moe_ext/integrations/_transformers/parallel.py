"""Expert parallelism of transformers on `moe_ext.distributed.Exchange` (Sec. 3)."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F
from transformers.distributed.expert_parallel import EPImplementation, MoEParamShard

from moe_ext.checks import require
from moe_ext.dispatch._exchange import Exchange
from moe_ext.ranks._rows import columns_of
from moe_ext.ranks.collectives import Ranks
from moe_ext.ranks.placement import ExpertPlacement
from moe_ext.routing import Routing


class _ShardPlacement(ExpertPlacement):
    """Assigns experts to ranks as ``torch.distributed.tensor.Shard(0)`` does.

    Each rank has ceil(num_experts / num_ranks) experts. The last ranks may have fewer, or none.
    """

    def experts_of(self, rank: int) -> range:
        size, first = Shard.local_shard_size_and_offset(self.num_experts, self.num_ranks, rank)
        return range(first, first + size)


class ExchangeParallel(EPImplementation):
    """Computes an experts module of transformers whose experts are sharded over ranks.

    A token is sent once to each rank that owns some of its experts. These ranks return the weighted
    sum of their experts' outputs. The experts run with the experts implementation of the model.

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
            all(isinstance(p, DTensor) and p.device_mesh == ep_mesh for p in parameters),
            "ep_implementation='moe_ext': ep_plan",
            "shard each parameter of the experts, with 'grouped_gemm' or 'moe_ext_experts'",
            type(experts).__name__,
        )
        self._module = experts
        placement = _ShardPlacement(parameters[0].shape[0], ep_mesh.size())
        ranks = Ranks(ep_mesh.get_group())
        self.exchange = Exchange(placement, ranks, "tokens", reduction="sum")

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Computes the output [T, D] of this rank's tokens.

        Args:
            hidden_states: [T, D]. ``requires_grad`` must agree on all ranks.
            top_k_index: [T, K], over the experts of all ranks.
            top_k_weights: [T, K].
        """
        x, expert_index, gates = (
            self._slice(tensor) for tensor in (hidden_states, top_k_index, top_k_weights)
        )
        unused = gates.new_empty(0)  # the exchange reads neither importance nor load
        routing = Routing(gates, expert_index.long(), importance=unused, load=unused)
        y, _ = self.exchange(x, routing, self._experts, fused=False)
        return self._join(y, hidden_states.shape)

    def _slice(self, whole: Tensor) -> Tensor:
        """Returns this rank's rows of a tensor that the ranks of tp_mesh share."""
        if self.tp_mesh.size() == 1:
            return whole
        shared = DTensor.from_local(whole, self.tp_mesh, [Replicate()], run_check=False)
        return shared.redistribute(self.tp_mesh, [Shard(0)]).to_local()

    def _join(self, y: Tensor, shape: torch.Size) -> Tensor:
        """Gathers the rows of the ranks of tp_mesh; the backward pass takes this rank's rows."""
        if self.tp_mesh.size() == 1:
            return y
        stride = (shape[1], 1)
        shards = DTensor.from_local(
            y.contiguous(), self.tp_mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
        )
        return shards.full_tensor()

    def _experts(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Computes the outputs of rows sorted by expert, both [R, D]."""
        if self.num_local_experts == 0:  # the parameters, without elements, still need a gradient
            parameters = self._module.parameters(recurse=False)
            # The factor gives a contiguous gradient. For another, torch 2.11 waits for all ranks.
            return rows + sum((1.0 * parameter).sum() for parameter in parameters)
        num_rows = len(rows)
        index = columns_of(offsets.diff()[None], num_rows)
        if num_rows == 0:
            # Some implementations refuse 0 rows. The parameters still need a gradient.
            rows, index = F.pad(rows, (0, 0, 0, 1)), index.new_zeros(1)
        ones = torch.ones_like(index, dtype=rows.dtype)
        y: Tensor = self.experts_forward(rows, index[:, None], ones[:, None])
        return y[:num_rows]


class UnevenShard(MoEParamShard):
    """Shards the experts over the ranks; their number may be any.

    Use it in ep_plan in place of "grouped_gemm", which needs a multiple of the number of ranks.
    """

    def __init__(self) -> None:
        super().__init__(Shard(0))

    def validate_param(
        self, module: nn.Module, param: str, mesh: DeviceMesh, parameter_name: str | None = None
    ) -> None:
        """Raises a ValueError if an implementation other than `ExchangeParallel` is configured."""
        options = getattr(getattr(module, "config", None), "distributed_config", None)
        name = "moe_ext" if options is None else options.ep_implementation
        option = f"'moe_ext_experts' of {parameter_name}: ep_implementation"
        require(name == "moe_ext", option, "be 'moe_ext'", name)

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Replaces a parameter [E, ...] of the module by the shard of this rank."""
        super().shard_param(module, param, mesh)  # type: ignore[no-untyped-call]
        parameter = module._parameters[param]
        if isinstance(parameter, DTensor):
            vars(module).update(num_experts=len(parameter.to_local()), _is_expert_parallel=True)
