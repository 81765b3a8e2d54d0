"""What a trained model can do: perplexity, needles in long contexts, and text from a prompt."""

from titans_pt.evaluation.runner import evaluate
from titans_pt.evaluation.stream import generate

__all__ = ["evaluate", "generate"]
