"""Parameters that a training leaves as they are: train.trainable."""

import re
from fnmatch import fnmatchcase

from torch import nn

from titans_pt.errors import UserError


def freeze(model: nn.Module, patterns: list[str]):
    """Leaves gradients to the parameters that match one of ``patterns`` alone; without patterns to all.

    Raises:
        UserError: a pattern is the name of no parameter.
    """
    if not patterns:
        return
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            known = ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
            raise UserError(f"train.trainable: {pattern!r} is the name of no parameter; there are {known}")
    for name, p in model.named_parameters():
        p.requires_grad_(any(fnmatchcase(name, pattern) for pattern in patterns))


def trained(model: nn.Module) -> int:
    """The numbers in parameters that have gradients."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
