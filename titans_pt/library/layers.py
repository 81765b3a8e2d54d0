"""The memory and the mixers as layers for other models: keyword settings, (B, T, d_model) and a state in and out.

Each layer is an internal class with a different constructor: its settings are keywords. Their defaults are those of
``model``, ``model.memory``, and the sections of the mixer and of the memory rule (docs/settings.md). Weights are
initialised as in our models. Importing this module imports torch, but nothing of the training stack.
"""

import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from titans_pt.config import Config, MemoryConfig, ModelConfig
from titans_pt.config.checks import checked_model
from titans_pt.config.history import without_gone
from titans_pt.config.model import section_at
from titans_pt.config.words import one_line
from titans_pt.errors import UserError
from titans_pt.kernels.memory.rules import RULES
from titans_pt.layers import memory
from titans_pt.layers.documents import Documents
from titans_pt.layers.gradients import with_gradients
from titans_pt.layers.memory import MemoryNetwork, NeuralMemoryState
from titans_pt.layers.memory_observer import MemoryFigures, observe_memories
from titans_pt.layers.state import compact, declared_states, rows, tensors, usable
from titans_pt.layers.ttt import TTTNetwork
from titans_pt.models.backbone import initialise
from titans_pt.models.mixers import MIXERS, Mixer
from titans_pt.models.mixers.common import MemoryMixer, Windowed
from titans_pt.models.mixers.lmm import LMM as _LMM
from titans_pt.models.mixers.mac import MAC as _MAC
from titans_pt.models.mixers.mag import MAG as _MAG
from titans_pt.models.mixers.mal import MAL as _MAL

_ANY_LENGTH = 1 << 40
"""Replaces data.seq_len in checks of settings: a layer has no such setting, and no window or chunk is longer."""
_OF_A_MODEL = {
    "mixers", "n_heads", "window", "vocab_size", "vocab_multiple", "d_model", "mlp_hidden", "mlp_periods",
    "tie_embeddings", "embedding_scale", "memory", "lora",
}  # fmt: skip
"""Settings of ``model`` that do not concern a single layer, or that are handled separately."""
_OF_A_MEMORY = {"write_cost"}
"""Settings of ``model.memory`` that only our training loop reads."""


class _Public(nn.Module):
    """A layer that can draw its first weights again, and knows its states."""

    _made_of: tuple[int, int | None, dict[str, Any]]
    """d_model, n_heads and settings, as given to the constructor."""
    _states: tuple[type, ...] = (object,)
    """Classes of its states, as the internal class declares them."""

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        inner = cls.__mro__[cls.__mro__.index(_Public) + 1 :]
        cls._states = declared_states(next(vars(kind)["forward"] for kind in inner if "forward" in vars(kind)))

    @torch.no_grad()
    def reset_parameters(self):
        """Initialise all parameters and buffers in place, as the constructor does from torch's global generator.

        Call it after ``to_empty``, for a layer that was made on the meta device, or to start training again. It builds
        a second layer on the same device. It fills whole tensors: call it before sharding.
        """
        d_model, n_heads, settings = self._made_of
        with next(self.parameters()).device:
            fresh = cast(Any, type(self))(d_model, n_heads, **settings)
        for name, parameter in self.named_parameters():
            parameter.copy_(fresh.get_parameter(name))
        for name, buffer in self.named_buffers():
            buffer.copy_(fresh.get_buffer(name))


