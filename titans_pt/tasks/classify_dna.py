"""Classification of nucleotide sequences (GenomicsBenchmarks): backbone, mean over the bases, a linear layer.

The protocol is Caduceus' (arXiv 2403.03234): a tenth of the training sequences, drawn by run.seed, is the validation
set, which train.patience watches. ``titans evaluate`` reads the test set once.
"""

import contextlib
import hashlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from titans_pt.config import Config, ModelConfig, PathName, Positive, Section
from titans_pt.data_pipeline.packing import on_other_strand
from titans_pt.data_pipeline.tokenizers.nucleotides import MODEL
from titans_pt.errors import UserError
from titans_pt.genomics import builtin, prepared
from titans_pt.genomics.alphabet import COMPLEMENT, PAD, TOKENS, encoded
from titans_pt.genomics.sets import LabelledSet, Split, centre, read_set, source_files, state_of
from titans_pt.layers.flops import Flops
from titans_pt.layers.norm import RMSNorm
from titans_pt.layers.sharding import Shard
from titans_pt.models.backbone import Backbone, initialise
from titans_pt.models.mixers.base import Need
from titans_pt.parallel import RankGroup
from titans_pt.runs.folder import RunFolder
from titans_pt.tasks.base import TASKS, Task, TaskData, nan_unless_finite, refuse, with_weights
from titans_pt.tasks.places import Places
from titans_pt.tools.files import write_text

CLASSES = "classes.json"
"""File in a run's folder that holds the class of each output."""
MADE_WITH = ("set", "path", "reference", "crop", "middle")
"""Settings that decide what ``titans prepare`` writes."""
_STEP = 64
"""A batch is as long as its longest sequence, rounded up to a multiple of this."""


class SequenceClassifier(nn.Module):
    """Classifier of nucleotide sequences: (B, T) ids with ``lengths`` (B,) -> (B, classes).

    One linear layer reads the mean of the normalised outputs of a sequence's bases. Padding changes nothing: the
    backbone is causal, and the mean leaves padding out. Embedding, blocks and norm are those of a language model, whose
    weights train.init_from takes.
    """

    sharding = {"embedding": Shard.VOCABULARY, "norm": Shard.BETWEEN}

    def __init__(self, config: ModelConfig, classes: int):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_rows, config.d_model)
        self.blocks = Backbone(config)
        self.norm = RMSNorm(config.d_model, eps=config.norm_eps)
        self.classifier = nn.Linear(config.d_model, classes)
        initialise(self, config)

    @property
    def counted_rows(self) -> dict[str, int]:
        """Rows of the embedding that stand for a token, as in a language model."""
        return {"embedding.weight": len(TOKENS)}

    def own_initialisation(self):
        """Set embedding rows that stand for no token to zero."""
        nn.init.zeros_(self.embedding.weight[len(TOKENS) :])

    def forward(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, list[Any] | None]:
        """
        Args:
            ids: (B, T) int64; any ids may stand behind a row's sequence.
            lengths: (B,) int64, 1 to T.

        Returns:
            Logits (B, classes), and the blocks' states after column T; None in training.
        """
        x = self.embedding(ids) * self.config.embedding_factor
        x, state = self.blocks(x, output_final_state=not self.training)
        own = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        x = self.norm(x).masked_fill(~own[..., None], 0.0).sum(1) / lengths[:, None].to(x.dtype)
        return self.classifier(x), state

    def flops(self, length: int) -> Flops:
        """FLOPs per base, without the classifier, which runs once per sequence."""
        return self.blocks.flops(length)


