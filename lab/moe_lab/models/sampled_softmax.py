"""Softmax trained by importance sampling (App. C.1, as in Jozefowicz et al., 2016).

With 793,471 classes, a full softmax would dominate the cost of a model. In training, the softmax
covers the target and S classes, sampled once for the whole batch. From the logit of a class, the
softmax subtracts the logarithm of the expected count of the class. In evaluation, the softmax
covers all classes.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_ext.checks import require, require_shape
from moe_ext.ops import accumulation_dtype, linear_cross_entropy


class Draw(NamedTuple):
    """A sample of S distinct classes."""

    classes: Tensor  # [S] int64, ascending
    num_tries: float  # number of classes sampled until S were distinct; infinite if S = V


class LogUniformSampler:
    """Samples distinct classes from Q(c) = ln((c + 2) / (c + 1)) / ln(V + 1).

    If word ids are ordered by decreasing frequency, Q is close to the word frequency (Zipf's law).

    V is num_classes, and S is num_sampled. The samples come from a CPU generator.
    """

    def __init__(
        self, num_classes: int, num_sampled: int, generator: torch.Generator | None = None
    ) -> None:
        holds, rule = 1 <= num_sampled <= num_classes, f"be in [1, num_classes = {num_classes}]"
        require(holds, "LogUniformSampler: num_sampled", rule, num_sampled)
        self.num_classes, self.num_sampled = num_classes, num_sampled
        self.generator = generator

    def draw(self) -> Draw:
        """Samples classes on the CPU until S of them are distinct."""
        if self.num_sampled == self.num_classes:
            return Draw(torch.arange(self.num_classes, device="cpu"), math.inf)
        draws = torch.empty(0, dtype=torch.int64, device="cpu")
        while True:
            more = max(self.num_sampled, len(draws))
            u = torch.rand(more, dtype=torch.float64, generator=self.generator, device="cpu")
            # P(floor((V + 1)^u) = c + 1) = Q(c); rounding may reach V.
            drawn = (u * math.log(self.num_classes + 1)).exp_().long() - 1
            draws = torch.cat([draws, drawn.clamp_(0, self.num_classes - 1)])
            distinct, which = draws.unique(return_inverse=True)
            if len(distinct) >= self.num_sampled:
                break
        tries = torch.arange(1, len(draws) + 1, device="cpu")
        first_try = torch.empty_like(distinct).scatter_reduce_(
            0, which, tries, "amin", include_self=False
        )
        first, kept = first_try.topk(self.num_sampled, largest=False)
        return Draw(distinct[kept.sort().values], int(first.max()))

    def log_expected_count(self, classes: Tensor, num_tries: float) -> Tensor:
        """Computes ln E(c) in float64, where E(c) is the expected count of the class c in a sample.

        E(c) = 1 - (1 - Q(c))^num_tries, with ``Draw.num_tries``; ln E(c) is 0 if it is infinite.
        """
        c = classes.double()
        q = (1 / (c + 1)).log1p() / math.log(self.num_classes + 1)
        return (-(num_tries * (-q).log1p()).expm1()).log()


def sampled_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    classes: Tensor,
    log_expected_class: Tensor,
    log_expected_target: Tensor,
) -> Tensor:
    """Computes the summed cross-entropy of a softmax over the target and the sampled classes.

    The result is the sum over t of -ln softmax(logits_t)[targets_t]. The logit of class c in row t
    is hidden_t weight_c + bias_c - ln E(c). E(c) is the expected count of c in a sample. A target
    that is also a sampled class counts once. The [T, S] logits are never in memory; see
    `moe_ext.ops.linear_cross_entropy`.

    Args:
        hidden, weight, bias: [T, D], [V, D] and [V].
        targets: [T] int64, in [0, V).
        classes: [S] int64, sampled classes, distinct and ascending.
        log_expected_class, log_expected_target: ln E of each sampled class [S] and target [T].

    Returns:
        Scalar, nats; float64 if hidden is float64, otherwise float32.
    """
    _check_arguments(hidden, weight, bias, targets)
    full = accumulation_dtype(hidden)
    # A class can be the target of many tokens. Its gradients are summed in the dtype of this copy.
    used, place = torch.cat([classes, targets]).unique(return_inverse=True)
    class_place, target_place = place.split([len(classes), len(targets)])
    rows, biases = F.embedding(used, weight).to(full), bias[used].to(full)
    class_weight = F.embedding(class_place, rows)
    class_bias = biases[class_place] - log_expected_class.to(full)
    target_bias = biases[target_place] - log_expected_target.to(full)
    target_logit = (hidden.to(full) * F.embedding(target_place, rows)).sum(1) + target_bias

    # A sampled class of each token: its target if that was sampled.
    column = torch.searchsorted(classes, targets).clamp_(max=len(classes) - 1)
    sampled = classes[column] == targets
    loss = linear_cross_entropy(
        hidden, class_weight.to(hidden.dtype), column, linear_bias=class_bias, reduction="none"
    )
    # Without it, the target adds a term to the sum of exponentials: z of the sampled classes.
    logit = (hidden.to(full) * F.embedding(column, class_weight)).sum(1) + class_bias[column]
    log_z = loss + logit
    return torch.where(sampled, loss, F.softplus(log_z - target_logit)).sum()


def _check_arguments(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> None:
    """Raises ValueError if the shapes are inconsistent or a target on the CPU is outside [0, V).

    GPU kernels check targets on a GPU.
    """
    name = "sampled_cross_entropy"
    require(weight.dim() == 2, f"{name}: weight", "have shape [V, D]", tuple(weight.shape))
    num_classes, width = weight.shape
    require_shape(name, (num_classes,), bias=bias)
    rows = tuple(hidden.shape[:1])
    require_shape(name, (*rows, width), hidden=hidden)
    require_shape(name, rows, targets=targets)
    if targets.device.type == "cpu" and len(targets) and not torch.compiler.is_compiling():
        least, most = (int(value) for value in targets.aminmax())
        holds = least >= 0 and most < num_classes
        require(holds, f"{name}: targets", f"be in [0, {num_classes})", (least, most))


class SampledSoftmax(nn.Linear):
    """Output layer with a full softmax in evaluation and a sampled softmax in training.

    Calling the module returns the logits of all classes. The loss of the sampled softmax
    underestimates the loss of the full softmax, so do not compute a perplexity from it. With S = V,
    both losses are equal.

    The V classes are ordered by decreasing frequency. num_sampled = 0 uses the full softmax in
    training too. The samples come from a CPU generator.
    """

    def __init__(
        self,
        d_model: int,
        num_classes: int,
        num_sampled: int = 0,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, num_classes, dtype=dtype)
        self.sampler = None
        if num_sampled:
            self.sampler = LogUniformSampler(num_classes, num_sampled, generator)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Computes the summed cross-entropy in nats of hidden [T, D] and targets [T] int64."""
        if self.sampler is None or not self.training:
            return self._full_loss(hidden, targets, "sum")
        classes, num_tries = self.sampler.draw()
        classes = classes.to(targets.device)
        log_expected = (self.sampler.log_expected_count(c, num_tries) for c in (classes, targets))
        return sampled_cross_entropy(
            hidden, self.weight, self.bias, targets, classes, *log_expected
        )

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Computes -ln p of each target under the full softmax, without gradient: [T], nats."""
        with torch.no_grad():
            return self._full_loss(hidden, targets, "none")

    def _full_loss(
        self, hidden: Tensor, targets: Tensor, reduction: Literal["none", "sum"]
    ) -> Tensor:
        """Computes the loss of the full softmax; the GEMMs have the dtype of hidden."""
        weight, bias = self.weight.to(hidden.dtype), self.bias.to(hidden.dtype)
        return linear_cross_entropy(hidden, weight, targets, linear_bias=bias, reduction=reduction)
