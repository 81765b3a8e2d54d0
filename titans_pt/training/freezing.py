"""Parameters that a training leaves as they are: train.trainable."""

from torch import nn

from titans_pt.tools.patterns import check_patterns, matches


def freeze(model: nn.Module, patterns: list[str]):
    """Leaves gradients to the parameters that match one of ``patterns`` alone; without patterns to all.

    Raises:
        UserError: a pattern is the name of no parameter.
    """
    if not patterns:
        return
    check_patterns("train.trainable", patterns, (name for name, _ in model.named_parameters()), "parameter")
    for name, p in model.named_parameters():
        p.requires_grad_(matches(name, patterns))


def trained(model: nn.Module) -> int:
    """The numbers in parameters that have gradients."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
