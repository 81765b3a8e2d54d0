"""Text to batches: sources, tokenizer, token files, packed samples, and a loader whose position is one number.

The names are imported on first use. A trained model's tokenizer then needs no pyarrow, and the many processes of
``titans prepare`` do not load torch (200 MB each), which only Loader needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titans_pt.data_pipeline.indexed import IndexedDataset, IndexedWriter, document_begins
    from titans_pt.data_pipeline.kinds import Document
    from titans_pt.data_pipeline.loader import Loader
    from titans_pt.data_pipeline.packing import Mixture, PackedSamples, TokenFiles
    from titans_pt.data_pipeline.sources import documents
    from titans_pt.data_pipeline.tokenizers import (
        StreamDecoder,
        Tokenizer,
        load_tokenizer,
        saved_tokenizer,
        train_tokenizer,
    )

__all__ = [
    "Document",
    "IndexedDataset",
    "IndexedWriter",
    "Loader",
    "Mixture",
    "PackedSamples",
    "StreamDecoder",
    "TokenFiles",
    "Tokenizer",
    "document_begins",
    "documents",
    "load_tokenizer",
    "saved_tokenizer",
    "train_tokenizer",
]


_HOMES = {
    "indexed": ("IndexedDataset", "IndexedWriter", "document_begins"),
    "kinds": ("Document",),
    "loader": ("Loader",),
    "packing": ("Mixture", "PackedSamples", "TokenFiles"),
    "sources": ("documents",),
    "tokenizers": ("StreamDecoder", "Tokenizer", "load_tokenizer", "saved_tokenizer", "train_tokenizer"),
}
"""Module -> the names that this package exports from it."""


def __getattr__(name: str) -> Any:
    for file, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{file}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
