"""Reference pretraining stack for Titans: models whose memory keeps learning at test time.

The public names are imported when they are first used: ``import titans_pt`` alone does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titans_pt.errors import UserError
    from titans_pt.library.layers import LMM, MAC, MAG, MAL, NeuralMemory, mixer
    from titans_pt.library.titan import Reading, Titan

__version__ = "0.1.0"

_PUBLIC = {
    "LMM": "titans_pt.library.layers",
    "MAC": "titans_pt.library.layers",
    "MAG": "titans_pt.library.layers",
    "MAL": "titans_pt.library.layers",
    "NeuralMemory": "titans_pt.library.layers",
    "Reading": "titans_pt.library.titan",
    "Titan": "titans_pt.library.titan",
    "UserError": "titans_pt.errors",
    "mixer": "titans_pt.library.layers",
}
"""Public name -> the module that defines it."""

__all__ = ["LMM", "MAC", "MAG", "MAL", "NeuralMemory", "Reading", "Titan", "UserError", "mixer"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_PUBLIC[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
