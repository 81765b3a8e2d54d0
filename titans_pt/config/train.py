"""Sections of training: steps, batch and optimiser; ranks."""

from typing import Annotated, Literal

from pydantic import Field

from titans_pt.config.fields import Fraction, NonNegative, PathName, Positive, Section


class TrainConfig(Section):
    max_steps: Positive = 28_610
    """Optimiser steps of the whole schedule."""
    stop_at: Positive | None = None
    """Write a checkpoint and stop after this step; the schedule stays that of max_steps."""
    stop_when: str | None = None
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
    """Initial weights, without optimiser state: a run's folder (its newest checkpoint, or the best with
    train.patience), a checkpoint, or a folder that ``titans export`` wrote. Data, schedule and data.seq_len may differ.
    Ignored once the run has its own checkpoint. Null: random initialisation."""
    init_fresh: list[str] = []
    """Parameters to initialise randomly instead of from init_from, by name or pattern (blocks.5.*). They may be missing
    from init_from or have another shape there. All others must match."""
    trainable: list[str] = []
    """Parameters to train, by name or pattern (*.memory.*, *norm.weight); all others are frozen, without gradients and
    optimiser state. Empty: train all."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Precision of weights, activations and gradients. Memories and the optimiser's own weights are fp32 in both."""
    batch_tokens: Positive = 524_288
    """Tokens per optimiser step, over all ranks; it determines gradient accumulation."""
    micro_batch: Positive = 8
    """Samples per rank in one forward pass."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw: AdamW for all parameters. muon: the matrices of blocks take steps along their orthogonalised momentum
    (Muon), as large as AdamW's, and all other parameters those of AdamW; with parallel.zero_stage 1 or 2."""
    lr: Annotated[float, Field(gt=0.0)] = 4e-4
    """Peak learning rate, reached after the warm-up."""
    schedule: Literal["cosine", "linear", "wsd", "halving"] = "cosine"
    """Decay of the learning rate from its peak to max_steps. cosine, linear: after the warm-up. wsd (warm-up, stable,
    decay): constant until the last decay_steps, then linear; a run that stopped before the decay can be given more
    max_steps. halving: halve it every decay_steps, such as an epoch, down to min_lr_ratio of the peak."""
    decay_steps: Positive | None = None
    """schedule=wsd: steps of the decay. halving: steps between halvings. Null: a tenth of max_steps."""
    min_lr_ratio: Fraction = 0.1
    """Learning rate at max_steps as a share of the peak; with schedule=halving, its minimum. 1: constant after
    the warm-up."""
    warmup_steps: NonNegative = 1000
    """Steps of the linear warm-up to the peak learning rate."""
    betas: Annotated[list[Annotated[float, Field(ge=0.0, lt=1.0)]], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    """AdamW's decay rates of the mean gradient and of the mean squared gradient."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Muon's decay rate of the mean gradient."""
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    """Decoupled weight decay. It applies to matrices, including embeddings, persistent tokens and convolution filters,
    but not to norms, biases and the memory's M_0."""
    clip: Annotated[float, Field(gt=0.0)] = 1.0
    """Maximum global gradient norm; larger gradients are clipped."""
    z_loss: Annotated[float, Field(ge=0.0)] = 0.0
    """Adds the gradient of z_loss * (log Z)^2, which keeps log Z, the log of the sum of exp(logits), near 0 (PaLM:
    1e-4). Losses are reported without it."""
    spike_deviations: Annotated[float, Field(gt=0.0)] | None = None
    """Skip a step whose loss is more than this many running standard deviations above the running mean. It must exceed
    sqrt(W / (W - 1)) with W = spike_window, so that the limit can rise to a lasting new level. Null: skip none."""
    spike_window: Annotated[int, Field(ge=2)] = 100
    """Approximate window of the running mean and deviation, in steps; no step is skipped before it is full."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass instead of keeping its activations."""
    compile: bool | None = None
    """Compile each block with torch.compile, which fuses the operations between matrix products, memory and attention.
    Null: on a GPU, unless parallel.zero_stage=3 (its gathering of parameters cannot be compiled), parallel.tensor > 1,
    parallel.context > 1, train.wavefront or model.memory.write_cost."""
    wavefront: Positive | None = None
    """Cut sequences into pieces of this many tokens, and let layer l process a piece while layer l + 1 processes the
    previous one. On a GPU each layer has its own CUDA stream. This helps long sequences in small batches, which leave
    most of a GPU idle. The results are identical. Null: process one layer after the other."""
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
    """Keep checkpoints whose step is a multiple of this for good; it should be a multiple of checkpoint_every. Null:
    only the newest."""
    checkpoint_shards: bool = False
    """True: all ranks write their shards in parallel. False: rank 0 gathers and writes whole tensors. Any number of
    ranks reads both formats; ``titans checkpoint merge`` turns shards into whole tensors."""
    timeout: Annotated[float, Field(gt=0.0)] = 600.0
    """Seconds without progress on a rank (if it waits for a peer, for example) after which all ranks stop. A first step
    that is compiled may take five times as long."""
    max_nonfinite: Positive = 10
    """Stop after this many skipped (non-finite) steps in a row. While steps are not finite, no checkpoint is saved or
    deleted."""


class ParallelConfig(Section):
    tensor: Positive = 1
    """Tensor-parallel ranks, which share one copy of the model: heads, MLPs and vocabulary are sharded over them. The
    number of data-parallel ranks is the number of ranks divided by this and parallel.context. Best kept inside one
    node."""
    context: Positive = 1
    """Context-parallel ranks, which share each sequence: each has a piece of its tokens, and mixers pass their states
    from rank to rank. For sequences that are too long for one rank; must divide data.seq_len. Only with ZeRO 1 or 2."""
    sequence: bool = False
    """Megatron's sequence parallelism: activations between mixers and MLPs are split along time over the tensor
    ranks."""
    zero_stage: Literal[1, 2, 3] = 1
    """DeepSpeed ZeRO: 1 shards the optimiser over data-parallel ranks, 2 also gradients, 3 also parameters. All stages
    sum the gradients of a step's micro-batches in fp32; with several micro-batches, ZeRO 1 keeps 4 bytes per
    parameter."""
    reduce_fp32: bool = False
    """With train.precision=bf16, sum gradients over data-parallel ranks in fp32 and round the sum once. This exchanges
    twice the bytes, with less error on many ranks."""
    overlap: bool | None = None
    """Exchange gradients during the backward pass, with a second buffer (DeepSpeed's overlap_comm). Null: DeepSpeed's
    default, which is true under ZeRO 3."""
    reduce_bucket: Positive | None = None
    """Numbers in one exchange of gradients. Null: 500 million, or all gradients of a smaller model; with
    parallel.overlap a sixteenth of the model, at least 25 million. With parallel.context > 1, and with train.wavefront
    unless parallel.overlap is true, it is always all gradients."""
    node_ranks: Positive | None = None
    """ZeRO 3: every group of this many neighbouring ranks, such as a node, holds a second copy of the parameters, and
    the backward pass gathers them inside the group (DeepSpeed's hpZ). Must divide the number of ranks; incompatible
    with parallel.tensor > 1. Null: gather parameters from all ranks."""
    gather_bucket: Positive | None = None
    """ZeRO 1 and 2: numbers in one exchange of updated parameters. Null: DeepSpeed's 500 million."""
