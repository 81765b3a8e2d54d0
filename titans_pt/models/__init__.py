"""Models: a backbone of blocks, each a sequence mixer found by name and an MLP, and the ends around it."""

from titans_pt.models.backbone import Backbone
from titans_pt.models.language_model import LanguageModel, LanguageModelState, build_model

__all__ = ["Backbone", "LanguageModel", "LanguageModelState", "build_model"]
