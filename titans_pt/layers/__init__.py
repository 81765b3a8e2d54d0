"""Modules with ``forward(x, state, ...) -> (y, state)``; no model, no parallelism."""
