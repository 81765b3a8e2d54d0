"""Sections of model: blocks, mixers, memories."""

import copy
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from titans_pt.config.fields import NonNegative, OpenSection, Positive, Section
from titans_pt.config.plain import usual

FORMER_NAMES = {"model.segment": "model.mac.segment", "model.memory_tokens": "model.mac.memory_tokens"}
"""Earlier name -> today's name; both are accepted."""


def section_at(tree: Any, names: Sequence[str]) -> dict | None:
    """The section at a path of a tree of settings; None if it is not there."""
    for name in names:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else None


def with_todays_names(tree: dict) -> dict:
    """Replace FORMER_NAMES in a tree of settings; a value under today's name takes precedence."""
    tree = copy.deepcopy(tree)
    for former, today in FORMER_NAMES.items():
        *sections, key = former.split(".")
        section = section_at(tree, sections)
        if section is None or key not in section:
            continue
        value = section.pop(key)
        *sections, key = today.split(".")
        section = tree
        for name in sections:
            if usual(section.get(name)) is None:
                section[name] = {}
            section = section[name]
            if not isinstance(section, dict):  # validation refuses it
                break
        else:
            section.setdefault(key, value)
    return tree


class HierarchyConfig(Section):
    chunk: Positive = 2048
    """Tokens in a chunk of the global memory. They read the memory as it was at the chunk's start."""
    shard: Positive = 2048
    """Tokens between resets of the local memories to their M_0, counted from the document's start. It must be a
    multiple of ``chunk``: the global memory has then stored everything that they forget."""
    locals: list[Positive] = [16]
    """Chunk size of each local memory, instead of memory.chunk_size. []: only the global memory."""
    final_locals: list[Positive] | None = None
    """Chunk sizes for the last part of training, none larger than in ``locals``: the paper's second stage, cheaper than
    small chunks from the start. The step bound stays the one for ``locals``. Null: no second stage."""
    final_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    """Share of train.max_steps that uses final_locals."""
    projection: bool = True
    """Read local memories with the query projected onto the keys of its shard so far."""


class CachingConfig(Section):
    segment: Positive = 256
    """Tokens in a segment, at whose end the memory is cached; a multiple of chunk_size. Segments count from the
    document's start: with several documents in a sample, each has its own segments."""
    slots: Positive = 16
    """Maximum number of caches; the newest are kept. A full set costs each token ``slots`` further memory reads, and
    the state of a stream holds as many further weight sets. A cached memory of the usual shape has the size of the keys
    and values of 256 tokens: shorter segments save nothing."""
    shares: Literal["gated", "sparse", "average", "sum", "change"] = "gated"
    """Weights of the running memory and of each cache. gated (GRM): softmax over the products of a learned projection
    of the token with each segment's mean key. sparse (SSC): the same among the running memory and the ``top`` caches;
    all caches are still computed. average: decay^age, normalised. sum: 1 each. change: how much each segment changed
    the answer to the token's query, to the power of ``sharpness``, normalised. The last three have no parameters."""
    top: Positive = 4
    """shares=sparse: number of caches to weight."""
    decay: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """shares=average: factor by which a cache counts less than the next newer one. 1: the plain mean."""
    sharpness: Annotated[float, Field(gt=0.0)] = 16.0
    """shares=change: the exponent. Larger values favour the memory whose segment changed the answer most."""
    fresh: bool = False
    """True: the memory restarts after each segment, as at a document's start; earlier writes remain only in caches.
    False: the memory continues."""
    soup: bool = False
    """True: read one memory with the weighted mean of all weights (Memory Soup). False: take the weighted mean of the
    memories' answers. For a linear memory both are equal. The kernels in C and Triton do not support True."""

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
        """Whether the weights of caches have parameters."""
        return self.shares in ("gated", "sparse")


class ReadCachingConfig(CachingConfig):
    last: Positive | None = None
    """Number of tokens at the end of a prompt that read the caches, as the answer does. Earlier tokens read only the
    running memory, at its full speed. Suites needle, babilong and needles. Null: all tokens."""


