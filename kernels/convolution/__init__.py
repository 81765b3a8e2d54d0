"""Causal depthwise convolution of a few taps over time."""

from titans_pt.kernels.convolution.dispatch import short_convolution

__all__ = ["short_convolution"]
