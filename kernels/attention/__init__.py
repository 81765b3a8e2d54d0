"""Softmax attention with the visibility rules of the models: FlashAttention on a GPU, masks and SDPA elsewhere."""

from titans_pt.kernels.attention.dispatch import causal_attention, segment_attention
from titans_pt.kernels.attention.masked import Prefix, masked_attention
from titans_pt.kernels.attention.token import AttentionToken

__all__ = ["AttentionToken", "Prefix", "causal_attention", "masked_attention", "segment_attention"]
