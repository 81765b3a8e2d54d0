"""Atlas (arXiv 2505.23735): the Omega rule with Muon."""

from typing import ClassVar

from titans_pt.kernels.memory.rules.base import RULES
from titans_pt.kernels.memory.rules.muon import ChunkSteps, StepSettings
from titans_pt.kernels.memory.rules.omega import WindowRule, WindowSettings


@RULES.register
class Atlas(ChunkSteps, WindowRule):
    """Window, features and loss of omega; each chunk takes one step along its orthogonalised momentum, as in muon."""

    name: ClassVar[str] = "atlas"

    class Settings(WindowSettings, StepSettings):
        pass

    settings: Settings
