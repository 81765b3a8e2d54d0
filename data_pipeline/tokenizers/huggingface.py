"""A Hugging Face tokenizer.json whose decoding returns exactly the encoded text."""

import hashlib
import json
import re
from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from titans_pt.data_pipeline.text import replace_surrogates
from titans_pt.data_pipeline.tokenizers.base import FILES, Tokenizer
from titans_pt.errors import UserError
from titans_pt.tools.files import copy_file, write_text

CONFIG = "tokenizer_config.json"
CONTROLS = ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
"""Entries of CONFIG that name a control token each."""
_NEVER = -1e9
"""Score at which a Unigram model never uses a piece."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_STRETCH = 1 << 16
"""Longest text given to the library at once, which takes 160 bytes of memory per character."""
_AROUND = 64
"""Characters on either side of a place that tell whether a token begins there."""
_TRIES = 16
"""Most newlines, spaces and other places that are tried as the end of a stretch."""


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json of byte-level BPE (GPT-2's family) or of SentencePiece's kind (Llama's, with byte fallback).

    Control tokens are those with ``special`` in the file, those that tokenizer_config.json next to it names, the
    model's unknown token and ``eos_token``. Text that spells one is encoded as text.

    Raises:
        UserError: broken file, other kind of file, ``eos_token`` is no piece of it, or text is encoded to that piece.
    """

    def __init__(self, path: Path, model: bytes, eos_token: str | None = None):
        config = _config(path)
        try:
            tree = json.loads(model)
            self.controls = _controls(tree, config) | ({eos_token} if eos_token else set())
            self._tokenizer = tokenizers.Tokenizer.from_buffer(_marked(tree, self.controls) or model)
        except Exception as error:  # the library raises Exception itself
            raise UserError(
                f"tokenizer {path}: not a tokenizer.json ({' '.join(str(error).split())}); copy it again, "
                "or set data.tokenizer.path to another file"
            ) from None
        self.path, self.sha256 = path, hashlib.sha256(model).hexdigest()
        self._tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a text is text, not the end of a document
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.names = [self._tokenizer.id_to_token(i) or "" for i in range(self.vocab_size)]
        self.pieces = self._piece_bytes(tree)
        self._ends = {
            "bos_token": config.get("bos_token") or self._put_first(),
            "eos_token": eos_token or config.get("eos_token"),
        }
        self.chat_template = _chat_template(path, config)
        self.bos_id, self.eos_id = (self._id(self._ends[key]) for key in ("bos_token", "eos_token"))
        if eos_token and self.eos_id < 0:
            raise UserError(
                f"data.tokenizer.eos_token: given {eos_token!r}, which is no piece of {path}; set it to "
                "one, or to null for that of tokenizer_config.json next to it"
            )
        ending = self._ends["eos_token"]
        if ending is not None and self.eos_id >= 0 and self._is_text(ending, self.eos_id):
            raise UserError(
                f"data.tokenizer.eos_token: {ending!r} of {path} is an ordinary piece, "
                "which text becomes in the middle of documents; set it to a token of the file's "
                f"added_tokens: {', '.join(sorted(self.controls - {eos_token})[:8]) or 'it has none'}"
            )
        first = self.encode("a")
        self.dummy_prefix = bool(first) and self.pieces[first[0]].startswith(b" ")

    def encode_batch(self, texts: list[str], threads: int = 1) -> list[Sequence[int]]:
        texts = [replace_surrogates(text) for text in texts]
        if threads == 1:  # the library's batches take all cores, whatever this process was given
            return [self._encode_parts(text) if len(text) > _STRETCH else self._encode(text) for text in texts]
        short = [text for text in texts if len(text) <= _STRETCH]
        encoded = iter(self._tokenizer.encode_batch_fast(short, add_special_tokens=False))
        return [self._encode_parts(text) if len(text) > _STRETCH else next(encoded).ids for text in texts]

    def encode_spelled(self, text: str) -> list[int]:
        return self._spelled.encode(text, add_special_tokens=False).ids

    @cached_property
    def _spelled(self) -> tokenizers.Tokenizer:
        """A second tokenizer, which reads control tokens. Switching the first one would change the ids of texts that
        other threads encode at the same time."""
        return tokenizers.Tokenizer.from_str(self._tokenizer.to_str())

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _encode_parts(self, text: str) -> Sequence[int]:
        """Ids of a long text, encoded in stretches, each behind the end of the one before it."""
        ids, start = array("i"), 0  # a list of numbers takes nine times the memory
        while start < len(text):
            stop, lead = self._end_of_stretch(text, start), text[max(0, start - _AROUND) : start]
            head, both = self._encode(lead), self._encode(lead + text[start:stop])
            if both[: len(head)] != head:  # more characters than _AROUND decide here
                return self._encode(text)
            ids.extend(both[len(head) :])
            start = stop
        return ids

    def _end_of_stretch(self, text: str, start: int) -> int:
        """A place at which a token of the whole text begins, at most _STRETCH characters on if there is one."""
        limit = start + _STRETCH
        while limit < len(text):
            for at in _places(text, limit - _STRETCH // 2, limit):
                before = self._encode(text[at - _AROUND : at])
                if self._encode(text[at - _AROUND : at + _AROUND])[: len(before)] == before:
                    return at
            limit += _STRETCH
        return len(text)

    def save(self, folder: Path) -> Path:
        names = self._ends | {"control_tokens": sorted(self.controls)}
        if self.chat_template:
            names |= {"chat_template": self.chat_template}
        path = folder / FILES[1]
        write_text(folder / CONFIG, json.dumps(names, indent=1) + "\n")
        copy_file(self.path, path)
        return path

    def _put_first(self) -> str | None:
        """Token that the file itself puts before a text; None if there is none."""
        marked, alone = self._tokenizer.encode("a"), self._tokenizer.encode("a", add_special_tokens=False)
        return next(iter(marked.tokens), None) if alone.ids in (marked.ids[1:], marked.ids[1:-1]) else None

    def _id(self, token: str | None) -> int:
        found = None if token is None else self._tokenizer.token_to_id(token)
        return -1 if found is None else found

    def _is_text(self, token: str, index: int) -> bool:
        """Whether text that spells a token becomes its id: alone, after a space, or between letters."""
        return any(index in self.encode(text) for text in (token, f" {token}", f"a{token}a"))

    def _piece_bytes(self, tree: dict) -> list[bytes]:
        kinds = set(_kinds(tree.get("decoder")))
        if "ByteLevel" in kinds:
            of_character = {character: byte for byte, character in _byte_level().items()}
        elif not kinds & {"Metaspace", "Replace"}:
            raise UserError(
                f"tokenizer {self.path}: its decoder ({', '.join(sorted(kinds)) or 'none'}) does not give "
                "back the text; use byte-level BPE, or SentencePiece's kind with byte fallback"
            )
        else:
            of_character = None
        added = self._tokenizer.get_added_tokens_decoder()
        pieces = []
        for i, piece in enumerate(self.names):
            if not piece or (i in added and added[i].special):
                pieces.append(b"")
            elif i in added:
                pieces.append(piece.encode())
            elif of_character is not None:
                known = all(character in of_character for character in piece)  # else the library gives the piece itself
                pieces.append(bytes(of_character[character] for character in piece) if known else piece.encode())
            elif found := _BYTE.fullmatch(piece):
                pieces.append(bytes([int(found[1], 16)]))
            else:
                pieces.append(piece.replace("\u2581", " ").encode())
        return pieces


def _places(text: str, low: int, high: int) -> Iterator[int]:
    """Yields places in (low, high] where a token may begin: first newlines, then spaces, the last ones first."""
    for separator in ("\n", " "):
        at = high
        for _ in range(_TRIES):
            at = text.rfind(separator, low + 1, at)
            if at < 0:
                break
            yield at
    yield from range(high, max(low, high - _TRIES), -1)


def _config(path: Path) -> dict:
    """tokenizer_config.json next to ``path``, tokens in it as strings; {} where there is none."""
    try:
        tree = json.loads((path.parent / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError:
        tree = None
    if not isinstance(tree, dict):
        raise UserError(f"tokenizer {path.parent / CONFIG}: not valid JSON; copy it again")
    found = {key: _content(tree.get(key)) for key in CONTROLS}
    for key, token in found.items():
        if not isinstance(token, str | None):
            raise UserError(f"tokenizer {path.parent / CONFIG}: {key} is {token!r}, not a text; repair it")
    return tree | found


def _chat_template(path: Path, config: dict) -> str | None:
    """Template in chat_template.jinja, else in tokenizer_config.json; of several the one called default."""
    own = path.parent / "chat_template.jinja"
    try:
        return own.read_text(encoding="utf-8")
    except FileNotFoundError:
        found = config.get("chat_template")
    except UnicodeDecodeError:
        raise UserError(f"tokenizer {own}: not UTF-8; copy it again") from None
    if isinstance(found, list):
        named = (each for each in found if isinstance(each, dict))
        found = next((each.get("template") for each in named if each.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _content(token: str | dict | None) -> str | None:
    """A token that is written as a string, or as an object with its properties."""
    return token.get("content") if isinstance(token, dict) else token


def _controls(tree: dict, config: dict) -> set[str]:
    """The control tokens of a tokenizer.json and the tokenizer_config.json next to it."""
    more = config.get("extra_special_tokens") or {}
    added = [*tree.get("added_tokens", []), *config.get("added_tokens_decoder", {}).values()]
    found = {
        *(config.get(key) for key in CONTROLS),
        *(_content(token) for token in config.get("additional_special_tokens") or []),
        *map(_content, more.values() if isinstance(more, dict) else more),
        *(token["content"] for token in added if token.get("special")),
        *config.get("control_tokens", []),
        tree.get("model", {}).get("unk_token"),
    }
    return found - {None, ""}


def _marked(tree: dict, controls: set[str]) -> bytes | None:
    """A tokenizer.json in which all ``controls`` are special and no text becomes one; None if ``tree`` already is one.

    The library finds added tokens in text unless they are special. A Unigram model may have them among its pieces.
    """
    changed = False
    for token in tree.get("added_tokens", []):
        if token["content"] in controls and not token["special"]:
            token["special"] = changed = True
    if tree.get("model", {}).get("type") == "Unigram":
        for piece in tree["model"]["vocab"]:
            if piece[0] in controls and piece[1] > _NEVER:
                piece[1], changed = _NEVER, True
    return json.dumps(tree).encode() if changed else None


def _kinds(tree: dict | None) -> list[str]:
    """Types of a decoder and of the decoders inside it."""
    if tree is None:
        return []
    return [tree["type"], *(kind for part in tree.get("decoders", []) for kind in _kinds(part))]


def _byte_level() -> dict[int, str]:
    """The character that stands for each byte in byte-level BPE (Radford et al. 2019): itself if it is visible."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
