"""The backbone: blocks of a sequence mixer and an MLP each, between a task's input and output ends."""

import importlib.util
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from titans_pt.config import ModelConfig
from titans_pt.errors import UserError
from titans_pt.layers.continuum import ContinuumMemory, ContinuumState
from titans_pt.layers.convolution import ShortConvolution
from titans_pt.layers.documents import Documents
from titans_pt.layers.flops import Flops
from titans_pt.layers.lora import LowRank, adapt
from titans_pt.layers.mlp import SwiGLU
from titans_pt.layers.modules import Modules
from titans_pt.layers.norm import RMSNorm
from titans_pt.layers.sharding import Shard
from titans_pt.layers.state import check_kind, check_rows, compact, declared_states, rows
from titans_pt.models.mixers import MIXERS, Mixer
from titans_pt.models.wavefront import Wavefront
from titans_pt.models.ways import WAYS, Call, Compiled, Way, around, in_turn, plainly, recomputed


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)); (B, T, d_model). The levels of ``model.mlp_periods`` come between."""

    sharding = {"mixer_norm": Shard.BETWEEN, "mixer": Shard.OPEN, "mlp_norm": Shard.BETWEEN}

    def __init__(self, mixer: str, config: ModelConfig):
        super().__init__()
        kind = MIXERS.find(mixer)
        self.mixer_norm = nn.Identity() if kind.normalises else RMSNorm(config.d_model, eps=config.norm_eps)
        self.mixer: Mixer = kind(config)
        self.continuum = ContinuumMemory(config) if config.mlp_periods else None
        self.states = declared_states(kind.forward) if self.continuum is None else (ContinuumState,)
        self.mlp_norm = RMSNorm(config.d_model, eps=config.norm_eps)
        self.mlp = SwiGLU(config.d_model, config.hidden)

    def forward(self, x: Tensor, state: Any = None, documents: Documents | None = None) -> tuple[Tensor, Any]:
        x, state = self.mix(x, state, documents)
        return self.feed(x), state

    def mix(self, x: Tensor, state: Any, documents: Documents | None) -> tuple[Tensor, Any]:
        """The first half, which has a state."""
        check_kind(state, self.states)
        if documents is not None and documents.starts.device != x.device:  # device_map: blocks on several GPUs
            documents = documents.to(x.device)
        if self.continuum is None:
            y, state = self.mixer(self.mixer_norm(x), state=state, documents=documents)
            return x + y, state
        mixer, levels = (None, None) if state is None else (state.mixer, state.levels)
        y, mixer = self.mixer(self.mixer_norm(x), state=mixer, documents=documents)
        x, levels = self.continuum(x + y, levels, documents)
        return x, ContinuumState(mixer, levels)

    def feed(self, x: Tensor) -> Tensor:
        """The second half, which computes each token separately."""
        return x + self.mlp(self.mlp_norm(x))

    def flops(self, length: int) -> Flops:
        """Per token, mean over a sequence of ``length``."""
        levels = Flops(0, 0) if self.continuum is None else self.continuum.flops()
        return self.mixer.flops(length) + levels + self.mlp.flops()


class Backbone(Modules[Block]):
    """The n_layers blocks of a config's ``model`` section, in order: (B, T, d_model) -> (B, T, d_model).

    The layers around them (embedding, norm, head, ...) belong to the task. One call serves training, evaluation and
    generation; causal, rows independent.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(Block(mixer, config) for mixer in config.pattern)
        for mixer in self.mixers:
            mixer.bind(self.mixers)
        self.call: Call = plainly
        self._ways: dict[str, Way] = {}
        if type(self.mixers[0]).around is not Mixer.around:
            self.put_on("around", around)

    @property
    def mixers(self) -> list[Mixer]:
        """The mixer of each block, in order."""
        return [block.mixer for block in self]

    def put_on(self, name: str, way: Way | None):
        """Send calls through ``way``, under one of the names in WAYS; None removes the way.

        Raises:
            ValueError: another name.
        """
        if name not in WAYS:
            raise ValueError(f"name: given {name!r}; allowed: {', '.join(WAYS)}")
        ways = self._ways | {name: way}
        self._ways = {name: known for name in WAYS if (known := ways.get(name)) is not None}

    def set_activation_checkpointing(self, on: bool):
        """Training then keeps only the blocks' inputs and computes each block again in the backward pass."""
        self.call = recomputed if on else plainly

    def set_wavefront(self, tokens: int | None):
        """Process longer calls in pieces of this many tokens, with layers in parallel; None: whole."""
        self.put_on("wavefront", Wavefront(tokens) if tokens else None)

    def set_compiled(self, on: bool):
        """Whole sequences (no state in, none out) then pass each block through torch.compile.

        Blocks of one kind share their code, which is compiled again for every new shape. Sequences that documents cut
        are compiled only in blocks whose mixer sets ``compiles_documents``.
        """
        self.put_on("compiled", Compiled() if on else None)
        for block in self:
            block.mixer.set_compiled(on)

    def set_progress(self, done: float):
        """Tells mixers which share of the training is complete: before each step, and when a step's weights load."""
        for block in self:
            block.mixer.set_progress(done)

    def forward(
        self,
        x: Tensor,
        state: list[Any] | None = None,
        documents: Documents | None = None,
        output_final_state: bool = True,
    ) -> tuple[Tensor, list[Any] | None]:
        """One call for the whole sequence or any piece of it.

        Args:
            x: (B, T, d_model).
            state: what the previous piece returned; None at the start.
            documents: where documents start in x, or None.
            output_final_state: False, for training: None in place of the state after the last token.

        Returns:
            (B, T, d_model), not normalised, and the state of each block's mixer after the last token (or the state that
            the first mixer's ``around`` returns).

        Raises:
            ValueError: no row or no token in ``x``, or a state of another number of rows or of another model.
        """
        if x.numel() == 0:
            raise ValueError(f"x: given shape {tuple(x.shape)}; must have at least one row and one token")

        def blocks(x: Tensor, state: list[Any] | None, documents: Documents | None):
            self.check_state(state, x)
            after = []
            for block, before in zip(self, state or [None] * len(self), strict=True):
                x, block_state = self.call(in_turn, block, x, before, documents)
                if output_final_state:
                    # After a single token no tensor is a small view of a large one.
                    after.append(compact(block_state) if x.shape[1] > 1 else block_state)
            return x, after if output_final_state else None

        for way in self._ways.values():
            blocks = partial(way, self, blocks, output_final_state)
        x, after = blocks(x, state, documents)
        return x, after if output_final_state else None

    def check_state(self, state: list[Any] | None, x: Tensor):
        """
        Raises:
            ValueError: ``state``, the blocks' states, has other rows than x (B, ...), or is of another model.
        """
        check_kind(state, (list,))
        check_rows(rows(state), x)
        if state is not None and len(state) != len(self):
            raise ValueError(f"state: given one of {len(state)} blocks; the model has {len(self)}")

    def flops(self, length: int) -> Flops:
        """Per token, mean over a sequence of ``length`` (one document, prefix not counted as tokens)."""
        adapters = (layer.flops() for layer in self.modules() if isinstance(layer, LowRank))
        return sum((*(block.flops(length) for block in self), *adapters), Flops(0, 0))


