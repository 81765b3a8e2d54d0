"""Sequence mixers: one per file, found by name; base.py has their contract."""

from titans_pt.models.mixers.base import MIXERS, Mixer

__all__ = ["MIXERS", "Mixer"]
