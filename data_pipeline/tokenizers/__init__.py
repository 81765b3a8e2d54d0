"""Tokenizers whose decoding returns exactly the encoded text: SentencePiece, Hugging Face and nucleotides."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from titans_pt.data_pipeline.tokenizers.base import FILES, StreamDecoder, Tokenizer, saved_tokenizer
from titans_pt.data_pipeline.tokenizers.chat import Piece, spelled_ids
from titans_pt.data_pipeline.tokenizers.huggingface import HuggingFaceTokenizer
from titans_pt.data_pipeline.tokenizers.nucleotides import MODEL, NucleotideTokenizer
from titans_pt.data_pipeline.tokenizers.probe import lost_kinds
from titans_pt.data_pipeline.tokenizers.sentencepiece import SentencePieceTokenizer
from titans_pt.data_pipeline.tokenizers.training import train_tokenizer
from titans_pt.errors import UserError
from titans_pt.genomics.alphabet import EOS, TOKENS

__all__ = [
    "FILES", "NucleotideTokenizer", "StreamDecoder", "Tokenizer", "encode_pieces", "ids_after", "load_tokenizer",
    "lost_kinds", "saved_tokenizer", "train_tokenizer",
]  # fmt: skip


def load_tokenizer(path: str | Path, eos_token: str | None = None, add_bos: bool = False) -> Tokenizer:
    """Reads a SentencePiece ``.model`` or a Hugging Face ``tokenizer.json``.

    Args:
        eos_token: the piece that ends a document. None: the model's own; for tokenizer.json the one
            in tokenizer_config.json next to it.
        add_bos: documents begin with bos (data.tokenizer.add_bos).

    Raises:
        UserError: the file is missing or broken, or lacks an end-of-text piece, or the bos of ``add_bos``.
    """
    try:
        model = Path(path).read_bytes()
    except OSError as error:
        raise UserError(
            f"tokenizer {path}: {error.strerror}; set data.tokenizer.path to a SentencePiece .model "
            "file or a tokenizer.json, or to null to train one with: titans prepare CONFIG"
        ) from None
    tokenizer: Tokenizer
    if model == MODEL and eos_token in (None, TOKENS[EOS]):
        tokenizer = NucleotideTokenizer(Path(path))
    else:
        kind = HuggingFaceTokenizer if Path(path).suffix == ".json" else SentencePieceTokenizer
        tokenizer = kind(Path(path), model, eos_token)
    if tokenizer.eos_id < 0:
        raise UserError(
            f"tokenizer {path}: has no end-of-text piece, which separates documents; set "
            "data.tokenizer.eos_token to one, or data.tokenizer.path to a model that has it"
        )
    if add_bos:
        if tokenizer.bos_id < 0:
            raise UserError(
                f"data.tokenizer.add_bos: given true, but {path} has no begin-of-text piece; "
                "set it to false, or another data.tokenizer.path"
            )
        tokenizer.begin = (tokenizer.bos_id,)
    return tokenizer


def encode_pieces(tokenizer: Tokenizer, pieces: Iterable[Piece], spelled: bool) -> tuple[list[int], list[int]]:
    """Ids of a document behind ``Tokenizer.begin`` and before its eos, and where its answers are.

    No token spans the end of a piece: a model that answers has read the ids of what comes before.

    Args:
        spelled: whether control tokens are spelled in the text (a chat). An answer then ends with its last eos, if it
            has one; else the document's eos is part of the answer.

    Returns:
        The ids, and begin and end of each answer in ids of the document, ``Tokenizer.begin`` included.
    """
    encode = partial(spelled_ids, tokenizer) if spelled else tokenizer.encode
    ids: list[int] = []
    answers: list[int] = []
    first, before = len(tokenizer.begin), ""
    for text, is_answer in pieces:
        own = _added(encode, before, text, ids)
        if own is None:
            own = encode(text) if spelled else ids_within(tokenizer, text)
        if is_answer and own:
            ended = spelled and tokenizer.eos_id in own
            length = len(own) - own[::-1].index(tokenizer.eos_id) if ended else len(own) + (not spelled)
            answers += [first + len(ids), first + len(ids) + length]
        ids, before = ids + own, before + text
    return ids, answers


def ids_within(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of ``text`` in the middle of a document: without the space that some tokenizers put before a text."""
    if not text or not tokenizer.dummy_prefix:
        return list(tokenizer.encode(text))
    apart = (_added(tokenizer.encode, before, text) for before in ("\n", "a", "."))
    return next((ids for ids in apart if ids), list(tokenizer.encode(text)))


def ids_after(tokenizer: Tokenizer, before: str, text: str) -> list[int]:
    """The ids that ``text`` adds when it follows ``before``; if they cannot be separated, the ids of ``text`` alone."""
    ids = _added(tokenizer.encode, before, text)
    return list(tokenizer.encode(text)) if ids is None else ids


def _added(
    encode: Callable[[str], list[int]], before: str, text: str, first: list[int] | None = None
) -> list[int] | None:
    """The ids that ``text`` adds when it follows ``before``; None if they cannot be separated.

    first: ids of ``before``, if they are known.
    """
    first, both = encode(before) if first is None else first, encode(before + text)
    return list(both[len(first) :]) if both[: len(first)] == first else None
