"""Sequence mixers, one a file, found by name; base.py has what each must be."""

from titans_pt.models.mixers.base import MIXERS, Mixer

__all__ = ["MIXERS", "Mixer"]
