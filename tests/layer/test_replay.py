"""Router replay: the layer takes the experts of each token, with live gates and gradients.

test_layers.py compares the gates of given experts with the reference, and replays each layer's own
decision.
"""

import pytest
import torch
from assertions import assert_exact, assert_same_bits
from layers import D, E, K, make_layer, make_x


def random_index(*shape):
    """Returns K random experts for each token, in random order."""
    return torch.rand(*shape, E).argsort(-1)[..., :K].contiguous()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("how", ["leading dimensions", "tokens", "mask", "nested"])
def test_shapes_of_the_experts(how, dtype):
    """Outputs do not depend on the order of a token's experts, apart from rounding."""
    layer = make_layer("top-k")
    x, index = make_x(2, 4), random_index(2, 4).to(dtype)
    mask = torch.rand(2, 4) < 0.6
    real = index[mask] if how == "mask" else index.flatten(0, 1)
    if how == "nested":
        nested = torch.nested.nested_tensor(list(x), layout=torch.jagged)
        _, aux = layer(nested, expert_index=real)
    elif how == "mask":
        _, aux = layer(x, mask, expert_index=index)
        assert_same_bits(
            layer(x, mask, expert_index=real)[0], layer(x, mask, expert_index=index)[0]
        )
    else:
        _, aux = layer(x, expert_index=real if how == "tokens" else index)
    assert torch.equal(aux.expert_index.sort(1).values, real.sort(1).values.long())
    flipped = layer(x, expert_index=index.flip(-1))
    assert_exact(flipped[0].detach(), layer(x, expert_index=index)[0].detach())


def test_no_tokens():
    layer, x = make_layer("top-k"), make_x(2, 3)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    y, aux = layer(x, mask, expert_index=random_index(2, 3))
    assert y.count_nonzero() == 0 and aux.expert_index.shape == (0, K)
    for masks in ((), (mask[:0],)):
        assert layer(x[:0], *masks, expert_index=random_index(0, 3))[0].shape == (0, 3, D)
