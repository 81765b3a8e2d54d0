"""Atlas (arXiv 2505.23735): the Omega rule with Muon."""

from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from titans_pt.kernels.memory.rules.base import RULES
from titans_pt.kernels.memory.rules.muon import ChunkSteps, orthogonal, orthogonal_flops
from titans_pt.kernels.memory.rules.omega import Windowed, WindowSettings


@RULES.register
class Atlas(ChunkSteps, Windowed):
    """omega's window, features and loss; a chunk takes one step along its momentum made orthogonal, as muon's."""

    name: ClassVar[str] = "atlas"

    class Settings(WindowSettings):
        size: Annotated[float, Field(gt=0.0)] = 0.03
        """Largest step of a chunk, as model.memory.muon.size."""

    settings: Settings

    @property
    def most(self) -> float:
        return self.settings.size

    def direction(self, momentum: Tensor) -> Tensor:
        return orthogonal(momentum)

    def closing_flops(self, d_in: int, d_out: int) -> float:
        return orthogonal_flops(d_in, d_out)
