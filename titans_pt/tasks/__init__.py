"""Tasks, which a model learns: one per file, found by name; base.py has their contract."""

from titans_pt.tasks.base import TASKS, Samples, Task, TaskData, task_of

__all__ = ["TASKS", "Samples", "Task", "TaskData", "task_of"]
