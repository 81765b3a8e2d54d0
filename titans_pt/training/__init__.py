"""Training: the loop, the DeepSpeed engine under it, the schedule, metrics and signals."""
