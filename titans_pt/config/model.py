"""Sections of model: blocks, mixers, memories."""

import copy
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from titans_pt.config.fields import NonNegative, Positive, Section

FORMER_NAMES = {"model.segment": "model.mac.segment", "model.memory_tokens": "model.mac.memory_tokens"}
"""Earlier name -> today's name; both are understood."""


def with_todays_names(tree: dict) -> dict:
    """Replace FORMER_NAMES in a tree of settings; a value under today's name takes precedence."""
    for former, today in FORMER_NAMES.items():
        *sections, key = former.split(".")
        node: Any = tree
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        if not isinstance(node, dict) or key not in node:
            continue
        tree = copy.deepcopy(tree)
        node = tree
        for section in sections:
            node = node[section]
        value = node.pop(key)
        *sections, key = today.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node.setdefault(key, value)
    return tree


class HierarchyConfig(Section):
    chunk: Positive = 2048
    """Tokens of a chunk of the global memory. The chunk's tokens read the memory of the chunk's start."""
    shard: Positive = 2048
    """Tokens between resets of the local memories to their M_0, counted from the document's start. It must be a
    multiple of ``chunk``: the global memory has then stored everything that they forget."""
    locals: list[Positive] = [16]
    """Chunk sizes of the local memories, one each, instead of memory.chunk_size. []: only the global memory."""
    final_locals: list[Positive] | None = None
    """Chunk sizes for the last part of training, none larger than in ``locals``: the paper's second stage, cheaper than
    small chunks from the start. The bound of the inner step stays that of ``locals``. Null: no second stage."""
    final_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    """Share of train.max_steps that uses final_locals."""
    projection: bool = True
    """Read local memories with the query's projection onto the keys of its shard so far."""


class CachingConfig(Section):
    segment: Positive = 256
    """Tokens after which the memory is cached as it is then, counted from the document's start: a multiple of
    chunk_size. With several documents in a sample each has segments of its own."""
    slots: Positive = 16
    """Caches that are kept at most. The cost grows with them: a full set costs each token ``slots`` reads of a memory
    beside its own, and a stream's state holds as many weight sets more. A cached memory of the usual shape has the size
    of the keys and values of 256 tokens: shorter segments save nothing."""
    drop: Literal["oldest", "spread"] = "oldest"
    """Cache that goes when there are more than ``slots``. oldest: the newest stay. spread: the one whose neighbours
    are closest to each other for its age; the remaining caches lie the farther apart the older they are."""
    shares: Literal["gated", "sparse", "average", "sum", "change"] = "gated"
    """Weights of the running memory and of each cache. gated (GRM): softmax of a learned vector of the token times the
    mean key of each one's segment. sparse (SSC): the same among the running memory and the ``top`` caches; all of them
    are computed nevertheless. average: decay^age, divided by the sum of them. sum: 1 each. change: the change of the
    answer to the token's own query over each one's segment, to the power of ``sharpness``, divided by the sum of them.
    The last three have no parameters."""
    top: Positive = 4
    """shares=sparse: caches that count."""
    decay: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """shares=average: by how much a cache counts less than the one after it. 1: the plain mean."""
    sharpness: Annotated[float, Field(gt=0.0)] = 16.0
    """shares=change: the power. The larger, the nearer to the one memory whose segment changed the answer most."""
    fresh: bool = False
    """True: the memory begins again after each segment, as at a document's start; what it wrote before is in caches
    alone. False: it goes on."""
    soup: bool = False
    """True: one memory is read whose weights are the mean of all (Memory Soup). False: the mean of what they answer. On
    a linear memory both are the same. The kernels in C and Triton do not serve it."""

    @model_validator(mode="after")
    def _check(self):
        if self.soup and self.shares in ("sum", "change"):
            raise ValueError(
                f"soup: given True with shares={self.shares!r}; weights are averaged: use gated, sparse or average"
            )
        if self.shares == "sparse" and self.top > self.slots:
            raise ValueError(f"top: given {self.top}; at most slots={self.slots}")
        return self

    @property
    def learned(self) -> bool:
        """Whether it has parameters."""
        return self.shares in ("gated", "sparse")


