"""Text to batches: sources, tokenizer, token files, packed samples, and a loader whose position is one number."""

from titans_pt.data_pipeline.indexed import IndexedDataset, IndexedWriter, document_begins
from titans_pt.data_pipeline.packing import Mixture, PackedSamples, TokenFiles
from titans_pt.data_pipeline.prepare import prepare
from titans_pt.data_pipeline.sources import Document, documents
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
    "prepare",
    "saved_tokenizer",
    "train_tokenizer",
]


def __getattr__(name: str):
    """Loader alone needs torch, which the many processes of ``titans prepare`` do without (200 MB each)."""
    if name == "Loader":
        from titans_pt.data_pipeline.loader import Loader

        return Loader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
