"""The memory and the mixers as layers for other models: keyword settings, (B, T, d_model) and a state in and out.

Each layer is the internal one with a constructor of its own: settings come by keyword, with the defaults of
``model``, ``model.memory``, the mixer's and the memory rule's own section (docs/settings.md). Weights are initialised
as in our models. Importing this module imports torch, but nothing of the training stack.
"""

import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from pydantic import ValidationError
from torch import Tensor

from titans_pt.config import Config, MemoryConfig, ModelConfig
from titans_pt.config.checks import checked_model
from titans_pt.config.words import one_line
from titans_pt.errors import UserError
from titans_pt.kernels.memory.rules import RULES
from titans_pt.layers import memory
from titans_pt.layers.documents import Documents
from titans_pt.layers.memory import NeuralMemoryState
from titans_pt.layers.state import rows
from titans_pt.models.backbone import initialise
from titans_pt.models.mixers import MIXERS, Mixer
from titans_pt.models.mixers.common import MemoryMixer
from titans_pt.models.mixers.lmm import LMM as _LMM
from titans_pt.models.mixers.mac import MAC as _MAC
from titans_pt.models.mixers.mag import MAG as _MAG
from titans_pt.models.mixers.mal import MAL as _MAL

_ANY_LENGTH = 1 << 40
"""Stands for data.seq_len, which a layer does not have, in checks of settings: no window and no chunk is longer."""
_OF_A_MODEL = {
    "mixers", "vocab_size", "vocab_multiple", "d_model", "mlp_hidden", "tie_embeddings", "embedding_scale", "memory",
}  # fmt: skip
"""Settings of ``model`` that say nothing about one layer, or have a place of their own."""
_OF_A_MEMORY = {"write_cost"}
"""Settings of ``model.memory`` that only a training loop of ours reads."""


class NeuralMemory(memory.NeuralMemory):
    """(B, T, d_model) -> (what the memory recalls at each token, (B, T, d_model), and the state after the last token).

    Args:
        d_model: width of the inputs and outputs.
        n_heads: memory heads; None: 16, or the largest smaller number that divides d_model.
        settings: any setting of ``model.memory`` but hierarchy and write_cost, of its rule's own section,
            and conv_width and norm_eps. ``init_std`` is that of the memory's first weights.

    Raises:
        UserError: a keyword is unknown, or a value does not fit.
    """

    def __init__(self, d_model: int, n_heads: int | None = None, **settings: Any):
        sections = {
            "model.memory": MemoryConfig.model_fields.keys() - _OF_A_MEMORY - {"hierarchy"},
            **_rule_section(settings),
            "model": {"n_heads", "conv_width", "norm_eps"},
        }
        config = _model_config(type(self).__name__, _LMM, d_model, n_heads, settings, sections)
        super().__init__(config.d_model, config.memory_heads, config.conv_width, config.memory, config.norm_eps)
        initialise(self, config)

    def forward(
        self, x: Tensor, state: NeuralMemoryState | None = None, *rest, **more
    ) -> tuple[Tensor, NeuralMemoryState]:
        """
        Args:
            x: (B, T, d_model), any T >= 1.
            state: what the previous call returned for the same rows; None at the start of a sequence.

        Returns:
            (B, T, d_model) in the parameters' dtype, and the state after the last token.
        """
        _check_input(x, self.q.linear.in_features, state)
        return super().forward(x, state, *rest, **more)


class _Layer(Mixer):
    """A mixer that is built from keywords, in place of an attention layer.

    Args:
        d_model: width of the inputs and outputs.
        n_heads: heads of attention and memory; None: 16, or the largest smaller number that fits d_model.
        settings: any setting of the mixer's own section, of ``model`` that mixers share, of ``model.memory`` and of its
            rule's own section. ``init_std`` is that of linear layers; ``memory={"init_std": ...}`` gives the memory's.

    Raises:
        UserError: a keyword is unknown, or a value does not fit.
    """

    def __init__(self, d_model: int, n_heads: int | None = None, **settings: Any):
        config = _mixer_config(type(self).__name__, type(self), d_model, n_heads, settings)
        # The internal class comes next in the order of inheritance: its constructor takes the settings.
        cast(Any, super()).__init__(config)
        self.d_model = config.d_model
        initialise(self, config)

    def forward(self, x: Tensor, state: Any = None, documents: Documents | None = None) -> tuple[Tensor, Any]:
        """
        Args:
            x: (B, T, d_model), any T >= 1.
            state: what the previous call returned for the same rows; None at the start of a sequence.

        Returns:
            (B, T, d_model), and the state after the last token.
        """
        _check_input(x, self.d_model, state)
        return super().forward(x, state, documents)


class LMM(_Layer, _LMM):
    __doc__ = f"{_LMM.__doc__}\n    Built from keywords: see the settings in docs/python.md."


