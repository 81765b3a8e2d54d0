"""What the memory did with a text: surprise, gates and state norms of every token, as arrays, a picture, a table."""

from titans_pt.inspection.inspection import Inspection
from titans_pt.inspection.inspector import inspect

__all__ = ["Inspection", "inspect"]
