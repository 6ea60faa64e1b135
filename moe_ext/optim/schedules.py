"""Learning-rate schedules of the paper, as factors of a peak rate."""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from moe_ext.checks import require_at_least

__all__ = ["warmup_inverse_sqrt", "warmup_schedule"]


def warmup_inverse_sqrt(step: int, warmup_steps: int, hold_steps: int = 0) -> float:
    """min(step / warmup_steps, 1, sqrt((warmup_steps + hold_steps) / step)).

    Linear warm-up to 1, constant, then proportional to step^-1/2; continuous at the joints. App.
    C.1, "Training" (nothing held), and App. E.

    Args:
        step: counts from 1.
        warmup_steps: where the factor first is 1.
        hold_steps: for how long it stays there.

    Raises:
        ValueError: step or warmup_steps is below 1, or hold_steps below 0.
    """
    require_at_least(1, "warmup_inverse_sqrt", step=step, warmup_steps=warmup_steps)
    require_at_least(0, "warmup_inverse_sqrt", hold_steps=hold_steps)
    return min(step / warmup_steps, 1.0, ((warmup_steps + hold_steps) / step) ** 0.5)


def warmup_schedule(
    optimizer: Optimizer, warmup_steps: int = 1_000, hold_steps: int = 0
) -> LambdaLR:
    """The optimizer's rate by `warmup_inverse_sqrt`, to be stepped after the optimizer.

    The language models' is the default (App. C.1); the translation models' has 2,000 steps of
    warm-up and holds the rate for 8,000 (App. E).
    """
    return LambdaLR(optimizer, lambda done: warmup_inverse_sqrt(done + 1, warmup_steps, hold_steps))
