"""Experiments: small questions about the models, each with its task, its command and its picture."""
