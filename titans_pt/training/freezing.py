"""Freezing of parameters that a run does not train: train.trainable."""

from torch import nn

from titans_pt.tools.patterns import check_patterns, matches


def freeze(model: nn.Module, patterns: list[str]):
    """Freezes all parameters that match none of ``patterns``; without patterns it freezes none.

    Raises:
        UserError: a pattern matches no parameter.
    """
    if not patterns:
        return
    check_patterns("train.trainable", patterns, (name for name, _ in model.named_parameters()), "parameter")
    for name, p in model.named_parameters():
        p.requires_grad_(matches(name, patterns))


def trained(model: nn.Module) -> int:
    """Number of trained values: elements of all parameters that have gradients."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
