"""Inspection of the memory: surprise, gates and state norms of every token of a text, as arrays, a picture, a table."""

from titans_pt.inspection.inspection import Inspection
from titans_pt.inspection.inspector import inspect

__all__ = ["Inspection", "inspect"]
