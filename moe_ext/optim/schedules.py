"""Learning-rate schedules of the paper, as factors of the peak learning rate."""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from moe_ext.checks import require_at_least

__all__ = ["warmup_inverse_sqrt", "warmup_schedule"]


def warmup_inverse_sqrt(step: int, warmup_steps: int, hold_steps: int = 0) -> float:
    """Returns the factor min(step / warmup_steps, 1, sqrt((warmup_steps + hold_steps) / step)).

    The factor rises linearly to 1, stays 1 for hold_steps, then decays as step^-1/2. It is
    continuous. Appendix C.1 ("Training") uses no hold steps; Appendix E uses them.

    Args:
        step: the number of the step; counts from 1.
        warmup_steps: number of steps until the factor is 1.
        hold_steps: number of steps for which the factor stays 1.

    Raises:
        ValueError: step or warmup_steps is below 1, or hold_steps below 0.
    """
    first, warmup = require_at_least(1, "warmup_inverse_sqrt", step=step, warmup_steps=warmup_steps)
    (hold,) = require_at_least(0, "warmup_inverse_sqrt", hold_steps=hold_steps)
    decay: float = ((warmup + hold) / first) ** 0.5
    return min(first / warmup, 1.0, decay)


def warmup_schedule(
    optimizer: Optimizer, warmup_steps: int = 1_000, hold_steps: int = 0
) -> LambdaLR:
    """Makes a scheduler that scales the optimizer's learning rate by `warmup_inverse_sqrt`.

    Call the scheduler's step() after the optimizer's step(). The defaults are from the paper's
    language models (App. C.1). Its translation models use warmup_steps=2000 and hold_steps=8000
    (App. E).
    """
    return LambdaLR(optimizer, lambda done: warmup_inverse_sqrt(done + 1, warmup_steps, hold_steps))