class MemoryConfig(OpenSection):
    """Settings that memory rules share. A rule's own settings are in a section with its name, ``model.memory.NAME``,
    which the rule itself validates."""

    rule: str = "titans"
    """Learning rule of the memory. titans: squared error. yaad: Huber loss, less sensitive to outliers. moneta: l_p
    loss, weights held by an l_q norm. memora: weights that are distributions. dot: Hebb's rule, without error
    correction. muon: one orthogonalised step per chunk. lact: the same step for Hebb's loss, at constant norms of the
    weights. omega: a token's write covers a window of tokens. atlas: omega with muon's steps. dgd: a token replaces the
    weights' content along its inputs. All rules have momentum and forgetting (docs/models.md)."""
    n_heads: Positive | None = None
    """Memory heads, each with its own memory MLP of width d_model / n_heads. Null: model.n_heads."""
    depth: Annotated[int, Field(ge=1, le=4)] = 2
    """L_M, the number of weight matrices of the memory MLP. 1 is the linear (matrix) memory."""
    expansion: Positive = 4
    """Hidden size of the memory MLP as a multiple of its head width."""
    chunk_size: Positive = 16
    """C: tokens whose inner gradients are taken at one set of weights. Part of the model, not a speed setting. If not
    given, it is at most data.seq_len. Where tokens read the memory of their chunk's start (hope; moneta, memora, muon,
    lact, atlas) it must be below data.seq_len, and the default for data.seq_len up to 16 is a quarter of it."""
    activation: Literal["gelu", "silu", "relu"] = "gelu"
    """Activation between the weight matrices of the memory MLP."""
    norm: bool = True
    """LayerNorm inside the memory, M(x) = x + LN(f(x)). It bounds the inner loop. At depth 2 and more, the rules
    moneta and memora need it."""
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
    """Target towards which alpha pulls the weights. start: the weights at the document's start, M = (1 - alpha) (M -
    M_0) + M_0 + S. zero, as the paper prints it: M = (1 - alpha) M + S. Small weights under the LayerNorm make inner
    steps large: a memory that forgot to zero may not learn again, and outer gradients explode."""
    gates: Literal["hard", "sigmoid"] = "sigmoid"
    """hard: theta and alpha are a sigmoid stretched to (-0.05, 1.05) and clipped to [0, 1]; they can close and open
    fully. sigmoid: they only approach 0 and 1. eta is a sigmoid in both. With theta=free, theta has no gate. In bf16 a
    hard alpha moves near 0 in steps of 0.0008: an alpha_init of 0.001 becomes 0.0006, and one of 0.0001 becomes 0."""
    alpha: Literal["head", "channel"] = "head"
    """head: one forgetting gate per head's memory (or per layer of it, per_layer_gates). channel: one gate per input
    channel of a weight matrix, a row of M in x @ M; this is alpha in [0, 1]^d_in in the camera-ready paper. The kernels
    in C and Triton do not support channel: on a CPU the memory takes 13 times as long."""
    alpha_rank: Positive = 16
    """alpha=channel: rank of the two linear layers that compute it, as in gated linear attention. At full rank the
    gates of a 170M LMM (long-term memory alone) would have as many parameters as the rest of its mixers."""
    per_layer_gates: bool = False
    """A separate theta, eta and alpha for each of the memory's ``depth`` layers instead of one for all."""
    theta: Literal["bounded", "free"] = "bounded"
    """bounded: theta = step_bound * (1 - eta) * gate(.). free, as the paper prints it: an unbounded softplus(linear(x))
    with the same initial value. UNSAFE: the inner loop may diverge, and training can end in NaN. Use it only for
    comparisons with the paper's form."""
    step_bound: Annotated[float, Field(gt=0.0)] | None = None
    """theta = step_bound * (1 - eta) * gate(.). Null: the largest bound known to be stable for chunk_size,
    min(0.1, 1.9 / chunk_size), with norm=false min(0.1, 0.95 / chunk_size); deep_steps=small and the rules moneta and
    memora take a fraction of it, but not of a given number. With theta=free it sets only theta's initial value.
    Memories with longer chunks (hierarchy, model.mlp_periods) use at most the bound that is stable for these chunks."""
    deep_steps: Literal["small", "full"] = "small"
    """Step size of memories with three and four matrices under a bounded theta. small: a quarter and an eighth of the
    bound (unless step_bound is set), with theta times min(1, sqrt(D) / (2 ||v||)) for a value v. full: the same steps
    as with two matrices. UNSAFE: with full steps deep memories are chaotic, outer gradients grow with the length of the
    text, and depth 4 does not learn."""
    eta_init: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Momentum gate at initialisation."""
    alpha_init: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.001
    """Forgetting gate at initialisation: a half-life of about 700 tokens. Forgetting to zero shrinks the weights, and
    small weights under the LayerNorm make inner steps large (see init_std): at 0.01 training is slower and less steady.
    """
    theta_init: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Share of the step bound used at initialisation."""
    init_std: Annotated[float, Field(gt=0.0)] | None = None
    """Standard deviation of M_0's weights. Null: with norm 0.5, and for three or four matrices sqrt(8 / hidden size),
    which compensates for their smaller steps; without norm 1 / sqrt(d_in). Under the LayerNorm an inner step moves the
    output by 1 / init_std^2. If init_std is too small, steps overshoot and outer gradients explode. At 1, a model
    learns language as well as at 0.5, but recall later (docs/notebook.md)."""
    hierarchy: HierarchyConfig | None = None
    """Instead of one memory, the sum of a global memory with large chunks and local memories that are reset at every
    shard (TNT, arXiv 2511.07343): lmm, mag, mal."""
    caching: CachingConfig | None = None
    """Cached earlier states of the memory, read together with it (Memory Caching, arXiv 2602.24281): lmm, mac, mag,
    mal, mab. ``model.memory.caching={}`` is the usual form, gated. Null: none."""
    write_cost: Annotated[float, Field(ge=0.0, le=1000.0)] = 0.0
    """Adds the gradient of write_cost times the mean write gate (0 to 1, over tokens and heads), which penalises
    unnecessary writes. Persistent tokens do not count. Reported losses exclude it. In tasks with answers (recall,
    needles) it applies to a row once 99 % of its answers are right. Only with theta=bounded. In other mixers the
    write gates are beta (deltanet, gated_deltanet, deltaproduct, kda), the learning rate of ttt_linear and ttt_mlp,
    and gdn2's value gate; all further mixers have none."""
    save_every: Positive | None = None
    """Keep the memory's weights for the backward pass only at every save_every-th block and recompute the others: less
    memory, the same result. Null: the square root of the number of blocks. 1: for rules and reads that
    kernels/memory/blockwise.py supports, keep everything and recompute nothing: fastest, most memory."""


