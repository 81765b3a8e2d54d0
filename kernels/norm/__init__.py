"""Root-mean-square normalisation."""

from titans_pt.kernels.norm.dispatch import rms_norm

__all__ = ["rms_norm"]