class MAC(_Layer, _MAC):
    __doc__ = f"{_MAC.__doc__}\n    Built from keywords: see the settings in docs/python.md."


class MAG(_Layer, _MAG):
    __doc__ = f"{_MAG.__doc__}\n    Built from keywords: see the settings in docs/python.md."


class MAL(_Layer, _MAL):
    __doc__ = f"{_MAL.__doc__}\n    Built from keywords: see the settings in docs/python.md."


def mixer(name: str, d_model: int, n_heads: int | None = None, **settings: Any) -> Mixer:
    """Any mixer that ``model.mixers`` may name, such as "mac", "mamba2" or "gated_deltanet", as one layer.

    Args:
        name: as in ``model.mixers``; your own mixers are known once their module is imported.
        d_model, n_heads, settings: as for :class:`MAC`.

    Raises:
        UserError: an unknown mixer, one that is not a layer by itself, an unknown keyword, a value that does not fit.
    """
    kind = MIXERS.find(name)
    if kind.around is not Mixer.around or kind.bind is not Mixer.bind:
        raise UserError(f"mixer: given {name!r}, whose layers depend on each other; train it as a whole model: "
                        f"titans train 'model.mixers=[{name}]'")  # fmt: skip
    config = _mixer_config(name, kind, d_model, n_heads, settings)
    layer = kind(config)
    initialise(layer, config)
    return layer


def _mixer_config(
    caller: str, kind: type[Mixer], d_model: int, n_heads: int | None, settings: dict[str, Any]
) -> ModelConfig:
    sections = {f"model.{kind.name}": set(kind.Settings.model_fields)}
    sections["model"] = ModelConfig.model_fields.keys() - _OF_A_MODEL
    if issubclass(kind, MemoryMixer):
        sections["model"] |= {"memory"}
        sections["model.memory"] = MemoryConfig.model_fields.keys() - _OF_A_MEMORY
        sections |= _rule_section(settings)
    return _model_config(caller, kind, d_model, n_heads, settings, sections)


def _rule_section(settings: dict[str, Any]) -> dict[str, set[str]]:
    """The own settings of the memory rule that the keywords choose, by the path of their section."""
    chosen = settings.get("rule", MemoryConfig.model_fields["rule"].default)
    if not isinstance(chosen, str):
        return {}  # validation says what is wrong with it
    with _by_keywords():
        rule = RULES.find(chosen)
    return {f"model.memory.{rule.name}": set(rule.Settings.model_fields)}


def _model_config(
    caller: str,
    kind: type[Mixer],
    d_model: int,
    n_heads: int | None,
    settings: dict[str, Any],
    sections: dict[str, set[str]],
) -> ModelConfig:
    """The ``model`` section of one layer, completed and checked as that of a run.

    Args:
        caller: the public name, for messages.
        sections: path of a section -> the keywords that it takes; a keyword goes to the first that has it.
    """
    tree: dict[str, Any] = {"mixers": [kind.name], "d_model": d_model}
    if isinstance(given := settings.get("memory"), dict) and "memory" in sections["model"]:
        settings, tree["memory"] = {key: value for key, value in settings.items() if key != "memory"}, dict(given)
    if n_heads is not None:
        tree["n_heads"] = n_heads
    for key, value in settings.items():
        path = next((path for path, keys in sections.items() if key in keys), None)
        if path is None:
            known = sorted(set().union(*sections.values()) | {"d_model"})
            (near,) = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise UserError(f"{caller}: unknown keyword {key!r} (given {value!r}); nearest allowed keyword: {near}")
        place = tree
        for name in path.split(".")[1:]:
            place = place.setdefault(name, {})
        place[key] = value
    with _by_keywords():
        config = Config.model_validate(
            {"model": tree, "data": {"seq_len": _ANY_LENGTH}, "train": {"batch_tokens": _ANY_LENGTH, "micro_batch": 1}}
        )
        return checked_model(config).model


@contextmanager
def _by_keywords() -> Iterator[None]:
    """Errors inside it name settings as the keywords that they are here."""
    try:
        yield
    except (ValidationError, UserError) as error:
        message = one_line(error) if isinstance(error, ValidationError) else str(error)
        raise UserError(re.sub(r"\bmodel\.(?:\w+\.)*(?=\w)", "", message)) from None


def _check_input(x: Tensor, d_model: int, state: Any):
    if x.dim() != 3 or x.shape[-1] != d_model or x.numel() == 0:
        raise UserError(f"x: given shape {tuple(x.shape)}; allowed: (B, T, {d_model}), at least one row and one token")
    if (given := rows(state)) not in (None, len(x)):
        raise UserError(f"state: given one of {given} rows; x has {len(x)}; pass what the call for these rows returned")
