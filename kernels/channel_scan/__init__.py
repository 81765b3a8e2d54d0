"""Selective scan of Mamba and Longhorn: a small state per channel, in which each entry has its own decay."""

from titans_pt.kernels.channel_scan.dispatch import channel_scan, unserved

__all__ = ["channel_scan", "unserved"]