def initialise(model: nn.Module, config: ModelConfig):
    """Initialise a model that consists of a backbone and the layers around it, from torch's global generator.

    Linear layers and embeddings are drawn from Normal(0, init_std); those that end a residual branch are smaller by
    sqrt(2 n_layers). Biases are 0. Then modules that define ``own_initialisation`` apply it. All other parameters
    (M_0, convolutions, persistent tokens) keep the values with which they were made, but for ``model.value_filters``.
    Value filters and adapters (``model.lora``) come last: all other parameters start as they would without them.

    Raises:
        UserError: model.lora names a layer that the model does not have.
    """
    ends = {id(m.get_submodule(name)) for m in model.modules() for name in getattr(m, "ends", ())}
    for module in model.modules():
        # Plans count parameters on the meta device: random numbers would cost time and be stored nowhere.
        if isinstance(module, (nn.Linear, nn.Embedding)) and not module.weight.is_meta:
            smaller = (2 * config.n_layers) ** 0.5 if id(module) in ends else 1
            nn.init.normal_(module.weight, std=config.init_std / smaller)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
    for module in model.modules():
        if (own := getattr(module, "own_initialisation", None)) is not None:
            own()
    for module in model.modules():
        if isinstance(module, ShortConvolution) and module.of_values:
            _begin(module, config.value_filters)
    if config.lora is not None:
        for blocks in [module for module in model.modules() if isinstance(module, Backbone)]:
            adapt(model, blocks, config.lora)


def _begin(convolution: ShortConvolution, filters: str):
    """Starts a convolution of values as ``model.value_filters`` says; "own" keeps the mixer's values."""
    if filters == "identity":
        convolution.begin_as_identity()
    elif filters == "random":
        convolution.begin_at_random()


def exempt_from_decay(model: nn.Module) -> set[str]:
    """Names of the parameters without weight decay: those that modules declare (``no_decay``), and all with one
    dimension (norms, biases)."""
    declared = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in getattr(module, "no_decay", ())
    }
    return {name for name, p in model.named_parameters() if p.ndim < 2 or name in declared}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups for torch.optim.AdamW of the parameters that require gradients, as this project trains.

    Matrices have weight decay, embeddings included. Parameters with one dimension have none, nor parameters that a
    layer exempts (``no_decay``), such as M_0: decay under its LayerNorm would make the memory's steps ever larger.
    """
    exempt = exempt_from_decay(model)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in named if n not in exempt], "weight_decay": weight_decay},
        {"params": [p for n, p in named if n in exempt], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def with_matrices(groups: list[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups, of which the matrices of ``model``'s blocks are groups of their own, with ``matrices=True``.

    These are the weights of linear layers and of their adapters: neither embeddings and the output head, nor M_0,
    filters and tokens.
    """
    backbones = [module for module in model.modules() if isinstance(module, Backbone)]
    linear = [module for blocks in backbones for module in blocks.modules() if isinstance(module, nn.Linear)]
    found = {id(p) for module in linear for p in module.parameters(recurse=False) if p.ndim == 2}
    split = []
    for group in groups:
        for matrices in (False, True):
            chosen = [p for p in group["params"] if (id(p) in found) == matrices]
            split += [group | {"params": chosen, "matrices": matrices}] if chosen else []
    return split


def check_packages(backbone: Backbone, device: torch.device):
    """
    Raises:
        UserError: ``device`` is a GPU, and a package that a mixer needs there is missing.
    """
    if device.type != "cuda":
        return
    for block in backbone:
        for package, remedy in block.mixer.needs().items():
            if importlib.util.find_spec(package) is None:
                raise UserError(f"model.mixers: {block.mixer.name!r} needs {package} on a GPU; {remedy}")
