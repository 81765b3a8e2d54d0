"""Softmax attention with the visibility rules of the models, on PyTorch's scaled_dot_product_attention."""

from kernels.attention.causal import Prefix, causal_attention, masked_attention

__all__ = ["Prefix", "causal_attention", "masked_attention"]
