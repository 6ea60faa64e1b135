"""Planners that save and load blocks of expert tensors with torch.distributed.checkpoint.

The planners of torch support only evenly sized shards.
"""

import io
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from moe_ext.checks import require
from moe_ext.distributed._state import Key, Part


class SavePlanner(DefaultSavePlanner):
    """Extends torch's default save planner: saves blocks of larger tensors."""

    def __init__(self, parts: Mapping[Key, Part]) -> None:
        super().__init__()
        self.mappings = {".".join(key): key for key in parts}
        self._blocks = _blocks(parts)
        self._buffers = {".".join(key) for key, part in parts.items() if part.is_buffer}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = state_dict  # already flat, see `flat`
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [item for item in map(self._placed, plan.items) if item]
        self.plan = replace(plan, items=items, planner_data=(self.mappings, self._buffers))
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Raises ValueError if the ranks together do not have all elements of a tensor."""
        size: dict[str, int] = {}
        num_elements = Counter[str]()
        for item in {item.index: item for plan in all_plans for item in plan.items}.values():
            name, data = item.index.fqn, item.tensor_data
            if data is not None:
                size[name] = data.size.numel()
                num_elements[name] += data.chunk.sizes.numel()
        parts = [name for name in sorted(size) if num_elements[name] < size[name]]
        model_parts = [name for name in parts if name.startswith("model.")]
        rule = "have all elements of its tensors on the ranks that save it"
        require(not model_parts, "model", rule, f"a part of {', '.join(model_parts)}")
        rule = "have the same states for all experts of a layer: freeze or train all of them"
        require(not parts, "optimizer", rule, f"a part of {', '.join(parts)}")
        return super().create_global_plan(_with_buffers_of_lowest_ranks(all_plans))

    def _placed(self, item: WriteItem) -> WriteItem | None:
        block = self._blocks.get(item.index.fqn)
        if block is None or item.tensor_data is None:
            return item
        if not len(block.value):
            return None
        chunk = _chunk(block)
        return WriteItem(
            MetadataIndex(item.index.fqn, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=replace(item.tensor_data, chunk=chunk, size=block.shape),
        )

    def lookup_object(self, index: MetadataIndex) -> Any:
        block = self._blocks.get(index.fqn)
        return super().lookup_object(index) if block is None else block.value


class LoadPlanner(DefaultLoadPlanner):
    """Extends torch's default load planner: loads blocks of larger tensors."""

    def __init__(self, parts: Mapping[Key, Part]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._blocks = _blocks(parts)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        plain = {k: value for k, value in self.state_dict.items() if k not in self._blocks}
        plan = create_default_local_load_plan(plain, self.metadata)
        for name, block in self._blocks.items():
            if len(block.value):
                saved = self.metadata.state_dict_metadata[name]
                assert isinstance(saved, TensorStorageMetadata)
                plan.items += create_read_items_for_chunk_list(name, saved, [_chunk(block)])
        num_elements = Counter[str]()
        for item in plan.items:
            num_elements[item.dest_index.fqn] += item.lengths.numel()
        values = self.state_dict | {name: block.value for name, block in self._blocks.items()}
        for name, value in values.items():
            part = value.to_local() if isinstance(value, DTensor) else value
            if isinstance(part, torch.Tensor) and num_elements[name] < part.numel():
                raise ValueError(f"the checkpoint does not have all elements of the tensor {name}")
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        block = self._blocks.get(index.fqn)
        return super().lookup_tensor(index) if block is None else block.value


def _with_buffers_of_lowest_ranks(all_plans: list[SavePlan]) -> list[SavePlan]:
    """Leaves each buffer to the lowest rank that has it, as DistributedDataParallel does.

    torch spreads copies over the ranks. That is right for parameters only, which are equal.
    """
    buffers = set().union(*(plan.planner_data[1] for plan in all_plans))
    planned: set[MetadataIndex] = set()
    plans = []
    for plan in all_plans:
        items = [item for item in plan.items if item.index not in planned]
        planned |= {item.index for item in items if item.index.fqn in buffers}
        plans.append(replace(plan, items=items, planner_data=plan.planner_data[0]))
    return plans


def _blocks(parts: Mapping[Key, Part]) -> dict[str, Part]:
    return {".".join(key): part for key, part in parts.items() if part.size is not None}


def _chunk(block: Part) -> ChunkStorageMetadata:
    sizes = block.value.shape
    return ChunkStorageMetadata(torch.Size([block.first, *[0] * (len(sizes) - 1)]), sizes)