class ClassLoss(nn.Module):
    """Cross-entropy and accuracy of a classifier."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(
        self, ids: Tensor, lengths: Tensor, labels: Tensor, weight: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        """Mean loss of ids (B, T), lengths (B,) and labels (B,), all int64, in fp32 and nats per sequence; with weights
        {"loss": ..., "accuracy": ...}."""
        logits = self.model(ids, lengths)[0].float()
        losses = F.cross_entropy(logits, labels, reduction="none")
        if weight is None:
            return nan_unless_finite(losses.mean())
        right = (logits.argmax(-1) == labels).to(losses.dtype)
        return {"loss": with_weights(losses, weight), "accuracy": with_weights(right, weight)}


class LabelledSamples:
    """Sequences in an order that is a function of (seed, position), each padded to ``seq_len``.

    Args:
        rows: indices in the split of the sequences to read.
        shuffle: False: in the order of ``rows``.
        turned: read half of the samples from the other strand.
    """

    def __init__(self, split: Split, rows: np.ndarray, seq_len: int, seed: int, shuffle: bool, turned: bool):
        self.split, self.rows, self.seq_len, self.seed, self.turned = split, rows, seq_len, seed, turned
        self.places = Places(len(rows), seed if shuffle else None)

    def __len__(self) -> int:
        return len(self.places)

    def index(self, position: int) -> int:
        """Index in the split of the sample at ``position``, which counts over all epochs."""
        return int(self.rows[self.places[position]])

    def sample(self, position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """ids (T,), length (), label (), all int64."""
        row = self.index(position)
        own = encoded(self.split.sequences[row]).astype(np.int64)
        if self._turned(position):
            own = COMPLEMENT[own[::-1]]
        ids = np.full(self.seq_len, PAD, np.int64)
        ids[: len(own)] = own
        return ids, np.array(len(own)), self.split.labels[row]

    def describe(self, position: int) -> dict:
        """Origin of the sample; ``other_strand`` is True if it is read from the other strand, else absent."""
        place = {"position": position, "training sequence": self.index(position)}
        return place | ({"other_strand": True} if self._turned(position) else {})

    def _turned(self, position: int) -> bool:
        return self.turned and on_other_strand(self.seed, position)


@TASKS.register
class ClassifyDna(Task):
    """Nucleotide sequences -> one of a few classes."""

    name = "classify_dna"
    unit = "nats per sequence"
    baseline_name = "class frequencies"
    figures = ("loss", "accuracy")
    suites = {"classes": "titans_pt.evaluation.classes:ClassesOfTest"}
    usual = ("classes",)
    bound = {"tokenizer": "embedding.weight"}
    takes = ("language",)
    own_end = ("classifier.*", "head.*")

    class Settings(Section):
        set: Literal["coding", "splice", "worm-human"] | None = "coding"
        """Set made from a Debian package, which is downloaded at the first use. coding: windows of E. coli K-12, inside
        or outside of protein-coding regions. splice: donor, acceptor or no splice site, of primates. worm-human:
        windows of two X chromosomes. Null: the set under ``path``."""
        path: PathName | None = None
        """Set in the layout of GenomicsBenchmarks: train/ and test/ with, for each class, CLASS.csv.gz (id, region,
        start, end, strand; half-open, from 0), CLASS.fa or a folder CLASS of .txt or FASTA files; or train.csv and
        test.csv with the columns sequence and label. With set=null."""
        reference: PathName | None = None
        """FASTA of the genome that intervals refer to: a file, or a folder of chromosomes. Human sets need GRCh38."""
        crop: Positive | None = None
        """Length in bases to which every sequence is cut around its middle, in training and test. Null: whole
        sequences; a sequence longer than data.seq_len is refused."""
        middle: Positive = 200
        """Length in bases to which sequences are cut around their middle for the test's second column. In that column a
        sequence's length says less about its class."""
        reads: Annotated[int, Field(ge=1, le=4096)] = 64
        """Test sequences that the model reads at once."""

    settings: Settings

    def __init__(self, config: Config):
        super().__init__(config)
        self.classes: tuple[str, ...] | None = None
        """Set by :meth:`open` or :meth:`restore`."""
        self.trained_on: str | None = None
        """Hash of the set that a restored run was trained on."""

    @classmethod
    def check(cls, config: Config, need: Need):
        settings = cls.Settings.model_validate(config.section(cls.name))
        tokenizer = config.data.tokenizer.kind
        need(tokenizer == "nucleotides", "data.tokenizer.kind", tokenizer, "must be nucleotides for task=classify_dna")
        need(config.model.vocab_size >= len(TOKENS), "model.vocab_size", config.model.vocab_size,
             f"at least {len(TOKENS)}, the ids of data.tokenizer.kind=nucleotides")  # fmt: skip
        need((settings.set is None) != (settings.path is None), "classify_dna.path", settings.path,
             "name a folder with classify_dna.set=null, or one of the sets without a folder")  # fmt: skip
        need(settings.reference is None or settings.path is not None, "classify_dna.reference", settings.reference,
             "only with classify_dna.path")  # fmt: skip
        need((settings.crop or 0) <= config.data.seq_len, "classify_dna.crop", settings.crop,
             f"at most data.seq_len={config.data.seq_len}")  # fmt: skip
        refuse(config, need, cls.name, "model.memory.write_cost", "train.z_loss", "parallel.sequence")

    # ---- the model

    def build_model(self) -> SequenceClassifier:
        """Build a model with one output per class of the set; two outputs before the set is known."""
        classes = self.classes
        if classes is None and (manifest := prepared.read_manifest(Path(self.config.data.dir))):
            classes = tuple(manifest["classes"])
        return SequenceClassifier(self.config.model, len(classes) if classes else 2)

    def objective(self, model: nn.Module, tensor: RankGroup) -> nn.Module:
        return ClassLoss(model)

    # ---- data

    def prepare(self, force: bool = False):
        """Write the labelled set and its baselines to data.dir, unless they are up to date.

        Args:
            force: replace a set made with other settings or sources.
        """
        folder, settings = Path(self.config.data.dir), self.settings
        made_with = {key: getattr(settings, key) for key in MADE_WITH}
        reference = Path(settings.reference) if settings.reference else None
        if settings.set:
            state = [[package.name, package.version, package.sha256] for package in builtin.SOURCES[settings.set]]
        else:
            state = state_of(source_files(Path(settings.path or ""), reference))
        old = None if force else prepared.read_manifest(folder)
        if old:
            changed = [key for key, value in made_with.items() if old["settings"].get(key) != value]
            what = f"classify_dna.{changed[0]} differs" if changed else ""
            if not what and old["state"] != state:  # the content decides: files may have been copied or touched
                if prepared.content_hash(self._labelled()) == old["sha256"]:
                    with contextlib.suppress(OSError):  # a read-only folder: the next call compares again
                        prepared.write_manifest(folder, old | {"state": state})
                else:
                    what = "the files have changed"
            if what:
                raise UserError(f"data.dir={folder}: holds sequences of another set ({what}); choose another "
                                "data.dir, or replace them with: titans prepare CONFIG --force")  # fmt: skip
            print(f"{folder}: the labelled sequences are up to date, nothing to do", file=sys.stderr)
            return
        if (folder / "manifest.json").is_file():
            raise UserError(f"data.dir={folder}: holds token files; choose another data.dir")
        written = prepared.write(folder, self._labelled(), settings.middle, made_with, state)
        print(prepared.told(written, folder), file=sys.stderr)

    def _labelled(self) -> LabelledSet:
        """The set that the settings name, cut to classify_dna.crop."""
        settings = self.settings
        reference = Path(settings.reference) if settings.reference else None
        given = builtin.SETS[settings.set]() if settings.set else read_set(Path(settings.path or ""), reference)
        for split in (given.train, given.test):
            split.sequences = [centre(sequence, settings.crop) for sequence in split.sequences]
        return given

    def open(self) -> TaskData:
        """
        Raises:
            UserError: data.dir holds no labelled set, or one made with other settings; or sequences are longer than
                data.seq_len.
        """
        data, seed = self.config.data, self.config.run.seed
        found = prepared.read(Path(data.dir))
        for key in MADE_WITH:
            if (was := found.manifest["settings"][key]) != (now := getattr(self.settings, key)):
                raise UserError(f"data.dir={data.dir}: holds sequences of another set (classify_dna.{key}: made with "
                                f"{was!r}, config has {now!r}); choose another data.dir, or run: titans prepare CONFIG "
                                "--force")  # fmt: skip
        self.classes = found.given.classes
        longest = max(most for _, _, most in found.manifest["lengths"].values())
        if longest > data.seq_len:
            raise UserError(f"data.seq_len: given {data.seq_len}, but the longest sequence of {data.dir} has {longest} "
                            f"bases; set it to {longest} or more, or cut sequences with classify_dna.crop")  # fmt: skip
        train = found.given.train
        held_out = max(1, round(data.validation_fraction * len(train.labels)))
        order = np.random.default_rng([seed, 2**32]).permutation(len(train.labels))
        frequencies = np.bincount(train.labels) / len(train.labels)
        turned = data.reverse_complement
        return TaskData(
            LabelledSamples(train, order[held_out:], data.seq_len, seed, shuffle=True, turned=turned),
            LabelledSamples(train, order[:held_out], data.seq_len, seed, shuffle=False, turned=False),
            {"tokenizer": hashlib.sha256(MODEL).hexdigest(), "data": found.sha256, "split": str(held_out)},
            float(-np.log(frequencies[train.labels]).mean()),
        )  # fmt: skip

    def to_device(self, batch: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor | None, ...]:
        """Move the batch to ``device``, without columns that are padding in every row (up to a multiple of _STEP)."""
        ids, lengths, labels = batch
        width = min(ids.shape[1], -(-int(lengths.max()) // _STEP) * _STEP)
        return tuple(part.to(device, non_blocking=True) for part in (ids[:, :width], lengths, labels))

    def differs(self, key: str, path: Path, was: str, now: str) -> str:
        if key == "tokenizer":
            return f"data.tokenizer: {path} was trained with another one ({was[:12]}...); its ids mean other letters"
        if key == "split":
            return (f"data.validation_fraction: given {self.config.data.validation_fraction}, for {now} sequences of "
                    f"validation, but {path} was trained with {was}, and on some of these {now}")  # fmt: skip
        return f"data.dir: {self.config.data.dir} holds another set than {path} was trained on"

    # ---- the run's folder

    def keep(self, folder: RunFolder):
        """Write the names of the classes."""
        write_text(folder.path / CLASSES, json.dumps(self.classes) + "\n")

    def restore(self, folder: RunFolder, identity: dict[str, str]):
        path = folder.path / CLASSES
        try:
            self.classes = tuple(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{path}: missing or damaged ({error!r}); the same titans train command writes it "
                            "again") from None  # fmt: skip
        self.trained_on = identity.get("data")
