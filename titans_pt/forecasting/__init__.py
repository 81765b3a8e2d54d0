"""Time series: files, splits, scaling and windows of the usual protocol, and baselines that need no training."""
