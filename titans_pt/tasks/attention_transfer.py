"""Attention transfer: layers made by ``titans convert`` learn the output of full attention."""

from dataclasses import replace
from itertools import islice
from typing import cast

import torch
from torch import Tensor, nn

from titans_pt.config import Config
from titans_pt.errors import UserError
from titans_pt.layers.documents import Documents
from titans_pt.models import LanguageModel
from titans_pt.models.backbone import Block
from titans_pt.models.mixers import MIXERS
from titans_pt.models.mixers.base import Need
from titans_pt.models.mixers.common import BesideAttention
from titans_pt.parallel import RankGroup
from titans_pt.tasks.base import TASKS, TaskData, nan_unless_finite, refuse, with_weights
from titans_pt.tasks.language import Language


@TASKS.register
class AttentionTransfer(Language):
    """Stage 1 of a conversion: regress each layer's output on the output of full attention, on text.

    Every layer reads the residual stream of the source model, which has full attention in every layer. A layer's loss
    has gradients in that layer alone: nothing passes backward from layer to layer.
    """

    name = "attention_transfer"
    unit = "squared error over that of the window alone"
    baseline_name = "the window alone"

    @classmethod
    def check(cls, config: Config, need: Need):
        super().check(config, need)
        learns = [name for name in MIXERS.names() if issubclass(MIXERS.find(name), BesideAttention)]
        need(
            any(name in learns for name in config.model.kinds),
            "task",
            cls.name,
            f"only with {' or '.join(learns)} in model.mixers={config.model.mixers}, as titans convert makes it",
        )
        need(
            bool(config.train.trainable),
            "train.trainable",
            config.train.trainable,
            'must name what the layers add to attention, such as ["*.memory*"]',
        )
        seen = config.model.window + config.model.attention.sinks
        need(
            seen < config.data.seq_len,
            "data.seq_len",
            config.data.seq_len,
            f"above {seen}, model.window and model.attention.sinks: the window misses nothing of shorter samples",
        )
        periods = config.model.mlp_periods
        need(not periods, "model.mlp_periods", periods, f"not with task={cls.name}, which does not run the levels")
        context = config.parallel.context
        need(context == 1, "parallel.context", context, f"not with task={cls.name}; leave it out")
        refuse(
            config, need, cls.name, "parallel.sequence", "train.wavefront", "train.z_loss", "model.memory.write_cost"
        )

    def objective(self, model: nn.Module, tensor: RankGroup) -> nn.Module:
        """
        Raises:
            UserError: train.trainable names parameters that the loss does not reach. Under ZeRO their gradients are
                zero, and weight decay would shrink them.
        """
        loss = AttentionTransferLoss(model)
        learn = tuple(f"blocks.{n}.mixer." for n in loss.learn)
        others = [name for name, p in model.named_parameters() if p.requires_grad and not name.startswith(learn)]
        if others:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            raise UserError(f"train.trainable: given {self.config.train.trainable}, which names {others[0]}{more}, but "
                            f"task={self.name} teaches mixers with a memory alone; name their parameters, such as "
                            '["*.memory*"]')  # fmt: skip
        return loss

    def output_bytes(self, rows: int, length: int, width: int) -> dict[str, int]:
        return {}

    def open(self) -> TaskData:
        return replace(super().open(), baseline=1.0)


LEAST = 1e-3
"""Lower bound of the loss's denominator, as a share of full attention's squared output."""


class AttentionTransferLoss(nn.Module):
    """The model and its loss: the mean over layers and rows of |y - f|^2 / |w - f|^2.

    y is a layer's output, f the output of full attention, w the output of the window alone. A conversion begins at 1;
    0 is full attention. The denominator is at least LEAST |f|^2. Otherwise a row whose window misses next to nothing of
    full attention (documents no longer than the window) would outweigh all others.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = cast(LanguageModel, model)
        self.learn = [n for n, block in enumerate(self.model.blocks) if isinstance(block.mixer, BesideAttention)]
        """Indices of the layers that learn."""

    def forward(self, ids: Tensor, reset: Tensor | None, weight: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        """
        Args:
            ids: (B, T + 1) int64; the last token is not read, as in next-token prediction.
            reset, weight: as in NextTokenLoss.

        Returns:
            The mean loss, a scalar; NaN if it is infinite. With weights {"loss": the mean loss, "layer_N": the loss of
            layer N}, where an infinite loss stays infinite.
        """
        documents = None if reset is None else Documents.of(reset, ids.device)
        blocks = self.model.blocks
        with torch.no_grad():
            x = self.model.embed(ids[:, :-1])
        errors = {}
        for n, block in enumerate(islice(blocks, self.learn[-1] + 1)):  # later layers have nothing to learn
            with torch.no_grad():
                before = block.mixer_norm(x)
                full = block.mixer.unlimited(before, documents)
                x = block.feed(x + full)
            if n in self.learn:
                with torch.no_grad():
                    window = cast(BesideAttention, block.mixer).limited(before, documents)
                y = blocks.call(_mixed, block, before, documents)
                least = LEAST * full.float().square().sum((1, 2)) + torch.finfo(torch.float32).tiny
                errors[n] = _squares(y, full) / torch.maximum(_squares(window, full), least)
        if weight is not None:
            layers = {n: with_weights(error, weight) for n, error in errors.items()}
            return {"loss": torch.stack(list(layers.values())).mean()} | {f"layer_{n}": e for n, e in layers.items()}
        return nan_unless_finite(torch.stack(list(errors.values())).mean())


def _mixed(block: Block, x: Tensor, documents: Documents | None) -> Tensor:
    return block.mixer(x, documents=documents)[0]


def _squares(x: Tensor, y: Tensor) -> Tensor:
    """|x - y|^2 of each row, (B,) fp32."""
    return (x.float() - y.float()).square().sum((1, 2))
