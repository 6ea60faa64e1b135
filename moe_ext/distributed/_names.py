"""Imports the public names of moe_ext.distributed from their modules."""

# ruff: noqa: F401

from moe_ext.distributed._groups import GroupExchange
from moe_ext.distributed._parallelize import parallelize
from moe_ext.distributed._parameters import ExpertParameter, expert_parameters
from moe_ext.distributed._state import full_state_dict, load_full_state_dict
from moe_ext.distributed.checkpoint import CheckpointError, Checkpoints, Loaded
from moe_ext.distributed.exchange import ChunksOf, Exchange, ExchangeUnit, Received
from moe_ext.distributed.gradients import GradScaler, clip_grad_norm_
from moe_ext.distributed.placement import ExpertPlacement
from moe_ext.distributed.ranks import AllToAll, Layout, Ranks, blocks
from moe_ext.distributed.sharding import (
    Balance,
    ExpertParallel,
    ExpertSharding,
    Placement,
)
from moe_ext.distributed.torchrun import init_process_group
