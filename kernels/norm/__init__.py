"""Root-mean-square normalisation."""

from titans_pt.kernels.norm.dispatch import prepared, rms_norm, unserved

__all__ = ["prepared", "rms_norm", "unserved"]
