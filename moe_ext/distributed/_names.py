"""Imports the public names of moe_ext.distributed from their modules.

``A as A`` tells type checkers that A is public.
"""

from moe_ext.distributed._groups import GroupExchange as GroupExchange
from moe_ext.distributed._parallelize import parallelize as parallelize
from moe_ext.distributed._parameters import ExpertParameter as ExpertParameter
from moe_ext.distributed._parameters import expert_parameters as expert_parameters
from moe_ext.distributed._state import full_state_dict as full_state_dict
from moe_ext.distributed._state import load_full_state_dict as load_full_state_dict
from moe_ext.distributed.checkpoint import CheckpointError as CheckpointError
from moe_ext.distributed.checkpoint import Checkpoints as Checkpoints
from moe_ext.distributed.checkpoint import Loaded as Loaded
from moe_ext.distributed.exchange import ChunksOf as ChunksOf
from moe_ext.distributed.exchange import Exchange as Exchange
from moe_ext.distributed.exchange import ExchangeUnit as ExchangeUnit
from moe_ext.distributed.exchange import Received as Received
from moe_ext.distributed.gradients import GradScaler as GradScaler
from moe_ext.distributed.gradients import clip_grad_norm_ as clip_grad_norm_
from moe_ext.distributed.placement import ExpertPlacement as ExpertPlacement
from moe_ext.distributed.ranks import AllToAll as AllToAll
from moe_ext.distributed.ranks import Layout as Layout
from moe_ext.distributed.ranks import Ranks as Ranks
from moe_ext.distributed.ranks import blocks as blocks
from moe_ext.distributed.sharding import Balance as Balance
from moe_ext.distributed.sharding import ExpertParallel as ExpertParallel
from moe_ext.distributed.sharding import ExpertSharding as ExpertSharding
from moe_ext.distributed.sharding import Placement as Placement
from moe_ext.distributed.torchrun import init_process_group as init_process_group
