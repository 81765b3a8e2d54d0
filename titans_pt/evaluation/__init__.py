"""What a trained model can do: perplexity, needles in long contexts, and text from a prompt."""

from titans_pt.evaluation.generation import generate
from titans_pt.evaluation.runner import evaluate

__all__ = ["evaluate", "generate"]
