"""Runs as folders: paths, checkpoints, shards, model states, external logs, and loading a run."""
