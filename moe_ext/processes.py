"""The processes that train together, and the differentiable collectives between them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from moe_ext.checks import require


class Processes:
    """The processes of a group, or this one alone: then nothing is communicated.

    The gradient of everything that crosses between them is that of the sum of the losses of all
    processes. Each collective has to be entered by all of them, in the same order; so has its
    backward pass.

    Args:
        group: None is this process alone.

    Attributes:
        group: as given.
        size, rank: of the group; 1 and 0 without one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Processes":
        return self  # a copy of a module trains with the same processes

    def sum(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Each of some tensors summed over the processes, in one collective.

        Args:
            values: of one type, and of the same shapes in every process.
        """
        if self.size == 1 or not values:
            return values
        total = _Sum.apply(torch.cat([value.reshape(-1) for value in values]), self)
        parts = total.split([value.numel() for value in values])
        # No views: wrappers such as FSDP2 warn of those in a module's outputs.
        return tuple(p.view_as(value).clone() for p, value in zip(parts, values, strict=True))

    def gather(self, values: Tensor) -> Tensor:
        """The values of every process, [size, ...]; no gradient."""
        gathered = values.new_empty(self.size * values.numel())
        dist.all_gather_into_tensor(gathered, values.flatten(), group=self.group)
        return gathered.view(self.size, *values.shape)

    def gather_objects(self, value: Any) -> list[Any]:
        """What each process has, by rank; anything that can be pickled."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


def blocks(whole: range, number: int) -> list[range]:
    """A range in contiguous blocks, the first of them longer by one where it does not divide."""
    share, rest = divmod(len(whole), number)
    bounds = [whole.start + i * share + min(i, rest) for i in range(number + 1)]
    return [range(first, last) for first, last in pairwise(bounds)]


def columns_of(counts: Tensor, total: int) -> Tensor:
    """The column of each of counts[r, c] items that lie one after the other, row by row; [total].

    Args:
        counts: [rows, columns] int64.
        total: their sum, which so need not be read from the device.
    """
    column = torch.arange(counts.shape[1], device=counts.device).repeat(len(counts))
    return column.repeat_interleave(counts.flatten(), output_size=total)


class Layout(NamedTuple):
    """How the processes that train together divide a layer.

    Attributes:
        world: all of them, each with tokens of its own.
        expert_parallel: those that share the experts; the exchange is among them.
        replicas: those that have the same experts as this one.
    """

    world: Processes
    expert_parallel: Processes
    replicas: Processes

    @classmethod
    def of(cls, group: dist.ProcessGroup | DeviceMesh | None) -> "Layout":
        """Of a process group, all of which share the experts, or of a mesh of
        [replicas, expert_parallel].

        Raises:
            ValueError: the mesh has more than two dimensions, or two without names.
        """
        if not isinstance(group, DeviceMesh):
            processes = Processes(group)
            return cls(processes, processes, Processes())
        name = "Layout: process_group"
        require(group.ndim <= 2, name, "be a mesh of 1 or 2 dimensions", group.ndim)
        if group.ndim == 1:
            return cls.of(group.get_group())
        names = group.mesh_dim_names
        require(names is not None, name, "be a mesh with mesh_dim_names", names)
        world = group._flatten().get_group()
        return cls(*map(Processes, (world, group.get_group(1), group.get_group(0))))


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, processes: Processes) -> Tensor:
        ctx.processes = processes
        total = values.clone()
        dist.all_reduce(total, group=processes.group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.processes.group)
        return total, None


def scale_grad(x: Tensor, factor: float) -> Tensor:
    """x, with a gradient that is multiplied by `factor`."""
    return _ScaleGrad.apply(x, factor)


class _ScaleGrad(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class Transfer:
    """Rows on their way from every process to every other.

    They travel from here on, until `wait` returns what the others sent; work can be done in
    between. The gradients go the other way and overlap likewise: the backward pass starts them
    where the forward pass waited, and waits where that began.

    Args:
        rows: [sum(num_sent), ...], those for the first process, for the second, …
        processes: between which.
        num_sent, num_received: the number of rows to and from each process.
    """

    def __init__(
        self,
        rows: Tensor,
        processes: Processes,
        num_sent: Sequence[int],
        num_received: Sequence[int],
    ) -> None:
        self._group = processes.group
        self._num_sent = list(num_sent)
        self._num_received = list(num_received)
        # Has no elements: it ties the two ends together in the graph.
        self._token: Tensor | None = _Start.apply(rows, self)

    def wait(self) -> Tensor:
        """What arrived, [sum(num_received), ...], by process; to be called once."""
        token, self._token = self._token, None  # or the graph would hold itself
        return _Wait.apply(token, self)

    def start(self, rows: Tensor, back: bool = False) -> None:
        sent, received = self._num_sent, self._num_received
        if back:
            sent, received = received, sent
        rows = rows.contiguous()  # kept until it has been sent
        buffer = rows.new_empty(sum(received), *rows.shape[1:])
        work = dist.all_to_all_single(
            buffer, rows, received, sent, group=self._group, async_op=True
        )
        assert work is not None  # this process is in the group
        self._under_way = buffer, rows, work

    def finish(self) -> Tensor:
        buffer, _, work = self._under_way
        del self._under_way
        work.wait()
        return buffer


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer.start(rows)
        return rows.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.transfer.finish(), None


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.finish()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.transfer.start(grad, back=True)
        return grad.new_empty(0), None
