"""Softmax by importance sampling: the sampler, the loss with its gradients, the module."""

import math

import pytest
import torch
from assertions import LargestTensor
from moe_lab.models import (
    LanguageModel,
    LanguageModelConfig,
    LogUniformSampler,
    MoEConfig,
    SampledSoftmax,
    sampled_cross_entropy,
)
from torch.nn import functional as F


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_probabilities_by_hand():
    """V = 3: Q is ln 2 / ln 4, (ln 3/2) / ln 4, (ln 4/3) / ln 4; expected counts for two tries."""
    sampler = LogUniformSampler(3, 2)
    q = torch.tensor([2, 3 / 2, 4 / 3], dtype=torch.float64).log() / math.log(4)
    torch.testing.assert_close(q.sum().item(), 1.0)
    one = sampler.log_expected_count(torch.arange(3), 1).exp()
    torch.testing.assert_close(one, q)
    two = sampler.log_expected_count(torch.arange(3), 2).exp()
    torch.testing.assert_close(two, 2 * q - q.square())
    assert two[0].item() == pytest.approx(0.75)


@pytest.mark.parametrize(("num_classes", "num_sampled"), [(10, 1), (100, 7), (1000, 990)])
def test_a_draw_is_distinct_classes_and_its_number_of_tries(num_classes, num_sampled):
    """Compares the sampler with one try at a time on the same random numbers."""
    for seed in range(10):
        draw = LogUniformSampler(num_classes, num_sampled, generator(seed)).draw()
        numbers = generator(seed)
        seen, tries = set(), 0
        while len(seen) < num_sampled:
            # The sampler takes S random numbers, then each time as many as it has.
            u = torch.rand(max(num_sampled, tries), dtype=torch.float64, generator=numbers)
            for x in u.tolist():
                if len(seen) < num_sampled:
                    tries += 1
                    seen.add(min(int((num_classes + 1) ** x), num_classes) - 1)
                    last = tries
        assert draw.classes.tolist() == sorted(seen)
        assert draw.num_tries == last


def definition(hidden, weight, bias, targets, classes, log_class, log_target):
    """Computes the loss over the target and the sampled classes other than the target."""
    target_logit = (hidden * weight[targets]).sum(1) + bias[targets] - log_target
    logits = hidden @ weight[classes].t() + bias[classes] - log_class
    logits = logits.masked_fill(targets[:, None] == classes, -math.inf)
    logits = torch.cat([target_logit[:, None], logits], 1)
    return F.cross_entropy(logits, torch.zeros_like(targets), reduction="sum")


def example(rows, width, num_classes, dtype=torch.float64):
    random = generator(4)

    def leaf(*shape):
        return torch.randn(shape, generator=random, dtype=dtype).requires_grad_()

    targets = torch.randint(num_classes, (rows,), generator=random)
    return leaf(rows, width), leaf(num_classes, width), leaf(num_classes), targets


@pytest.mark.parametrize("num_sampled", [1, 60, 9000])  # 9,000: several blocks of rows
def test_loss_and_gradients_equal_the_definition(num_sampled):
    *leaves, targets = example(300, 4, 10_000)
    sampler = LogUniformSampler(10_000, num_sampled, generator(1))
    classes, tries = sampler.draw()
    logs = [sampler.log_expected_count(c, tries) for c in (classes, targets)]
    actual = sampled_cross_entropy(*leaves, targets, classes, *logs)
    expected = definition(*leaves, targets, classes, *logs)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    gradients = (torch.autograd.grad(3 * loss, leaves) for loss in (actual, expected))
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_all_classes_give_the_full_softmax():
    *leaves, targets = example(40, 4, 50)
    softmax = SampledSoftmax(4, 50, 50).double()
    with torch.no_grad():
        softmax.weight.copy_(leaves[1])
        softmax.bias.copy_(leaves[2])
    sampled = softmax.loss(leaves[0], targets)
    full = F.cross_entropy(softmax(leaves[0]), targets, reduction="sum")
    torch.testing.assert_close(sampled, full, rtol=1e-13, atol=0)
    gradients = (torch.autograd.grad(loss, list(softmax.parameters())) for loss in (sampled, full))
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-13)
    # A constant factor of all expected counts cancels.
    same = torch.full((50,), 0.3).log()
    shifted = sampled_cross_entropy(*leaves, targets, torch.arange(50), same, same[targets])
    torch.testing.assert_close(shifted, full, rtol=1e-12, atol=0)