class NeuralMemory(_Public, memory.NeuralMemory):
    """The memory as a layer: x (B, T, d_model) -> outputs M_t(q_t) (B, T, d_model), and the state after the last token.

    It has no residual, output gate or output projection; LMM, MAC, MAG and MAL have them.

    Args:
        d_model: width of the inputs and outputs.
        n_heads: memory heads; None: 16, or the largest smaller number that divides d_model. The Triton kernels need
            d_model / n_heads to be 32, 64 or 128.
        settings: any setting of ``model.memory`` except hierarchy and write_cost, any setting of the rule's own
            section, conv_width and norm_eps. ``init_std`` applies to the memory's initial weights.

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
        self._made_of = d_model, n_heads, settings
        initialise(self, config)

    def forward(  # type: ignore[override]  # takes a mask; the internal class takes Documents
        self, x: Tensor, state: NeuralMemoryState | None = None, reset: Tensor | None = None, **more: Any
    ) -> tuple[Tensor, NeuralMemoryState]:
        """
        Args:
            x: (B, T, d_model), any T >= 1.
            state: the state that the previous call returned for the same rows; None at the start of a sequence.
            reset: bool (B, T), True where a new sequence starts; its tokens see nothing before it. None: no new
                sequence starts.

        Returns:
            (B, T, d_model) in the parameters' dtype, and the state after the last token.

        Raises:
            UserError: a shape or the state's rows do not fit.
            ValueError: the state belongs to another memory.
        """
        documents = _checked_input(self, x, self.q.linear.in_features, state, reset)
        before = usable(state, documents)
        return _finished(self, state, *super().forward(x, before, documents, **more))

    def inspect(self, x: Tensor, state: NeuralMemoryState | None = None, reset: Tensor | None = None) -> MemoryFigures:
        """Surprise, gates and norms of the memory at each token, (B, T, n_heads) each.

        The arguments are those of :meth:`forward`. It runs token by token in PyTorch: for analysis, not for training.
        """
        return _inspected(self, x, state, reset)


class _Layer(_Public, Mixer):
    """A mixer that is built from keywords, in place of an attention layer.

    Args:
        d_model: width of the inputs and outputs.
        n_heads: heads of attention and memory; None: 16, or the largest smaller number that fits d_model.
        settings: any setting of the mixer's own section, and the settings of ``model`` that it uses. A mixer with a
            memory also takes the settings of ``model.memory`` and of the rule's own section. ``init_std`` applies to
            linear layers; ``memory={"init_std": ...}`` sets the memory's.

    Raises:
        UserError: a keyword is unknown, or a value does not fit.
    """

    def __init__(self, d_model: int, n_heads: int | None = None, **settings: Any):
        config = _mixer_config(type(self).__name__, type(self), d_model, n_heads, settings)
        # The internal class comes next in the order of inheritance: its constructor takes the settings.
        cast(Any, super()).__init__(config)
        self.d_model, self._made_of = config.d_model, (d_model, n_heads, settings)
        initialise(self, config)

    def forward(  # type: ignore[override]  # takes a mask; the internal class takes Documents
        self, x: Tensor, state: Any = None, reset: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """
        Args:
            x: (B, T, d_model), any T >= 1.
            state: the state that the previous call returned for the same rows; None at the start of a sequence.
            reset: bool (B, T), True where a new sequence starts; its tokens see nothing before it. None: no new
                sequence starts.

        Returns:
            (B, T, d_model), and the state after the last token.

        Raises:
            UserError: a shape or the state's rows do not fit.
            ValueError: the state belongs to another memory.
        """
        documents = _checked_input(self, x, self.d_model, state, reset)
        before = usable(state, documents)
        return _finished(self, state, *super().forward(x, before, documents))

    def set_progress(self, done: float):
        """Set the share of training that is done: before each training step, and after loading weights of any step.

        Schedules of mixers follow it (``mix_warmup`` of liza, ``base_lr_warmup`` of TTT, ``hierarchy.final_locals``).
        Until the first call, warm-ups count as finished, and a hierarchy has its ``locals``.

        Args:
            done: share from 0 to 1.

        Raises:
            UserError: ``done`` is outside this range.
        """
        if not 0 <= done <= 1:
            raise UserError(f"done: given {done}; allowed: from 0 to 1")
        super().set_progress(done)

    def inspect(self, x: Tensor, state: Any = None, reset: Tensor | None = None) -> MemoryFigures:
        """Figures of this layer's memory for the tokens of x, without persistent tokens; see
        :meth:`NeuralMemory.inspect`.

        Raises:
            UserError: the layer has no neural memory.
        """
        return _inspected(self, x, state, reset)


class LMM(_Layer, _LMM):  # type: ignore[misc]  # forward takes a mask
    __doc__ = f"{_LMM.__doc__}\n    Built from keywords: see the settings in docs/python.md."


class MAC(_Layer, _MAC):  # type: ignore[misc]  # forward takes a mask
    __doc__ = f"{_MAC.__doc__}\n    Built from keywords: see the settings in docs/python.md."


class MAG(_Layer, _MAG):  # type: ignore[misc]  # forward takes a mask
    __doc__ = f"{_MAG.__doc__}\n    Built from keywords: see the settings in docs/python.md."


class MAL(_Layer, _MAL):  # type: ignore[misc]  # forward takes a mask
    __doc__ = f"{_MAL.__doc__}\n    Built from keywords: see the settings in docs/python.md."


def mixer(name: str, d_model: int, n_heads: int | None = None, **settings: Any) -> Mixer:
    """Any mixer that ``model.mixers`` may name, such as "mac", "mamba2" or "gated_deltanet", as one layer.

    Args:
        name: as in ``model.mixers``; your own mixers are known once their module is imported.
        d_model, settings: as for :class:`MAC`.
        n_heads: None: the mixer's default. Refused for a mixer without heads, or whose heads follow from
            ``head_width``.

    Raises:
        UserError: an unknown mixer, a mixer whose layers depend on each other, an unknown keyword, or a value that
            does not fit.
    """
    kind = MIXERS.find(name)
    if kind.around is not Mixer.around or kind.bind is not Mixer.bind:
        raise UserError(f"mixer: given {name!r}, whose layers depend on each other; train it as a whole model: "
                        f"titans train quickstart 'model.mixers=[{name}]'")  # fmt: skip
    return _layer_of(kind)(d_model, n_heads, **settings)


_LAYERS: dict[str, type[_Layer]] = {"lmm": LMM, "mac": MAC, "mag": MAG, "mal": MAL}
"""Mixer's name -> its class as a layer; classes of other mixers are added on first use."""


