"""Language models: a list of blocks, each a sequence mixer found by name and an MLP."""

from titans_pt.models.language_model import LanguageModel, LanguageModelState, build_model

__all__ = ["LanguageModel", "LanguageModelState", "build_model"]
