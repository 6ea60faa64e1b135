"""The optimizers of a model and their learning rates (App. C.1, D and E)."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Adam, Optimizer

from moe_ext.optim import FactoredAdam, split_parameters
from moe_lab.models import AnyModel
from moe_lab.training.config import OptimizerConfig


def make_optimizers(model: AnyModel, options: OptimizerConfig) -> list[Optimizer]:
    """Creates Adam, and FactoredAdam for the weights that the options select."""
    split = split_parameters(model)
    usual = options.learning_rate
    rates = dict.fromkeys(model.parameters(), usual)
    rates |= dict.fromkeys(split.experts, options.expert_learning_rate or usual)
    rates |= dict.fromkeys(split.thresholds, options.threshold_learning_rate or usual)
    factored: set[nn.Parameter] = set()
    if options.experts == "factored_adam":
        factored.update(split.experts)
    if options.embedding == "factored_adam":
        embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        factored.update(nn.ModuleList([*embeddings, model.softmax]).parameters())

    def groups(params: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
        by_rate: dict[float, list[nn.Parameter]] = {usual: []}  # the usual rate comes first
        for param in params:
            by_rate.setdefault(rates[param], []).append(param)
        return [{"params": same, "lr": rate} for rate, same in by_rate.items() if same]

    betas, eps = (options.beta1, options.beta2), options.eps
    optimizers: list[Optimizer] = []
    if usual_groups := groups(param for param in rates if param not in factored):
        optimizers.append(Adam(usual_groups, betas=betas, eps=eps, fused=True))
    if factored_groups := groups(param for param in rates if param in factored):
        optimizers.append(FactoredAdam(factored_groups, beta2=options.beta2, eps=eps))
    return optimizers
