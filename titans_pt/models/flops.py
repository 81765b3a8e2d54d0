"""Floating-point operations that a model needs for a token: the count behind MFU.

What is counted: every matrix product of the definition, 2 for a multiply-add, forward and backward (no recomputation,
no embedding lookup, no element-wise work). Attention counts the keys that a token sees, not those that a kernel masks.
The memory counts the products of its exact dual form (kernels/memory/block.py) at the compute block in use; the short
convolutions are element-wise.
"""

from dataclasses import dataclass

from titans_pt.config import MEMORY_MIXERS, ModelConfig
from titans_pt.kernels.memory.chunked import MAX_BLOCK
from titans_pt.layers.memory import network_shape


@dataclass
class Flops:
    """Per token: forward pass, and the gradients of it."""

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


def model_flops(config: ModelConfig, length: int) -> Flops:
    """Mean over the tokens of a sequence of ``length`` (one document, prefix not counted as tokens)."""
    total = product(config.d_model, config.vocab_size)
    for mixer in config.pattern:
        total += 3 * product(config.d_model, config.hidden) + _mixer(mixer, config, length)
    return total


def _mixer(name: str, config: ModelConfig, length: int) -> Flops:
    d, heads = config.d_model, config.memory_heads
    square = product(d, d)
    memory = 3 * square + product(d, 3 * heads * (config.memory.depth if config.memory.per_layer_gates else 1))
    memory += heads * memory_flops(d // heads, config)
    prefix = config.persistent_tokens if name in MEMORY_MIXERS else 0
    windowed = 3 * square + attention_flops(d, _window(length, config.window) + prefix)
    if name == "attention":
        return 4 * square + attention_flops(d, _window(length, length))
    if name == "swa":
        return square + windowed
    if name == "lmm":
        return memory + 2 * square
    if name == "mag":
        return memory + windowed + square + product(d, heads)
    if name == "mal":
        return memory + windowed + 3 * square
    # MAC: a memory token for every ``stride`` tokens is read, projected, and seen by the tokens from its own on.
    stride = config.segment // config.memory_tokens
    seen = _window(config.segment, config.segment) + (config.memory_tokens + 1) / 2 + prefix
    reading = square + (1 / stride) * (2 * square + heads * read_flops(d // heads, config))
    return memory + 4 * square + attention_flops(d, seen) + reading + product(d, heads)


def attention_flops(d_model: int, keys: float) -> Flops:
    """Scores and weighted values of a token that sees ``keys`` keys, all heads."""
    return 2 * product(d_model, keys)


def _window(length: int, window: int) -> float:
    """Keys that a token sees, itself included, mean over ``length`` tokens."""
    full = min(length, window)
    return (full * (full + 1) / 2 + (length - full) * full) / length


def memory_flops(width: int, config: ModelConfig) -> Flops:
    """One head of the memory: key side, both reads, both updates, and the products within a block."""
    block = min(config.memory.chunk_size, MAX_BLOCK)
    forward = backward = 0.0
    for n, (a, b) in enumerate(network_shape(width, config.memory).layers):
        pull = n > 0  # the error goes down through every layer but the first
        weights, within = 2 * a * b, 2 * block * (a + b)
        forward += (5 + pull) * weights + within
        backward += (10 + 2 * pull) * weights + 2 * within + 3 * weights / block
    return Flops(forward, backward)


def read_flops(width: int, config: ModelConfig) -> Flops:
    """One head of the memory, read without writing."""
    layers = network_shape(width, config.memory).layers
    return Flops(*(times * sum(2 * a * b for a, b in layers) for times in (1, 2)))