def _layer_of(kind: type[Mixer]) -> type[_Layer]:
    """Class of a mixer built from keywords. It is an attribute of this module, so that its objects can be pickled."""
    made = _LAYERS.get(kind.name)
    if made is None or not issubclass(made, kind):  # a user's mixer may be defined again
        made = type(kind.name, (_Layer, kind), {"__doc__": kind.__doc__, "__module__": __name__})
        _LAYERS[kind.name] = made
    return made


def __getattr__(name: str) -> Any:
    if name.startswith("__") or name not in MIXERS.names():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _layer_of(MIXERS.find(name))


def _mixer_config(
    caller: str, kind: type[Mixer], d_model: int, n_heads: int | None, settings: dict[str, Any]
) -> ModelConfig:
    sections = {f"model.{kind.name}": set(kind.Settings.model_fields)}
    taken = ModelConfig.model_fields.keys() - _OF_A_MODEL
    sections["model"] = taken if kind.shared is None else taken & set(kind.shared)
    if issubclass(kind, Windowed):
        sections["model"] |= {"window"}
    if issubclass(kind, MemoryMixer):
        sections["model"] |= {"memory"}
        sections["model.memory"] = MemoryConfig.model_fields.keys() - _OF_A_MEMORY
        sections |= _rule_section(settings)
    return _model_config(caller, kind, d_model, n_heads, settings, sections)


def _rule_section(settings: dict[str, Any]) -> dict[str, set[str]]:
    """Names of the settings of the memory rule that the keywords choose, by the path of the rule's section."""
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
    """The ``model`` section of one layer, completed and checked like a run's.

    Args:
        caller: the public name, for messages.
        sections: path of a section -> the keywords that it takes; a keyword goes to the first section that takes it.
    """
    tree: dict[str, Any] = {"mixers": [kind.name], "d_model": d_model}
    if "memory" in settings and "memory" in sections["model"]:
        given, settings = settings["memory"], {key: value for key, value in settings.items() if key != "memory"}
        tree["memory"] = dict(given) if isinstance(given, dict) else given
    if n_heads is not None:
        own = kind.Settings.model_fields
        if "n_heads" not in own and kind.shared is not None and "n_heads" not in kind.shared:
            remedy = f"{kind.name} has no heads: leave it out"
            if "head_width" in own:
                remedy = f"heads of {kind.name} follow from another setting: give head_width in its place"
            raise UserError(f"n_heads: given {n_heads}; {remedy}")
        heads = (section_at(tree, ["memory"]) or {}).get("n_heads") or n_heads
        if heads != n_heads and kind.shared is not None and "attention" not in kind.shared:
            raise UserError(f"{caller}: n_heads: given {n_heads}, and {heads} in memory, which has all heads of "
                            f"{kind.name}; give one of them")  # fmt: skip
        (tree.setdefault(kind.name, {}) if "n_heads" in own else tree)["n_heads"] = n_heads
    for key, value in settings.items():
        path, *others = [path for path, keys in sections.items() if key in keys] or [""]
        if rule := next((other for other in others if other.count(".") == 2), None):
            name = rule.rpartition(".")[2]
            raise UserError(f"{caller}: keyword {key!r} is a setting of the layer and of its memory's rule; give the "
                            f"rule's as memory={{'rule': {name!r}, {name!r}: {{{key!r}: {value!r}}}}}")  # fmt: skip
        if not path:
            known = sorted(set().union(*sections.values()) | {"d_model", "n_heads"})
            near = difflib.get_close_matches(key, known, n=1)
            remedy = f"nearest allowed keyword: {near[0]}" if near else f"allowed: {', '.join(known)}"
            raise UserError(f"{caller}: unknown keyword {key!r} (given {value!r}); {remedy}")
        place = tree
        for name in path.split(".")[1:]:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):  # given as the keyword memory, or inside it
                raise UserError(f"{caller}: {name}: given {place!r}, and a setting of it as {key}={value!r}; give both "
                                f"in a dict: {name}={{{key!r}: {value!r}, ...}}")  # fmt: skip
        if place.setdefault(key, value) != value:
            raise UserError(f"{caller}: {key}: given {value!r}, and {place[key]!r} in memory; give one of them")
    with _by_keywords():
        run = {"data": {"seq_len": _ANY_LENGTH}, "train": {"batch_tokens": _ANY_LENGTH, "micro_batch": 1}}
        return checked_model(Config.model_validate(without_gone({"model": tree}) | run)).model


