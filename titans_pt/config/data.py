"""Sections of data: sources, tokenizer, token files."""

import re
from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from titans_pt.config.fields import PathName, Positive, Section

GenomeName = Literal["ecoli", "worm-x", "human-x"]
"""Names of genomes for ``data.sources`` kind=genome; titans_pt.genomics.genomes has exactly these."""

_OF_FORMAT = {
    "text": ("text_column",),
    "prompt-completion": ("prompt_column", "completion_column"),
    "messages": ("messages_column", "answers"),
}
"""Format of a source -> the settings that only this format uses."""
TOOLS = "tools"
"""Column beside a chat in which other trainers expect the functions that the chat template describes."""


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
    """hub, streaming: only the first max_files files of the dataset; a file of FineWeb-Edu has about 0.7B tokens."""
    format: Literal["text", "prompt-completion", "messages"] = "text"
    """Content of a row. text: one text. prompt-completion: a prompt and its answer, two texts. messages: a chat, as a
    list of objects with ``role`` and ``content``, which the tokenizer's chat template writes (pip install
    'titans-pt[eval]'). task=sft trains on the answers alone, task=language on every token."""
    text_column: str = "text"
    """format=text: column (field of a .jsonl row) that holds the text."""
    prompt_column: str = "prompt"
    """format=prompt-completion: column of the prompt."""
    completion_column: str = "completion"
    """format=prompt-completion: column of the answer, with the space or line break that stands before it, if any."""
    messages_column: str = "messages"
    """format=messages: column of the chat."""
    answers: Literal["all", "last"] = "all"
    """format=messages: the messages of role assistant that task=sft trains on. all: if the chat template writes earlier
    answers in another way once messages follow (Qwen3's leaves out their thoughts), each answer is a document, with all
    messages before it. last: the last one of each chat."""
    separator: str | None = None
    """files: separator of the documents in a .txt file, such as "<|endoftext|>"; "": a file is one document. Null: each
    file in a folder is one document; if ``path`` is a single .txt file, each paragraph (between empty lines) is one."""
    block: Positive | None = 131_072
    """fasta, genome: bases per document. A record is cut into blocks, and data.validation_fraction of these is held
    out; the last block of a record may be shorter. Null: a record is a document."""
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
        every = [key for keys in _OF_FORMAT.values() for key in keys]
        rows = ("id_column", "minimum", "format", *every)
        hub = ("name", "split", "revision", "streaming", "max_files")
        used = {
            "files": (*rows, "separator"), "hub": rows + hub, "fasta": ("block",), "genome": ("block", "name"),
        }.get(self.kind, ())  # fmt: skip
        for key in (*rows, *hub, "separator", "block"):
            if key not in used and (given := getattr(self, key)) != type(self).model_fields[key].default:
                raise ValueError(f"{key}: given {given!r} with kind={self.kind!r}, which does not use it; remove it")
        for key in every:
            given = getattr(self, key)
            if key not in _OF_FORMAT[self.format] and given != type(self).model_fields[key].default:
                raise ValueError(
                    f"{key}: given {given!r} with format={self.format!r}, which does not use it; remove it"
                )
        if self.max_files and not self.streaming:
            raise ValueError(
                f"max_files: given {self.max_files} with streaming=false, which downloads all files; "
                "remove it, or set streaming=true"
            )
        return self

    @property
    def location(self) -> str:
        """The path, which every kind but stdlib and genome has."""
        assert self.path is not None
        return self.path

    @property
    def genome(self) -> str:
        """Name of the genome of kind=genome."""
        assert self.name is not None
        return self.name

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that every row has."""
        return tuple(getattr(self, key) for key in _OF_FORMAT[self.format] if key.endswith("_column"))

    @property
    def optional_columns(self) -> tuple[str, ...]:
        """Columns that are read from rows that have them: the document's id, and the tools of a chat."""
        return (self.id_column, TOOLS) if self.format == "messages" else (self.id_column,)

    def setting_of(self, column: str) -> str:
        """Name of the setting that gives a column of ``columns``."""
        return next(key for key in _OF_FORMAT[self.format] if getattr(self, key) == column)


class TokenizerConfig(Section):
    kind: Literal["text", "nucleotides"] = "text"
    """nucleotides: one token per base, twelve ids (A, C, G, T, N and seven specials), without a file."""
    path: PathName | None = None
    """A SentencePiece .model file (Llama-2's, for the paper's recipe) or a Hugging Face tokenizer.json.
    Null: train a SentencePiece model on the text."""
    eos_token: str | None = None
    """Piece that ends a document. Null: the tokenizer model's own; for a tokenizer.json, the one in its
    tokenizer_config.json."""
    add_bos: bool = False
    """Begin each document with bos, in training and whenever the run's model reads a text from its start. Every
    document ends with eos."""
    lossy: Literal["warn", "refuse"] = "warn"
    """Treatment of a tokenizer whose decoding differs from the text, such as one that drops line breaks. warn: ``titans
    prepare`` names the loss and counts the documents that changed. refuse: it stops."""
    train_characters: Positive = 20_000_000
    """Maximum number of characters of the text to train a tokenizer on."""
    user_defined_symbols: list[Annotated[str, Field(min_length=1)]] = []
    """Strings that always become one token each, for a tokenizer that is trained on the text: dialogue markers, names,
    words. A leading space is part of the token: ``' kitchen'`` is the word inside a sentence."""

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
        """Whether the tokenizer is trained on the text."""
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
    """Drop a document whose Jaccard similarity with an earlier one is at least about this. The similarity is the share
    of five-token sequences that both have, estimated by MinHash (0.8 is usual). Null: drop only identical texts."""
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
    """Language modelling: reset memory, convolutions and attention at each document of a packed sample (true), or carry
    state and attention across documents (false; the paper is silent; usual in pretraining). Other tasks reset at
    every sample."""

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
                if source.format == "messages" and self.tokenizer.path is None:
                    raise ValueError(
                        f"{key}.{i}.format: given 'messages', which a chat template writes; set data.tokenizer.path to "
                        "the tokenizer.json of a chat model"
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
        """All sources, validation sources first: of equal documents, the first is kept."""
        return [*self.validation_sources, *self.sources]

    @property
    def weights(self) -> list[float]:
        """Weight of each of ``sources``; empty if they form one stream."""
        return [source.weight for source in self.sources if source.weight is not None]

    @property
    def marks_answers(self) -> bool:
        """Whether token files mark the answers in their documents, for task=sft."""
        return any(source.format != "text" for source in self.every_source)