class ReadCachingConfig(CachingConfig):
    last: Positive | None = None
    """Only so many tokens at the end of a prompt, and the answer, read the caches; the tokens before them read the
    running memory alone, at its own speed. Suites needle, babilong and needles. Null: all tokens."""


class MemoryConfig(Section):
    """The settings that memory rules share. A rule's own settings are a section with its name, ``model.memory.NAME``,
    which the rule itself validates."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, dict[str, Any]]

    rule: str = "titans"
    """Learning rule of the memory. titans: the squared error. yaad: a Huber loss, which outliers move less.
    moneta: an l_p loss, weights held by an l_q norm. memora: weights that are distributions. dot: Hebb's, without
    correction. muon: one orthogonal step a chunk; lact: that by Hebb's loss, at constant lengths of weights. omega: a
    token writes a window; atlas: that with muon's steps. dgd: a token replaces what weights held along its inputs. All
    with momentum and forgetting (docs/models.md)."""
    n_heads: Positive | None = None
    """Memory heads, each with its own memory MLP of width d_model / n_heads. Null: model.n_heads."""
    depth: Annotated[int, Field(ge=1, le=4)] = 2
    """L_M, the number of weight matrices of the memory MLP. 1 is the linear (matrix) memory."""
    expansion: Positive = 4
    """Hidden size of the memory MLP as a multiple of its head width."""
    chunk_size: Positive = 16
    """C: tokens whose inner gradients are taken at one set of weights. Part of the model, not a speed setting. If it is
    not given: at most data.seq_len, and a quarter of a data.seq_len up to 16 where tokens read the memory of their
    chunk's start (hope; moneta, memora, muon, lact, atlas), for which it must be below data.seq_len."""
    activation: Literal["gelu", "silu", "relu"] = "gelu"
    """Activation between the weight matrices of the memory MLP."""
    projections: Literal["silu", "affine"] = "silu"
    """Queries, keys and values. silu: a linear layer, a convolution, SiLU, as in the paper. affine: a linear layer with
    a bias, a convolution. A pretrained attention layer's heads need this: its values have signs, and its keys share a
    large mean, which a bias takes away (mab)."""
    norm: bool = True
    """LayerNorm inside the memory, M(x) = x + LN(f(x)). It bounds the inner loop."""
    residual: bool = True
    """The ``x +`` in M(x)."""
    writes: bool = True
    """False: disable writes (theta = alpha = 0); M stays the learned M_0 and learns nothing at test time. The control
    for claims about memory, with the same parameters and cost."""
    momentum: bool = True
    """False: eta = 0."""
    forgetting: bool = True
    """False: alpha = 0."""
    forget_to: Literal["start", "zero"] = "start"
    """Target of alpha's pull on the weights. start: those with which the document began, M = (1 - alpha) (M - M_0) +
    M_0 + S. zero, as the paper prints it: M = (1 - alpha) M + S. Small weights under the LayerNorm make inner steps
    large: a memory that forgot to zero may not learn again, and outer gradients explode."""
    gates: Literal["hard", "sigmoid"] = "sigmoid"
    """hard: theta and alpha are a sigmoid stretched to (-0.05, 1.05) and clipped to [0, 1]; they can close and open
    fully. sigmoid: they only approach 0 and 1. eta is a sigmoid in both. A theta that is free has no gate."""
    alpha: Literal["head", "channel"] = "head"
    """head: one forgetting gate for a head's memory (or for each of its layers, per_layer_gates). channel, the
    camera-ready's alpha in [0, 1]^d_in: one for each input channel of a weight matrix, a row of M in x @ M. The kernels
    in C and Triton do not support channel: on a CPU the memory takes 13 times as long."""
    alpha_rank: Positive = 16
    """alpha=channel: rank of the two linear layers that compute it, as in gated linear attention. At full rank the
    gates of a 170M LMM (long-term memory alone) would have as many parameters as the rest of its mixers."""
    per_layer_gates: bool = False
    """One theta, eta, alpha for each of the memory's ``depth`` layers instead of one for all."""
    theta: Literal["bounded", "free"] = "bounded"
    """bounded: theta = step_bound * (1 - eta) * gate(.). free, as the paper prints it: an unbounded softplus(linear(x))
    with the same initial value. UNSAFE: the inner loop may diverge, and training can end in NaN. Use it only for
    comparisons with the paper's form."""
    step_bound: Annotated[float, Field(gt=0.0)] | None = None
    """theta = step_bound * (1 - eta) * gate(.). Null: the largest bound known to be stable for chunk_size,
    min(0.1, 1.9 / chunk_size), with norm=false min(0.1, 0.95 / chunk_size); small deep_steps take a part of it. With
    theta=free it sets only theta's initial value. Memories with longer chunks (hierarchy, model.mlp_periods) take at
    most what is stable there."""
    deep_steps: Literal["small", "full"] = "small"
    """Step size of memories with three and four matrices under a bounded theta. small: a quarter and an eighth of the
    bound (unless step_bound is set), and theta times min(1, sqrt(D) / (2 ||v||)) for a value v. full: the steps of two
    matrices. UNSAFE: with full steps deep memories are chaotic, outer gradients grow with the length of the text, and
    depth 4 does not learn."""
    eta_init: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Momentum gate at initialisation."""
    alpha_init: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.001
    """Forgetting gate at initialisation: a half-life of about 700 tokens. Forgetting to zero shrinks the weights, and
    small weights under the LayerNorm make inner steps large (see init_std): at 0.01 training is slower and less steady.
    """
    theta_init: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Share of the step bound used at initialisation."""
    init_std: Annotated[float, Field(gt=0.0)] | None = None
    """Standard deviation of M_0's weights. Null: with norm 0.5, and for three or four matrices sqrt(8 / hidden width),
    which compensates for their smaller steps; without norm 1 / sqrt(d_in). Under the LayerNorm an inner step moves the
    output by 1 / init_std^2. If init_std is too small, steps overshoot and outer gradients explode. At 1 a model learns
    language as well as at 0.5, and recall later (docs/notebook.md)."""
    hierarchy: HierarchyConfig | None = None
    """Instead of one memory, the sum of a global memory with large chunks and local memories that are reset at every
    shard (TNT, arXiv 2511.07343): lmm, mag, mal."""
    caching: CachingConfig | None = None
    """Earlier states of the memory that are read beside it (Memory Caching, arXiv 2602.24281): lmm, mac, mag, mal, mab.
    ``model.memory.caching={}`` is the usual one, gated. Null: none."""
    write_cost: Annotated[float, Field(ge=0.0, le=1000.0)] = 0.0
    """Adds the gradient of write_cost times the mean write gate (0 to 1, over tokens and heads), which penalises
    unnecessary writes. Reported losses exclude it. In tasks with answers (recall, needles) it applies to a row once 99
    % of its answers are right. Only with theta=bounded. Other mixers' gates are beta (deltanet, gated_deltanet,
    deltaproduct, kda), the rate of ttt_linear and ttt_mlp and gdn2's gate of values; further mixers have none."""
    save_every: Positive | None = None
    """The backward pass keeps the memory's weights at every save_every-th block and recomputes those between: less
    memory, the same result. Null: the square root of the number of blocks. 1: of rules and reads that
    kernels/memory/blockwise.py serves, all is kept and nothing recomputed: fastest, most memory."""

    @property
    def affine(self) -> bool:
        """Whether queries, keys and values have a bias and no SiLU."""
        return self.projections == "affine"

    def section(self, rule: str) -> dict[str, Any]:
        """The given ones of a rule's own settings."""
        return self.__pydantic_extra__.get(rule, {})


