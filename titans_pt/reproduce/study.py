"""Parts of a study: rows (models and variants of them), columns (figures), measures, pictures."""

from dataclasses import dataclass, field

from titans_pt.reproduce import pictures
from titans_pt.reproduce.measures import Find, Measure
from titans_pt.reproduce.pictures import Picture

TITANS = ("lmm", "mac", "mag", "mal")
MODELS = (
    "transformer", "swa", *TITANS, "samba", "mamba2", "gated_deltanet", "ttt_linear", "deltanet", "mamba",
    "gated_deltanet_h2", "gated_deltanet_h1", "ttt_mlp", "retnet", "gla", "hgrn2", "linear_attention", "longhorn",
    "rmt",
)  # fmt: skip
"""Names of configs/SIZE/NAME.yaml, the models of Table 1 first."""
VARIANTS = {
    "": (),
    "depth-1": ("model.memory.depth=1",),
    "depth-3": ("model.memory.depth=3",),
    "depth-4": ("model.memory.depth=4",),
    "no-conv": ("model.conv_width=1",),
    "no-momentum": ("model.memory.momentum=false",),
    "no-forgetting": ("model.memory.forgetting=false",),
    "no-persistent": ("model.persistent_tokens=0",),
    "value-identity": ("model.value_filters=identity",),
    "value-random": ("model.value_filters=random",),
    "chunk-32": ("model.memory.chunk_size=32",),
    "chunk-64": ("model.memory.chunk_size=64",),
    "chunk-128": ("model.memory.chunk_size=128",),
    "memory-off": ("model.memory.writes=false",),
    "by-muon": ("train.optimizer=muon",),
    "no-ln": ("model.memory.norm=false", "model.memory.init_std=null"),  # M_0's scale is chosen for a LayerNorm
}
"""Named changes of a model's settings. Unchanged models have memories of depth 2 and chunks of 16."""
NAMES = {
    "transformer": "Transformer++", "swa": "sliding window", "samba": "Samba", "mamba": "Mamba", "mamba2": "Mamba2",
    "deltanet": "DeltaNet", "gated_deltanet": "Gated DeltaNet", "gated_deltanet_h1": "Gated DeltaNet-H1",
    "gated_deltanet_h2": "Gated DeltaNet-H2", "ttt_linear": "TTT-Linear", "ttt_mlp": "TTT-MLP", "retnet": "RetNet",
    "linear_attention": "linear attention", "longhorn": "Longhorn", "lmm-hierarchy": "LMM, hierarchy",
    "lmm-defaults": "LMM, default gates, no cost",
    "gdn2": "Gated DeltaNet-2", "deltaproduct": "DeltaProduct", "rwkv7": "RWKV-7", "hope": "Hope",
} | {name: name.upper() for name in (*TITANS, "gla", "hgrn2", "rmt", "kda")}  # fmt: skip
"""Displayed names of models, as papers write them; any other model is displayed as it is named."""
CHANGES = {
    "depth-1": "linear memory (depth 1)", "depth-3": "depth 3", "depth-4": "depth 4", "no-conv": "without convolutions",
    "no-momentum": "without momentum", "no-forgetting": "without forgetting",
    "no-persistent": "without persistent memory", "value-identity": "values' filters from the identity",
    "value-random": "values' filters from random ones", "chunk-32": "chunk 32", "chunk-64": "chunk 64",
    "chunk-128": "chunk 128", "memory-off": "memory off", "by-muon": "trained by Muon",
    "no-ln": "without the LayerNorm inside",
}  # fmt: skip
"""Displayed names of variants."""


@dataclass(frozen=True)
class Row:
    """A model, or a variant of it.

    words: settings of the variant; None: from VARIANTS. change: displayed name of the variant; "": from CHANGES.
    after: variant of the same model from whose trained weights this row starts: those of the same seed, or of the first
        seed if the variant has no run of the same.
    rated: whether the row's own probes choose its learning rate; otherwise the unchanged model's rate is used.
    """

    model: str
    variant: str = ""
    words: tuple[str, ...] | None = field(default=None, compare=False)
    change: str = field(default="", compare=False)
    after: str = field(default="", compare=False)
    rated: bool = field(default=False, compare=False)

    @property
    def chooses(self) -> "Row":
        """The row whose probes choose this row's learning rate."""
        return self if self.rated else Row(self.model)

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings that replace those of the model's config."""
        return VARIANTS[self.variant] if self.words is None else self.words

    @property
    def key(self) -> str:
        """Key of the row in published.yaml."""
        return f"{self.model}/{self.variant}" if self.variant else self.model

    @property
    def name(self) -> str:
        """Displayed name of the row."""
        name = "+".join(NAMES.get(part, part) for part in self.model.split("+"))
        return f"{name}, {self.change or CHANGES[self.variant]}" if self.variant else name


@dataclass(frozen=True)
class Column:
    """A column. ``find`` finds its figure in the result of ``measure``; ``published``: its name in published.yaml."""

    title: str
    measure: str
    find: Find
    published: str | None = None


@dataclass(frozen=True)
class Study:
    """A table or figure at one size.

    ``compared``: size of the published models beside it; ``pictures``: functions that draw the records of its runs.
    """

    target: str
    title: str
    size: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    measures: tuple[Measure, ...]
    compared: str
    note: str = ""
    timed: tuple[int, ...] = ()
    """Sequence lengths of a study of throughput, which trains nothing."""
    folder: str = ""
    """Folder of configs/ with the models. "": the size's folder."""
    rated: bool = True
    """Whether the learning rates of its size are tried; False: the configured rate is used."""
    probe_share: int = 10
    """Divisor of a run's tokens for the runs (probes) that try learning rates. 1: the probes are the runs of the first
    seed, for tasks on which the loss of a short training says nothing."""
    own: dict[str, str] = field(default_factory=dict)
    """Config files of a user's own models, by the models' names."""
    seeds: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Seeds of a row by its key; 0 for all others."""
    pictures: tuple[Picture, ...] = (pictures.training, pictures.positions)

    def config(self, model: str) -> str:
        """The config of a model: a user's file, or a name in configs/."""
        return self.own.get(model) or f"{self.folder or self.size}/{model}"