@contextmanager
def _by_keywords() -> Iterator[None]:
    """Context whose errors name settings as keywords, without the path of their section."""
    try:
        yield
    except (ValidationError, UserError) as error:
        message = one_line(error) if isinstance(error, ValidationError) else str(error)
        raise UserError(re.sub(r"\bmodel\.(?:\w+\.)*(?=\w)", "", message)) from None


def _checked_input(layer: _Public, x: Tensor, d_model: int, state: Any, reset: Tensor | None) -> Documents | None:
    """Check that x, state and reset fit together; return the documents into which ``reset`` cuts x, None without it."""
    if x.dim() != 3 or x.shape[-1] != d_model or x.numel() == 0:
        raise UserError(f"x: given shape {tuple(x.shape)}; allowed: (B, T, {d_model}), at least one row and one token")
    if not x.is_floating_point():
        raise UserError(f"x: given {x.dtype}; allowed: a floating-point type: embed token ids first")
    if state is not None and not isinstance(state, layer._states):
        raise UserError(f"state: given a {type(state).__name__}; allowed: {type(layer).__name__}'s own, a "
                        f"{' or '.join(kind.__name__ for kind in layer._states)}: the second result of its previous "
                        "call")  # fmt: skip
    if (given := rows(state)) not in (None, len(x)):
        raise UserError(f"state: given one of {given} rows; x has {len(x)}; pass what the call for these rows returned")
    first = next(tensors(state), x)
    if first.is_floating_point() and first.device != x.device:
        raise UserError(f"state: given one on {first.device}; x is on {x.device}; pass move_state(state, "
                        f"{str(x.device)!r}) of titans_pt")  # fmt: skip
    if reset is None:
        return None
    if reset.dtype != torch.bool or reset.shape != x.shape[:2]:
        raise UserError(f"reset: given {reset.dtype} of shape {tuple(reset.shape)}; allowed: torch.bool of shape "
                        f"{tuple(x.shape[:2])}")  # fmt: skip
    return Documents.of(reset, x.device)


def _finished(layer: nn.Module, before: Any, y: Tensor, after: Any) -> tuple[Tensor, Any]:
    """Results of a call: y, and a state that keeps no other tensors alive.

    A call that continues from a state does not use the parameters of a sequence's start (M_0, persistent tokens). They
    get a gradient of 0 here, because DistributedDataParallel waits for their gradients.
    """
    if before is not None and torch.is_grad_enabled():  # generation skips the search for parameters
        kinds = MemoryNetwork, TTTNetwork
        starts = [p for module in layer.modules() if isinstance(module, kinds) for p in module.parameters()]
        starts += [p for p in [getattr(layer, "persistent", None)] if p is not None]
        y = with_gradients(y, *starts)
    return y, after if torch.compiler.is_compiling() or y.shape[1] == 1 else compact(after)


@torch.no_grad()
def _inspected(layer: Mixer | NeuralMemory, x: Tensor, state: Any, reset: Tensor | None) -> MemoryFigures:
    with observe_memories(layer) as observers:
        if not observers:
            raise UserError(f"inspect: {type(layer).__name__} has no neural memory; allowed: NeuralMemory, LMM, MAC, "
                            "MAG, MAL and other mixers with one")  # fmt: skip
        layer(x, state, reset)
        (observer,) = observers.values()
        return observer.take(x.shape[1])