class RopeScaling(Section):
    """Rotary frequencies of a model that was trained on shorter texts, scaled for longer ones."""

    kind: Literal["linear", "llama3"] = "linear"
    """linear: all frequencies divided by ``factor`` (position interpolation). llama3: those whose wavelength exceeds
    original_length / low_freq divided, those below original_length / high_freq kept, between them a mean of both."""
    factor: Annotated[float, Field(ge=1.0)]
    """Divisor of the frequencies."""
    low_freq: Annotated[float, Field(gt=0.0)] = 1.0
    """kind=llama3: wavelengths, in turns per original_length, from which on all of the factor counts."""
    high_freq: Annotated[float, Field(gt=0.0)] = 4.0
    """kind=llama3: turns per original_length from which on nothing changes; above low_freq."""
    original_length: Positive = 8192
    """kind=llama3: tokens of the texts that the model was trained on before."""

    @model_validator(mode="after")
    def _check(self):
        if self.high_freq <= self.low_freq:
            raise ValueError(f"high_freq: given {self.high_freq}; must be above low_freq={self.low_freq}")
        return self


class AttentionConfig(Section):
    """Attention in every mixer that has it."""

    kv_heads: Positive | None = None
    """Heads of keys and values, each shared by n_heads / kv_heads query heads (grouped-query attention): the cache of a
    stream is smaller by that factor. Null: n_heads."""
    head_width: Positive | None = None
    """Width of a head: attention, swa, mal, mab, liza. Null: d_model / n_heads."""
    bias: bool = False
    """A bias in the projections to queries, keys and values, as in Qwen2."""
    sinks: NonNegative = 0
    """First tokens of each document that every later token sees in addition to its window (swa, mag, mal, mab, liza),
    at their true positions. Softmax attention puts unused weight on them; a pretrained model breaks without them."""
    rope_scaling: RopeScaling | None = None
    """Slower rotary frequencies, as in Llama 3.1. Null: those of model.rope_base."""


