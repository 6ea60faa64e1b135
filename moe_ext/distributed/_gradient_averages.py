"""Averages the gradients of parameters that several ranks have, after each backward pass."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import ProcessGroup, Work

from moe_ext.distributed._dtensors import local_part
from moe_ext.ranks.collectives import Ranks

BUCKET_BYTES = 25 * 2**20  # as in DistributedDataParallel


def average_gradients(
    model: nn.Module,
    copied: Sequence[tuple[nn.Parameter, Ranks]],
    dtype: torch.dtype | None = None,
    is_due: Callable[[], bool] = lambda: True,
) -> None:
    """Keeps parameters equal to their copies on other ranks.

    Broadcasts each parameter from the first rank that has it. After every backward pass, averages
    its gradient over these ranks. A trained parameter that a rank has not used has the gradient 0.

    Args:
        model: the model that has the parameters.
        copied: each parameter with the ranks that have a copy of it.
        dtype: the dtype of the sums; None: as the gradients.
        is_due: whether a backward pass ends with the average. An average that is left out is part
            of the next one.
    """
    for param, copies in copied:
        dist.broadcast(local_part(param.detach()), group_src=0, group=copies.group)
    due: set[int] = set()  # the running backward passes that will average

    def average(backward_pass: int) -> None:
        due.discard(backward_pass)
        if is_due():
            _average([(param, copies) for param, copies in copied if param.requires_grad], dtype)

    def schedule(_: Tensor) -> None:
        backward_pass = torch._C._current_graph_task_id()
        if backward_pass not in due:
            due.add(backward_pass)
            Variable._execution_engine.queue_callback(partial(average, backward_pass))

    # Any parameter schedules the average: a rank may have used none of its copies.
    for param in model.parameters() if copied else ():
        if param.is_floating_point():
            trained = param.requires_grad
            param.requires_grad_()  # a frozen parameter, which may be trained later, takes no hook
            param.register_post_accumulate_grad_hook(schedule)
            param.requires_grad_(trained)


def _average(copied: Iterable[tuple[nn.Parameter, Ranks]], dtype: torch.dtype | None) -> None:
    """Averages the gradients of parameters, all at the same time; see `average_gradients`.

    The order is the same on all ranks, which need not have used the same parameters.
    """
    buckets: list[_Bucket] = []
    filling: dict[tuple[ProcessGroup | None, torch.dtype, torch.device], _Bucket] = {}
    for param, copies in copied:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        grad = local_part(param.grad)
        key = copies.group, grad.dtype, grad.device
        bucket = filling.get(key)
        if bucket is None or bucket.num_bytes + grad.nbytes > BUCKET_BYTES:
            bucket = filling[key] = _Bucket(copies)
            buckets.append(bucket)
        bucket.grads.append(grad)
    for bucket in buckets:
        bucket.start(dtype)
    for bucket in buckets:
        bucket.finish()


class _Bucket:
    """Averages several gradients with one all-reduce.

    Args:
        ranks: the ranks that have the gradients.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.grads: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """The size of the gradients."""
        return sum(grad.nbytes for grad in self.grads)

    def start(self, dtype: torch.dtype | None) -> None:
        """Starts the all-reduce, in a dtype."""
        first = self.grads[0]
        alone = len(self.grads) == 1 and first.is_contiguous()
        flat = first.view(-1) if alone else torch.cat([grad.reshape(-1) for grad in self.grads])
        flat = flat.to(dtype or flat.dtype)
        flat /= self.ranks.size  # before the sum, which could overflow
        work = dist.all_reduce(flat, group=self.ranks.group, async_op=True)
        assert work is not None  # this rank is in the group
        self._flat: Tensor = flat
        self._work: Work = work

    def finish(self) -> None:
        """Waits for the all-reduce and stores the averaged gradients."""
        self._work.wait()
        sizes = [grad.numel() for grad in self.grads]
        for grad, average in zip(self.grads, self._flat.split(sizes), strict=True):
            if grad.data_ptr() != average.data_ptr():
                grad.copy_(average.view_as(grad))


def reduce_in(dtype: torch.dtype, ranks: Ranks) -> Callable[[object, dist.GradBucket], object]:
    """Returns a communication hook of DistributedDataParallel that sums gradients in a dtype."""

    def average(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        flat = bucket.buffer()
        wide = flat.to(dtype) / ranks.size
        work = dist.all_reduce(wide, group=ranks.group, async_op=True)
        assert work is not None  # this rank is in the group
        return work.get_future().then(lambda _: flat.copy_(wide))

    return average
