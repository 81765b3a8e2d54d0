"""The scan of Mamba and Longhorn: a small state per channel, every entry of which decays at its own pace."""

from titans_pt.kernels.channel_scan.dispatch import channel_scan, unserved

__all__ = ["channel_scan", "unserved"]
