"""Floating-point operations per token, as layers and mixers count them.

Every matrix product of the definition counts, 2 for a multiply-add, forward and backward (no recomputation, no
embedding lookup, no element-wise work). Attention counts the keys that a token sees, not those that a kernel masks.
"""

from dataclasses import dataclass

from torch import nn


@dataclass
class Flops:
    """FLOPs per token: the forward pass, and its gradients."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, times: float) -> "Flops":
        return Flops(self.forward * times, self.backward * times)

    __rmul__ = __mul__


def product(a: float, b: float) -> Flops:
    """A token's vector of a numbers times an (a, b) matrix; two products of that size for its gradients."""
    return Flops(2 * a * b, 4 * a * b)


def linear_flops(module: nn.Module) -> Flops:
    """FLOPs of all linear layers in ``module``, each used once per token."""
    layers = (layer for layer in module.modules() if isinstance(layer, nn.Linear))
    return sum((product(layer.in_features, layer.out_features) for layer in layers), Flops(0, 0))


def attention_flops(d_model: int, keys: float) -> Flops:
    """Scores and weighted values of a token that sees ``keys`` keys, all heads."""
    return 2 * product(d_model, keys)


def mean_keys(length: int, window: int | None) -> float:
    """Keys that a token sees, itself included, mean over ``length`` tokens; window None: all before it."""
    full = length if window is None else min(length, window)
    return (full * (full + 1) / 2 + (length - full) * full) / length
