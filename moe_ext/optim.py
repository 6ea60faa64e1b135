"""Learning-rate schedules of the paper, as factors of a peak rate."""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def warmup_inverse_sqrt(step: int, warmup_steps: int) -> float:
    """min(step / warmup_steps, sqrt(warmup_steps / step)): App. C.1, "Training".

    Linear warm-up to 1, then proportional to step^-1/2; continuous at the joint.

    Args:
        step: counts from 1.
        warmup_steps: where the factor is 1.

    Raises:
        ValueError: one of them is below 1.
    """
    if step < 1 or warmup_steps < 1:
        raise ValueError(
            "warmup_inverse_sqrt: step and warmup_steps must be at least 1, "
            f"got {step} and {warmup_steps}"
        )
    return min(step / warmup_steps, (warmup_steps / step) ** 0.5)


def language_model_schedule(optimizer: Optimizer, warmup_steps: int) -> LambdaLR:
    """The optimizer's rate times `warmup_inverse_sqrt`, to be stepped after the optimizer."""
    return LambdaLR(optimizer, lambda done: warmup_inverse_sqrt(done + 1, warmup_steps))
