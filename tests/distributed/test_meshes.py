"""Process groups that a layer makes, on ranks that are not there (torch's fake backend)."""

import warnings

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_ext import MoE

DIMS = "stages", "copies", "shards"


@pytest.fixture
def mesh(request):
    """Returns a mesh of the sizes that the test gives, of which this process is the first rank."""
    sizes = request.param
    world_size = sizes[0] * sizes[1] * sizes[2]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    yield init_device_mesh("cpu", sizes, mesh_dim_names=DIMS)
    dist.destroy_process_group()


def ranks_of_layer(mesh):
    """Makes a layer on the mesh; returns its ranks, and the number of process groups it made."""
    before = dist.distributed_c10d._world.group_count
    layer = MoE(4, 4, 2, process_group=mesh)
    made = dist.distributed_c10d._world.group_count - before
    return dist.get_process_group_ranks(layer.sharding.layout.world.group), made


@pytest.mark.parametrize("mesh", [(2, 2, 1), (2, 1, 2), (1, 2, 2)], indirect=True)
def test_a_layer_uses_a_group_that_exists(mesh):
    """Another stage of a pipeline, without a layer, would disagree about later groups."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ranks, made = ranks_of_layer(mesh["copies", "shards"])
    assert (ranks, made) == (mesh[DIMS[1:]].mesh.flatten().tolist(), 0)


@pytest.mark.parametrize("mesh", [(2, 2, 2)], indirect=True)
def test_a_group_that_a_layer_makes_is_named(mesh):
    message = (
        r"^ExpertParallel: process_group: makes a process group of the ranks \[0, 1, 2, 3\], .* "
        r"call mesh\['copies', 'shards'\]._flatten\(\) on all ranks"
    )
    with pytest.warns(UserWarning, match=message):
        ranks, made = ranks_of_layer(mesh["copies", "shards"])
    assert ranks == [0, 1, 2, 3] and made > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ranks_of_layer(mesh["copies", "shards"]) == (ranks, 0)


@pytest.mark.parametrize("mesh", [(2, 2, 2)], indirect=True)
def test_the_advice_of_the_warning(mesh):
    mesh["copies", "shards"]._flatten("all")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ranks_of_layer(mesh["copies", "shards"]) == ([0, 1, 2, 3], 0)
