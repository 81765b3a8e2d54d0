"""The learning rate as a pure function of the step."""

import math


def learning_rate(step: int, lr: float, warmup_steps: int, max_steps: int, min_lr_ratio: float) -> float:
    """Learning rate of optimiser step ``step`` (the first step is 1).

    Linear from 0 to ``lr`` over ``warmup_steps``, then a half cosine that reaches ``min_lr_ratio * lr`` at
    ``max_steps`` and stays there.
    """
    if step <= warmup_steps:
        return lr * step / warmup_steps
    progress = min(1.0, (step - warmup_steps) / (max_steps - warmup_steps))
    return lr * (min_lr_ratio + (1.0 - min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress)))