class RopeScaling(Section):
    """Scaling of rotary frequencies for texts longer than those that the model was trained on."""

    kind: Literal["linear", "llama3"] = "linear"
    """linear: divide all frequencies by ``factor`` (position interpolation). llama3: divide frequencies whose
    wavelength exceeds original_length / low_freq, keep those below original_length / high_freq, and interpolate
    between the two."""
    factor: Annotated[float, Field(ge=1.0)]
    """Divisor of the frequencies."""
    low_freq: Annotated[float, Field(gt=0.0)] = 1.0
    """kind=llama3: frequencies up to this many turns per original_length are divided by the whole factor."""
    high_freq: Annotated[float, Field(gt=0.0)] = 4.0
    """kind=llama3: frequencies from this many turns per original_length on are unchanged; above low_freq."""
    original_length: Positive = 8192
    """kind=llama3: length, in tokens, of the texts that the model was originally trained on."""

    @model_validator(mode="after")
    def _check(self):
        if self.high_freq <= self.low_freq:
            raise ValueError(f"high_freq: given {self.high_freq}; must be above low_freq={self.low_freq}")
        return self


class AttentionConfig(Section):
    """Attention, in every mixer that uses it."""

    kv_heads: Positive | None = None
    """Heads of keys and values, each shared by n_heads / kv_heads query heads (grouped-query attention). A stream's
    key-value cache is smaller by this factor. Null: n_heads."""
    head_width: Positive | None = None
    """Width of a head: attention, swa, mal, mab, liza. Null: d_model / n_heads."""
    bias: bool = False
    """A bias in the projections to queries, keys and values, as in Qwen2."""
    qk_norm: bool = False
    """An RMSNorm of every head's queries and keys before their rotation, with one weight per channel, as in Qwen3. It
    bounds the scores of attention."""
    sinks: NonNegative = 0
    """First tokens of each document that every later token sees in addition to its window (swa, mag, mal, mab, liza),
    at their true positions. Softmax attention puts unused weight on them; a pretrained model breaks without them."""
    rope_scaling: RopeScaling | None = None
    """Slower rotary frequencies, as in Llama 3.1. Null: those of model.rope_base."""


