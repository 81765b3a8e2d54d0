"""Yaad of MIRAS (arXiv 2504.13173, Section 5): the Huber loss, whose gradient large errors do not increase."""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from titans_pt.config import Section
from titans_pt.kernels.memory.rules.base import RULES, Own, OwnGate, Rule


@RULES.register
class Yaad(Rule):
    """Huber loss of the error e = M(k) - v with a threshold d_t > 0 that the token sets, in Titans' scale (no half):

        radial  ||e||^2 if ||e|| <= d, else 2 d ||e|| - d^2           the paper's Eq. 15, for the whole vector
        switch  ||e||^2 if ||e|| <= d, else d sum |e_i|               the paper's update for Yaad, as printed

    d is a softplus of a linear function of the token, multiplied by sqrt(D), which makes it a threshold in units of the
    error's root mean square. The paper does not say how d is computed. At the threshold the gradient of ``switch``
    jumps in length from 2 d to d sqrt(D).
    """

    name: ClassVar[str] = "yaad"
    gates: dict[str, OwnGate] = {"threshold": OwnGate(start=1.0)}

    class Settings(Section):
        form: Literal["radial", "switch"] = "radial"
        """Loss of an error whose length is above the threshold. radial: Huber's loss of the vector. switch: the
        gradient is that of the l1 norm, as MIRAS prints it; it jumps at the threshold."""

    settings: Settings

    @property
    def compiled_loss(self) -> str | None:  # type: ignore[override]
        return "huber" if self.settings.form == "radial" else None

    def loss(self, error: Tensor, v: Tensor, own: Own) -> Tensor:
        (threshold,) = own
        d = threshold.squeeze(-1) * error.shape[-1] ** 0.5
        size = torch.linalg.vector_norm(error, dim=-1)
        beyond = 2 * d * size - d.square() if self.settings.form == "radial" else d * error.abs().sum(-1)
        return torch.where(size <= d, error.square().sum(-1), beyond)

    def gradient(self, error: Tensor, v: Tensor, own: Own) -> Tensor:
        (threshold,) = own
        d = threshold * error.shape[-1] ** 0.5
        size = torch.linalg.vector_norm(error, dim=-1, keepdim=True)
        if self.settings.form == "radial":
            return 2 * error * (d / torch.maximum(size, d))
        return torch.where(size <= d, 2 * error, d * error.sign())