def test_evaluation_is_over_all_classes_and_draws_nothing():
    hidden, _, _, targets = example(30, 4, 100, torch.float32)
    numbers = generator(1)
    softmax = SampledSoftmax(4, 100, 10, generator=numbers).eval()
    before = numbers.get_state()
    full = F.cross_entropy(softmax(hidden), targets, reduction="none")
    torch.testing.assert_close(softmax.loss(hidden, targets), full.sum())
    torch.testing.assert_close(softmax.nll(hidden, targets), full)
    assert torch.equal(numbers.get_state(), before)
    softmax.train()
    assert softmax.loss(hidden, targets) < full.sum() and not softmax.nll(hidden, targets).grad_fn


@pytest.mark.parametrize("target", [0, 1])
def test_large_logits(target):
    """The target's logit is 2,000 below the other logit, or 2,000 above it."""
    hidden = torch.tensor([[100.0]], requires_grad=True)
    weight = torch.tensor([[10.0], [-10.0], [9.0]])
    targets, classes = torch.tensor([1 - target]), torch.tensor([target])
    zero = torch.zeros(1)
    loss = sampled_cross_entropy(hidden, weight, torch.zeros(3), targets, classes, zero, zero)
    loss.backward()
    assert loss.item() == (2000.0 if target == 0 else 0.0)
    assert hidden.grad.item() == (20.0 if target == 0 else 0.0)


def test_under_autocast_and_in_bfloat16():
    *leaves, targets = example(20, 16, 300, torch.float32)
    sampler = LogUniformSampler(300, 30, generator())
    classes, tries = sampler.draw()
    logs = [sampler.log_expected_count(c, tries) for c in (classes, targets)]
    expected = definition(*leaves, targets, classes, *logs)
    with torch.autocast("cpu", torch.bfloat16):
        cast = sampled_cross_entropy(*leaves, targets, classes, *logs)
    half = [leaf.detach().bfloat16().requires_grad_() for leaf in leaves]
    stored = sampled_cross_entropy(*half, targets, classes, *logs)
    for actual, inputs in ((cast, leaves), (stored, half)):
        assert actual.dtype == torch.float32
        # A bfloat16 dot product of 16 terms of size 1 errs by about 4 * 2^-9; 20 of them are
        # summed.
        assert abs(actual.item() - expected.item()) < 0.5
        gradients = torch.autograd.grad(actual, inputs)
        assert [g.dtype for g in gradients] == [leaf.dtype for leaf in inputs]


def test_training_forms_nothing_of_tokens_by_classes():
    num_classes, tokens = 50_000, 4_000
    hidden, _, _, targets = example(tokens, 8, num_classes, torch.float32)
    softmax = SampledSoftmax(8, num_classes, 500, generator=generator())
    with LargestTensor() as largest:
        softmax.loss(hidden, targets).backward()
    assert largest.size <= max(2**20, 8 * num_classes)  # the gradient of weight; T S is twice that


def test_in_a_language_model():
    """Training uses sampled classes; weights and evaluation equal those of a full softmax."""
    config = LanguageModelConfig(d_model=8, dropout=0.0, moe=MoEConfig(num_experts=4, k=2))
    config.num_sampled = 10
    torch.manual_seed(0)
    model = LanguageModel(config, 100, class_generator=generator(3))
    torch.manual_seed(0)
    config.num_sampled = 0
    full = LanguageModel(config, 100)
    assert all(map(torch.equal, model.state_dict().values(), full.state_dict().values()))
