"""Evaluations of a trained model: perplexity, needles in long contexts, and text from a prompt."""

from titans_pt.evaluation.conversation import chat
from titans_pt.evaluation.generation import generate, generate_batch
from titans_pt.evaluation.runner import evaluate

__all__ = ["chat", "evaluate", "generate", "generate_batch"]
