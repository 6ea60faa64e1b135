"""The two ways to say how ranks share the experts of a layer: process_group and parallel."""

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from moe_ext.checks import require
from moe_ext.distributed.sharding import ExpertParallel


def parallel_options(
    owner: str, process_group: ProcessGroup | DeviceMesh | None, parallel: ExpertParallel | None
) -> ExpertParallel | None:
    """Returns the options of a layer that takes process_group or parallel.

    Raises:
        ValueError: both are given.
        TypeError: parallel has the wrong type.
    """
    if process_group is not None:
        rule = "be None when process_group is given"
        require(parallel is None, f"{owner}: parallel", rule, parallel)
        return ExpertParallel(process_group)
    if not isinstance(parallel, ExpertParallel | None):
        kind = type(parallel).__name__
        raise TypeError(f"{owner}: parallel must be an ExpertParallel, got {kind}")
    return parallel
