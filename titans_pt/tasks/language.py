"""Language modelling: the next token of packed documents, from the token files of ``titans prepare``."""

import hashlib
import os
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from titans_pt.config import Config
from titans_pt.data_pipeline import Mixture, TokenFiles
from titans_pt.data_pipeline.manifest import read_manifest
from titans_pt.data_pipeline.tokenizers import Tokenizer, load_tokenizer
from titans_pt.errors import UserError
from titans_pt.layers.loss import cross_entropy
from titans_pt.models import LanguageModel, build_model
from titans_pt.models.mixers.base import Need
from titans_pt.parallel import RankGroup
from titans_pt.parallel.layers import vocabulary_cross_entropy
from titans_pt.runs.folder import RunFolder
from titans_pt.tasks.base import TASKS, Task, TaskData
from titans_pt.tasks.next_token import NextTokenLoss, at_once, piece


@TASKS.register
class Language(Task):
    """ids (B, T + 1) and document starts (B, T) -> mean cross-entropy of the T next tokens."""

    name = "language"
    unit = "nats per token"
    baseline_name = "unigram baseline"
    suites = {
        "perplexity": "titans_pt.evaluation.perplexity:Perplexity",
        "needle": "titans_pt.evaluation.ruler:RulerNeedles",
        "babilong": "titans_pt.evaluation.babilong:Babilong",
        "commonsense": "titans_pt.evaluation.commonsense:Commonsense",
    }
    usual: tuple[str, ...] = ("perplexity", "needle")  # suites that need no further packages or data
    bound = {"tokenizer": "embedding.weight"}

    def __init__(self, config: Config):
        super().__init__(config)
        self.tokenizer: Tokenizer | None = None
        """Set by :meth:`open` or :meth:`restore`."""
        if config.data.tokenizer.kind == "nucleotides":  # the other suites ask in English
            self.suites, self.usual = {"perplexity": self.suites["perplexity"]}, ("perplexity",)

    @property
    def takes(self) -> tuple[str, ...]:  # type: ignore[override]  # read-only here
        """All tasks with this model: those derived from this class."""
        return tuple(name for name in TASKS.names() if name != self.name and issubclass(TASKS.find(name), Language))

    @classmethod
    def check(cls, config: Config, need: Need):
        if config.data.tokenizer.kind == "nucleotides" and config.evaluation.every:
            suites = config.evaluation.suites
            allowed = "must be [perplexity] with data.tokenizer.kind=nucleotides"
            need(suites == ["perplexity"], "evaluation.suites", suites, allowed)
        for name in ("needle", "babilong"):
            section = getattr(config.evaluation, name)
            need(
                min(section.lengths) > section.max_new_tokens,
                f"evaluation.{name}.lengths",
                section.lengths,
                f"each must be above evaluation.{name}.max_new_tokens={section.max_new_tokens}",
            )

    def build_model(self) -> LanguageModel:
        """Build a model that predicts the entries of the tokenizer; before there is one, all of model.vocab_size."""
        return build_model(self.config.model, self.tokenizer.vocab_size if self.tokenizer else None)

    def objective(self, model: nn.Module, tensor: RankGroup) -> nn.Module:
        whole = tensor.size == 1
        loss = cross_entropy if whole else partial(vocabulary_cross_entropy, group=tensor)
        return NextTokenLoss(model, loss, self.config.train.z_loss, self.config.model.memory.write_cost / tensor.size)

    def output_bytes(self, rows: int, length: int, width: int) -> dict[str, int]:
        """Bytes of the head's output, its fp32 copy, its softmax and two gradients, for the samples taken at once."""
        vocabulary = self.config.model.vocab_rows
        tensor = self.config.parallel.tensor
        rows, length = at_once(rows, length, vocabulary, whole=tensor == 1)
        return {"logits": rows * length * -(-vocabulary // tensor) * (2 * width + 12)}

    def prepare(self, force: bool = False):
        """Make token files from the text of data.sources."""
        if force or read_manifest(Path(self.config.data.dir)) is None:
            from titans_pt.data_pipeline.prepare import prepare  # a trained model needs no readers of files

            prepare(self.config, force, workers=len(os.sched_getaffinity(0)))

    def open(self) -> TaskData:
        files = TokenFiles.open(self.config)
        self.tokenizer = files.tokenizer
        baseline = files.manifest.get("unigram_loss")
        if markov := files.manifest.get("markov"):  # token files of nucleotides have one
            # The chain predicts bases alone, a model also N and the ends of documents: these cost the chain nothing.
            share = markov["bases"] / markov.get("tokens", markov["bases"])  # earlier token files lack "tokens"
            baseline, self.baseline_name = share * markov["loss"], f"Markov chain of order {markov['order']}"
        samples = files.samples(self.config)
        return TaskData(
            samples, files.validation_samples(self.config),
            {"tokenizer": files.tokenizer.sha256, "data": files.fingerprint}, baseline,
            self._sources(samples) if isinstance(samples, Mixture) else {},
        )  # fmt: skip

    def _sources(self, mixture: Mixture) -> dict[str, tuple[int, float]]:
        """Sources of a mixture, for TaskData: samples per epoch and share of each."""
        weights = self.config.data.weights
        return {
            f"data.sources[{i}] ({source.path or source.kind})": (len(mixture.streams[i]), weights[i] / sum(weights))
            for i, source in enumerate(self.config.data.sources)
        }

    def cut(self, batch: tuple[Tensor, ...], part: int, parts: int) -> tuple[Tensor, ...]:
        return piece(batch, part, parts)

    def to_device(self, batch: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor | None, ...]:
        """Move ids to the device. Document starts stay on the host, where the model counts documents."""
        ids, reset = batch
        return ids.to(device, non_blocking=True), reset if self.config.data.reset_at_documents else None

    def differs(self, key: str, path: Path, was: str, now: str) -> str:
        if key == "tokenizer":
            return (f"data.dir: its tokenizer (sha256 {now[:12]}...) is not the one {path} was trained with "
                    f"({was[:12]}...); its ids mean other words")  # fmt: skip
        return (
            f"data.dir: {self.config.data.dir} holds other token files than {path} was trained on, so samples "
            "would be repeated or left out"
        )

    def keep(self, folder: RunFolder):
        """Copy the tokenizer to the run's folder."""
        assert self.tokenizer
        keep_tokenizer(self.tokenizer.path, self.config, folder)

    def restore(self, folder: RunFolder, identity: dict[str, str]):
        path = folder.tokenizer
        if not path.is_file():
            raise UserError(f"{path}: missing; copy the tokenizer of the run's data.dir there")
        found, trained = hashlib.sha256(path.read_bytes()).hexdigest(), identity["tokenizer"]
        if found != trained:
            raise UserError(f"{path}: not the tokenizer of this model (sha256 {found[:12]}..., trained with "
                            f"{trained[:12]}...); put back the one that the run was trained with")  # fmt: skip
        self.tokenizer = tokenizer_of(path, self.config)


def tokenizer_of(path: Path, config: Config) -> Tokenizer:
    """The tokenizer at ``path`` with the document format that ``config`` trains with."""
    given = config.data.tokenizer
    return load_tokenizer(path, given.eos_token, given.add_bos)


def keep_tokenizer(path: Path, config: Config, folder: RunFolder):
    """Copy the tokenizer at ``path`` to a run's folder, unless it is there already."""
    if Path(path).resolve() != folder.tokenizer.resolve():
        tokenizer_of(path, config).save(folder.path)
