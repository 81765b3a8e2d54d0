"""The learning rate as a pure function of the step."""

import math

from titans_pt.config import TrainConfig

SCHEDULE = ("schedule", "max_steps", "lr", "warmup_steps", "decay_steps", "min_lr_ratio")
"""The settings of ``train`` that the learning rate depends on."""


def learning_rate(step: int, train: TrainConfig) -> float:
    """Learning rate of optimiser step ``step`` (the first step is 1).

    It rises linearly from 0 to ``lr`` over ``warmup_steps``. It then falls to ``min_lr_ratio * lr`` at ``max_steps``
    and stays there. The decay depends on ``schedule``:

    - cosine: half a cosine.
    - linear: linear.
    - wsd (warm up, stay, decay; Hu et al., arXiv 2404.06395): at ``lr`` until the last ``decay_steps``, then linear.
    - halving: the rate halves every ``decay_steps`` after the warm-up, down to ``min_lr_ratio * lr``.
    """
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    if train.schedule == "halving":
        halvings = (step - train.warmup_steps - 1) // (train.decay_steps or max(1, train.max_steps // 10))
        return train.lr * max(train.min_lr_ratio, 0.5**halvings)
    decay = train.max_steps - train.warmup_steps
    if train.schedule == "wsd":
        decay = min(decay, train.decay_steps or max(1, train.max_steps // 10))
    progress = min(1.0, max(0.0, (step - (train.max_steps - decay)) / decay))
    left = 0.5 * (1.0 + math.cos(math.pi * progress)) if train.schedule == "cosine" else 1.0 - progress
    return train.lr * (train.min_lr_ratio + (1.0 - train.min_lr_ratio) * left)
