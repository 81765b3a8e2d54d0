"""What is learned, one task a file, found by name; base.py has what each must be."""

from titans_pt.tasks.base import TASKS, Samples, Task, TaskData

__all__ = ["TASKS", "Samples", "Task", "TaskData"]
