"""Atlas (arXiv 2505.23735): the Omega rule with Muon."""

from typing import ClassVar

from titans_pt.kernels.memory.rules.base import RULES
from titans_pt.kernels.memory.rules.muon import ChunkSteps, StepSettings
from titans_pt.kernels.memory.rules.omega import WindowRule, WindowSettings


@RULES.register
class Atlas(ChunkSteps, WindowRule):
    """omega's window, features and loss; a chunk takes one step along its momentum made orthogonal, as muon's."""

    name: ClassVar[str] = "atlas"

    class Settings(WindowSettings, StepSettings):
        pass

    settings: Settings
