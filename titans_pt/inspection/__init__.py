"""What the memory did with a text: surprise, gates and state norms of every token, as arrays, a picture, a table."""

from titans_pt.inspection.inspector import Inspection, inspect

__all__ = ["Inspection", "inspect"]
