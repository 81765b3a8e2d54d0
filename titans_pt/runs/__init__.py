"""Runs as folders: what lies where, checkpoints, shards, states of models, logs elsewhere, a run opened again."""
