"""Costs of a neural memory: FLOPs of a token, bytes kept for the backward pass."""

import math

from titans_pt.config import MemoryConfig
from titans_pt.kernels.memory import NetworkShape
from titans_pt.kernels.memory.channels import CHANNELWISE_BLOCK
from titans_pt.kernels.memory.chunked import MAX_BLOCK
from titans_pt.kernels.memory.rules import Rule
from titans_pt.layers.flops import Flops


def product_flops(shape: NetworkShape) -> list[int]:
    """FLOPs of one vector's product with each of a head's weight matrices."""
    return [2 * a * b for a, b in shape.layers]


def _block(config: MemoryConfig) -> int:
    """Tokens of a compute block."""
    if config.alpha == "channel":
        return min(config.chunk_size, CHANNELWISE_BLOCK)
    return config.chunk_size if Rule.of(config).nonlinear else min(config.chunk_size, MAX_BLOCK)


def inner_flops(shape: NetworkShape, config: MemoryConfig) -> Flops:
    """FLOPs per token and head: every product of the exact dual form (kernels/memory/dual.py) at the compute block in
    use. An alpha per channel adds only element-wise work."""
    rule, block = Rule.of(config), _block(config)
    if rule.nonlinear:
        return stale_flops(shape, config)
    start = config.forget_to == "start"  # then queries are also multiplied with M_0
    inner = 3 if config.alpha == "head" else 0  # products for the gradients of a gate that a whole matrix shares
    forward = backward = 0.0
    keys = _keys_of_window(rule, block)
    for n, weights in enumerate(product_flops(shape)):
        pull = n > 0  # the error goes down through every layer but the first
        within = 2 * block * keys * sum(shape.layers[n])
        products = keys * (3 + pull) + 2 + start
        once = products * weights + within + _erasing_flops(rule, shape.layers[n], block, reads=True)
        forward += once
        backward += 2 * once + inner * weights / block
    return Flops(forward, backward)


def _erasing_flops(rule: Rule, layer: tuple[int, int], block: int, reads: bool) -> float:
    """FLOPs per token and head that erasing adds to one matrix: the matrix's content along a block's inputs, the
    inputs' products with each other, the triangular system, and the erased content that queries no longer find."""
    if not rule.erases:
        return 0.0
    d_in, d_out = layer
    return 4 * d_in * d_out + block * (2 * d_in + 3 * d_out + 2 * reads * d_out)


def _keys_of_window(rule: Rule, block: int) -> float:
    """Number of keys whose gradients a block of tokens takes and writes, per token of the block."""
    return 1 + (rule.window - 1) / block


def stale_flops(shape: NetworkShape, config: MemoryConfig) -> Flops:
    """FLOPs per token and head of a memory whose tokens read the weights of their chunk's start
    (kernels/memory/blockwise.py).

    The forward pass takes keys forward and back, two sums over the chunk, queries forward, and the rule's work at the
    chunk's end. The backward pass repeats all of it and costs twice as much again.
    """
    rule, products = Rule.of(config), product_flops(shape)
    keys = _keys_of_window(rule, config.chunk_size)
    once = (3 * keys + 1) * sum(products) + keys * sum(products[1:])
    once += sum(rule.closing_flops(*layer) for layer in shape.layers) / config.chunk_size
    block = min(config.chunk_size, MAX_BLOCK)
    once += sum(_erasing_flops(rule, layer, block, reads=False) for layer in shape.layers)
    return Flops(once, 3 * once)


def read_flops(shape: NetworkShape) -> Flops:
    """FLOPs per token and head of one more read of the chunk's start weights; the backward pass repeats the read."""
    return Flops(sum(product_flops(shape)), 3 * sum(product_flops(shape)))


def kept_bytes(shape: NetworkShape, config: MemoryConfig, heads: int, length: int) -> int:
    """See :meth:`NeuralMemory.kept_state_bytes`."""
    one = heads * sum(a * b for a, b in shape.layers)
    blocks = -(-length // _block(config))
    return 12 * one * -(-blocks // (config.save_every or math.isqrt(blocks)))
