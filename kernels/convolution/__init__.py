"""Causal depthwise convolution of a few taps over time."""

from titans_pt.kernels.convolution.dispatch import finished, short_convolution

__all__ = ["finished", "short_convolution"]
