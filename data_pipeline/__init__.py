"""Text to batches: sources, tokenizer, token files, packed samples, and a loader whose position is one number."""

from data_pipeline.indexed import IndexedDataset, IndexedWriter
from data_pipeline.packing import Loader, PackedSamples, TokenFiles
from data_pipeline.prepare import prepare, unigram_loss
from data_pipeline.sources import documents
from data_pipeline.tokenizer import StreamDecoder, Tokenizer, train_tokenizer

__all__ = [
    "IndexedDataset", "IndexedWriter", "Loader", "PackedSamples", "StreamDecoder", "TokenFiles", "Tokenizer",
    "documents", "prepare", "train_tokenizer", "unigram_loss",
]