class LoraConfig(Section):
    layers: Annotated[list[str], Field(min_length=1)] = ["*"]
    """Linear layers of the blocks, by name or pattern: ["*.mixer.attention.*", "*.mlp.*"]. The default is all."""
    rank: Positive = 16
    """Rank of the matrix that is added to a layer's weight."""
    alpha: Annotated[float, Field(gt=0.0)] = 16.0
    """The product of the two matrices is scaled by alpha / rank."""


class ModelConfig(OpenSection):
    """Settings that mixers share. A mixer's own settings are in a section with its name, ``model.NAME``, which the
    mixer itself validates."""

    mixers: Annotated[list[str], Field(min_length=1)] = ["mac"]
    """Sequence mixers by name, repeated until n_layers are filled: [mac] is a MAC (memory as context), [lmm, lmm, swa]
    a hybrid. lmm: long-term memory alone; mag: memory as gate; mal: memory as layer; mab: memory beside a
    pretrained attention layer (titans convert); liza: a delta rule mixed with this attention, the baseline of mab."""
    vocab_size: Positive = 32000
    """Size of the vocabulary, at least the tokenizer's size; surplus entries are never predicted. With
    data.tokenizer.path null, the size of the tokenizer to train."""
    vocab_multiple: Positive = 64
    """The embedding and the head have vocab_size rows, rounded up to a multiple of this, which is faster on a GPU.
    Padding rows belong to no token and are excluded everywhere."""
    d_model: Positive = 768
    """Width of the residual stream."""
    n_layers: Positive = 12
    """Blocks, each a sequence mixer and an MLP."""
    n_heads: Positive = 16
    """Attention heads. If not given, and the default does not divide d_model, fewer heads are used."""
    mlp_hidden: Positive | None = None
    """Hidden size of the SwiGLU MLP. Null: 8/3 d_model rounded up to a multiple of 64."""
    mlp_periods: list[Positive] = []
    """Update periods, in tokens, of a continuum memory system. Each period adds an MLP before each block's own MLP. The
    weights of this MLP change once per period while a sequence is read, by model.memory.rule and the other settings of
    model.memory. [16, 128]: a fast one and a slow one. []: none."""
    window: Positive = 2048
    """Sliding window in tokens, the token itself included (mag, mal, mab, liza, swa). If not given, at most
    data.seq_len."""
    persistent_tokens: NonNegative = 128
    """Learned tokens before the sequence, the same for all data (titans mixers)."""
    conv_width: Positive = 4
    """Width of the causal depthwise convolution on q, k, v of the memory, in tokens. 1 disables it. A memory binds
    tokens that its filters see together. If a key and its value are farther apart, several layers must learn to bring
    them together, which takes far longer (docs/notebook.md, "Stories need filters as wide as a sentence")."""
    value_filters: Literal["own", "identity", "random"] = "own"
    """Initialisation of the convolution of a mixer's values, or of its inputs if one convolution serves all. own: the
    identity for memories, random for baselines. identity, random: the same for every mixer. random: uniform within
    1 / sqrt(conv_width), PyTorch's default, which most authors keep (docs/models.md)."""
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
    """Standard deviation of embeddings and linear layers at initialisation. 0.02 is usual for d_model from 768. At
    d_model=64 it is a sixth of 1 / sqrt(d_model), and the memory's keys and values start very small."""
    memory: MemoryConfig = MemoryConfig()
    """The neural long-term memory (lmm, mac, mag, mal, mab)."""
    lora: LoraConfig | None = None
    """Low-rank adapters on linear layers, for fine-tuning. Each has two further matrices, lora_a and lora_b, whose
    product is added to the weight and starts at 0. train.trainable=["*.lora_*"] trains only these; ``titans export``
    merges them into the weights (docs/conversion.md). Null: none."""

    @model_validator(mode="before")
    @classmethod
    def _of_before(cls, tree: Any) -> Any:
        return with_todays_names({"model": tree})["model"] if isinstance(tree, dict) else tree

    @property
    def hidden(self) -> int:
        """Hidden size of the MLP, with its default resolved."""
        return self.mlp_hidden or -(-8 * self.d_model // (3 * 64)) * 64

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and the head."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def embedding_factor(self) -> float:
        """Factor of the token embeddings, with its default resolved."""
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