class LoraConfig(Section):
    layers: Annotated[list[str], Field(min_length=1)] = ["*"]
    """Linear layers of the blocks, by name or pattern: ["*.mixer.attention.*", "*.mlp.*"]. The default is all."""
    rank: Positive = 16
    """Rank of what is added to a layer's weight."""
    alpha: Annotated[float, Field(gt=0.0)] = 16.0
    """The product of the two matrices counts alpha / rank."""


class ModelConfig(Section):
    """The settings that mixers share. A mixer's own settings are a section with its name, ``model.NAME``, which the
    mixer itself validates."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, dict[str, Any]]

    mixers: Annotated[list[str], Field(min_length=1)] = ["mac"]
    """Sequence mixers by name, repeated until n_layers are filled: [mac] is a MAC (memory as context), [lmm, lmm, swa]
    a hybrid. lmm: long-term memory alone; mag: memory as gate; mal: memory as layer; mab: memory beside a
    pretrained attention layer (titans convert); liza: a delta rule mixed with one, the baseline of mab."""
    vocab_size: Positive = 32000
    """Size of the vocabulary, at least that of the tokenizer; surplus entries are never predicted. With
    data.tokenizer.path null, the size of the tokenizer to train."""
    vocab_multiple: Positive = 64
    """The embedding and the head have vocab_size rows, rounded up to a multiple of this, which is faster on a GPU.
    Padding rows belong to no token and are excluded everywhere."""
    d_model: Positive = 768
    """Width of the residual stream."""
    n_layers: Positive = 12
    """Blocks, each a sequence mixer and an MLP."""
    n_heads: Positive = 16
    """Attention heads. If it is not given and does not divide d_model, fewer heads."""
    mlp_hidden: Positive | None = None
    """Hidden width of the SwiGLU MLP. Null: 8/3 d_model rounded up to a multiple of 64."""
    mlp_periods: list[Positive] = []
    """Update periods of a continuum memory system: before each block's MLP one further MLP for each, whose weights move
    after every so many tokens while a sequence is read, by model.memory.rule and the other settings of model.memory.
    [16, 128] is a fast one and a slow one. []: none."""
    window: Positive = 2048
    """Sliding window in tokens, the token itself included (mag, mal, mab, liza, swa). If it is not given: at most
    data.seq_len."""
    persistent_tokens: NonNegative = 128
    """Learned tokens before the sequence, the same for all data (titans mixers)."""
    conv_width: Positive = 4
    """Width of the causal depthwise convolution on q, k, v of the memory, in tokens. 1 disables it. A memory binds what
    its filters see together: where a key and its value lie farther apart, several layers have to learn to bring them
    together, which takes far longer (docs/notebook.md, "Stories need filters as wide as a sentence")."""
    value_filters: Literal["own", "identity", "random"] = "own"
    """Start of the convolution of a mixer's values, or of its inputs if one convolution serves all. own: for memories
    the identity, for baselines random, as their authors have it. identity, random: the same for every mixer."""
    rope_base: Annotated[float, Field(gt=1.0)] = 10000.0
    """Base of the rotary position embedding's wavelengths."""
    attention: AttentionConfig = AttentionConfig()
    """Attention's heads, biases and positions (attention, swa, mac, mag, mal, mab, liza, rmt)."""
    norm_eps: Annotated[float, Field(gt=0.0)] = 1e-5
    """Added to the mean square inside every RMSNorm."""
    tie_embeddings: bool = True
    """The output head shares the weights of the token embedding."""
    embedding_scale: Annotated[float, Field(gt=0.0)] | None = None
    """Factor of the token embeddings before the first block. Null: sqrt(d_model). 1: as in Llama."""
    init_std: Annotated[float, Field(gt=0.0)] = 0.02
    """Standard deviation of embeddings and linear layers at initialisation. 0.02 is usual for widths from 768. At a
    width of 64 it is a sixth of 1 / sqrt(d_model), and the memory's keys and values start very small."""
    memory: MemoryConfig = MemoryConfig()
    """The neural long-term memory (lmm, mac, mag, mal, mab)."""
    lora: LoraConfig | None = None
    """Low-rank adapters on linear layers, for fine-tuning: two further matrices each, lora_a and lora_b, whose product
    is added to the weight and starts at 0. train.trainable=["*.lora_*"] trains them alone; ``titans export`` adds them
    to the weights (docs/conversion.md). Null: none."""

    @model_validator(mode="before")
    @classmethod
    def _of_before(cls, tree: Any) -> Any:
        return with_todays_names({"model": tree})["model"] if isinstance(tree, dict) else tree

    def section(self, mixer: str) -> dict[str, Any]:
        """The given ones of a mixer's own settings."""
        return self.__pydantic_extra__.get(mixer, {})

    @property
    def hidden(self) -> int:
        """Hidden width of the MLP, resolved."""
        return self.mlp_hidden or -(-8 * self.d_model // (3 * 64)) * 64

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and the head."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def embedding_factor(self) -> float:
        """Factor of embeddings."""
        return self.d_model**0.5 if self.embedding_scale is None else self.embedding_scale

    @property
    def kv_heads(self) -> int:
        return self.attention.kv_heads or self.n_heads

    @property
    def head_width(self) -> int:
        """Width of an attention head."""
        return self.attention.head_width or self.d_model // self.n_heads

    @property
    def memory_heads(self) -> int:
        return self.memory.n_heads or self.n_heads

    @property
    def pattern(self) -> list[str]:
        """The mixer of each of the n_layers blocks."""
        return [self.mixers[i % len(self.mixers)] for i in range(self.n_layers)]

    @property
    def kinds(self) -> list[str]:
        """The mixers of :attr:`pattern`, each once, in the order of their first block."""
        return list(dict.fromkeys(self.pattern))
