"""Reference pretraining stack for Titans: models whose memory keeps learning at test time.

Public names are imported at their first use: ``import titans_pt`` alone does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titans_pt.errors import UserError
    from titans_pt.layers.memory_observer import MemoryFigures
    from titans_pt.library.layers import LMM, MAC, MAG, MAL, NeuralMemory, mixer
    from titans_pt.library.state import (
        detach_state,
        fork_state,
        join_rows,
        load_state,
        move_state,
        save_state,
        take_rows,
    )
    from titans_pt.library.titan import Reading, Titan
    from titans_pt.models.backbone import parameter_groups

__version__ = "0.3.0"

_PUBLIC = {
    "LMM": "titans_pt.library.layers",
    "MAC": "titans_pt.library.layers",
    "MAG": "titans_pt.library.layers",
    "MAL": "titans_pt.library.layers",
    "MemoryFigures": "titans_pt.layers.memory_observer",
    "NeuralMemory": "titans_pt.library.layers",
    "Reading": "titans_pt.library.titan",
    "Titan": "titans_pt.library.titan",
    "UserError": "titans_pt.errors",
    "detach_state": "titans_pt.library.state",
    "fork_state": "titans_pt.library.state",
    "join_rows": "titans_pt.library.state",
    "load_state": "titans_pt.library.state",
    "mixer": "titans_pt.library.layers",
    "move_state": "titans_pt.library.state",
    "parameter_groups": "titans_pt.models.backbone",
    "save_state": "titans_pt.library.state",
    "take_rows": "titans_pt.library.state",
}
"""Public name -> the module that defines it."""

__all__ = [
    "LMM", "MAC", "MAG", "MAL", "MemoryFigures", "NeuralMemory", "Reading", "Titan", "UserError", "detach_state",
    "fork_state", "join_rows", "load_state", "mixer", "move_state", "parameter_groups", "save_state", "take_rows",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_PUBLIC[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
