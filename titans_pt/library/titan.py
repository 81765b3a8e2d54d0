"""A trained language model in Python: text in, text out, with the memory's state as a value."""

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from titans_pt.errors import UserError
from titans_pt.layers.state import fork, state_bytes
from titans_pt.models.language_model import LanguageModelState
from titans_pt.streaming import Returning, Sampling, best_device, continuation, prefill
from titans_pt.tools.extras import needed

# Runs are imported inside functions: they need packages for YAML and tokenizers, which the layers do not need.
if TYPE_CHECKING:
    from titans_pt.runs.loaded import LoadedRun

PRETRAINED = Path(__file__).parents[1] / "pretrained"
"""Runs that come with the package, a folder each: settings, weights and model card."""


@dataclass(frozen=True)
class Reading:
    """State of a model after reading: the logits (1, V) for the next token, and the state of every layer.

    Its size does not grow with the text, except for full attention. It is valid only for the weights that read the
    text.
    """

    logits: Tensor
    state: Any
    _run: "LoadedRun"
    unfinished: bytes = b""
    """Bytes of a character that the last token left incomplete: the text generated next begins with them."""

    def __repr__(self) -> str:
        return f"Reading(state of {state_bytes(self.state) / 2**20:.2f} MiB)"  # a notebook shows what a cell ends with

    def fork(self) -> "Reading":
        """A copy that shares no tensor with this one."""
        return replace(self, logits=self.logits.clone(), state=fork(self.state))

    def save(self, path: str | Path):
        """Writes a state file for :meth:`Titan.load_state` and ``titans generate --state``."""
        from titans_pt.runs.loaded import save_reading

        save_reading(self._run, self.logits, self.state, self.unfinished, path)


class Titan(nn.Module):
    """A trained language model with its tokenizer; :meth:`from_pretrained` loads it.

    ``state`` is the state after the last :meth:`read` or :meth:`generate`: pass it on to continue from there. A call
    without a state begins a document.
    """

    def __init__(self, run: "LoadedRun"):
        super().__init__()
        self.run = run
        self.model = run.model
        self.state: Reading | None = None

    @classmethod
    def from_pretrained(
        cls, path: str | Path, device: str | torch.device | None = None, precision: str | None = None
    ) -> "Titan":
        """
        Args:
            path: a run's folder (its newest checkpoint, or the best where a run has one), one of its checkpoints, or a
                folder that ``titans export`` wrote, which needs titans-pt[eval]; or the name of a model that comes with
                the package, "needles-lmm".
            device: None: a GPU if there is one.
            precision: "bf16" or "fp32"; None: as ``titans generate`` chooses.

        Raises:
            UserError: ``path`` is none of these, or damaged; this machine has no such device; titans-pt[text] is not
                installed.
        """
        if precision not in (None, "bf16", "fp32"):
            raise UserError(f"precision: given {precision!r}; allowed: 'bf16', 'fp32'")
        try:
            there = torch.empty(0, device=device or best_device()).device
        except (RuntimeError, AssertionError) as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            raise UserError(f"device: given {str(device)!r}: {reason}; leave it out for {best_device()}") from None
        with needed("Titan.from_pretrained"):
            return cls(_loaded(Path(path).expanduser(), there, precision))

    def forward(self, ids: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """ids (B, T) int64 -> logits (B, T, V), and the state after the last token, for the call with the next ids.

        Raises:
            UserError: the state is no model's, such as a whole :class:`Reading`, whose attribute ``state`` is one.
            ValueError: it is another model's.
        """
        if isinstance(state, Reading):
            raise UserError("state: given a Reading; a call with ids takes its state: pass reading.state")
        if not isinstance(state, (LanguageModelState, NoneType)):
            raise UserError(f"state: given a {type(state).__name__}; allowed: the second result of the call before, or "
                            "reading.state")  # fmt: skip
        return self.model(ids, state)

    def read(self, text: str, state: Reading | None = None) -> Reading:
        """Reads ``text`` piece by piece, in constant memory.

        Args:
            text: one text of any length.
            state: the state to continue from, which does not change; None: the text begins a document.

        Returns:
            the state after the text; ``self.state`` is the same.
        """
        if not isinstance(text, str):
            raise UserError(f"text: given a {type(text).__name__}; allowed: one string. titans export makes a folder "
                            "whose generate() takes a batch of texts")  # fmt: skip
        tokenizer = self.run.tokenizer
        if state is None:
            ids = tokenizer.document(text) or tokenizer.before_text
        else:
            self._check(state)
            from titans_pt.data_pipeline.tokenizers import ids_within

            ids = ids_within(tokenizer, text)
        return self._read(ids, state)

    def generate(
        self,
        text: str = "",
        max_new_tokens: int = 100,
        temperature: float = 0.8,
        seed: int = 0,
        top_k: int | None = None,
        top_p: float = 0.95,
        state: Reading | None = None,
    ) -> str:
        """Continues ``text``; the defaults and the new text are those of ``titans generate``.

        Args:
            text: optional with ``state``.
            max_new_tokens: the most tokens to generate; an end-of-text token ends it earlier.
            temperature: 0 takes the most likely token, 1 draws from the model's distribution.
            seed: random seed of the draws.
            top_k: draws only from this many most likely tokens; None: from all.
            top_p: draws only from the smallest set of tokens that holds this much probability.
            state: the state to continue from, which does not change; None: the text begins a document.

        Returns:
            the new text; ``self.state`` is the state after it. If ``max_new_tokens`` cuts a character, the text
            generated from that state begins with it.

        Raises:
            UserError: an argument out of range, nothing to continue, or a state of other weights.
        """
        sampling = Sampling(temperature, top_k, top_p, seed)
        sampling.check(max_new_tokens)
        if not text and state is None:
            raise UserError(f"text: given {text!r}; allowed: some text, or none with a state")
        return self._continued(self.read(text, state), max_new_tokens, sampling, [self.run.tokenizer.eos_id])

    def chat(
        self,
        message: str,
        max_new_tokens: int = 512,
        temperature: float = 0.8,
        seed: int = 0,
        top_k: int | None = None,
        top_p: float = 0.95,
        state: Reading | None = None,
        system: str | None = None,
    ) -> str:
        """Answers a user's message, as ``titans chat`` does; the tokenizer's chat template writes it.

        Args:
            message: what the user says.
            state: the state that the conversation has reached, which does not change; None: the message begins it.
            system: system message of a conversation that begins; None: the template's own, if it has one.

        All other arguments are those of :meth:`generate`.

        Returns:
            the answer; ``self.state`` is the state after it: pass it on with the next message.

        Raises:
            UserError: as :meth:`generate`; the tokenizer has no chat template; titans-pt[eval] is not installed.
        """
        sampling = Sampling(temperature, top_k, top_p, seed)
        sampling.check(max_new_tokens)
        if system is not None and state is not None:
            raise UserError("system: given together with a state; it begins a conversation: leave one out")
        if state is not None:
            self._check(state)
        from titans_pt.data_pipeline.tokenizers.chat import answer_ends, message_ids

        ids = message_ids(self.run.tokenizer, message, system, first=state is None)
        return self._continued(self._read(ids, state), max_new_tokens, sampling, answer_ends(self.run.tokenizer))

    def _read(self, ids: list[int], state: Reading | None) -> Reading:
        """Reads ``ids`` behind ``state``; returns the state after them, which ``self.state`` also is."""
        state = state and state.fork()
        if ids:
            logits, after = prefill(
                self.model, torch.tensor([ids]), self.run.config.evaluation.prefill_tokens, state and state.state
            )
            state = Reading(logits, after, self.run)
        assert state is not None, "a document has at least one token before its text"
        self.state = state
        return state

    def _continued(self, before: Reading, max_new_tokens: int, sampling: Sampling, ends: list[int]) -> str:
        """Text that the model generates from ``before``, up to one of the ids ``ends``; ``self.state`` is the state
        after it."""
        from titans_pt.data_pipeline import StreamDecoder

        tokens = Returning(
            continuation(
                self.model, before.logits, before.state, max_new_tokens, ends, sampling.chooser(), read_last=True
            )
        )
        decoder = StreamDecoder(self.run.tokenizer, continues=True, unfinished=before.unfinished)
        text = "".join(map(decoder.push, tokens))
        logits, after = tokens.value
        self.state = Reading(logits, after, self.run, decoder.unfinished)
        return text

    def load_state(self, path: str | Path) -> Reading:
        """Loads the file that :meth:`Reading.save`, or ``titans generate --save-state``, wrote with the same weights.

        Raises:
            UserError: the file is not a state file, is damaged, or belongs to other weights.
        """
        from titans_pt.runs.loaded import load_reading

        logits, state, unfinished = load_reading(self.run, path)
        self.state = Reading(logits, state, self.run, unfinished)
        return self.state

    def _check(self, state: Any):
        if not isinstance(state, Reading):
            raise UserError(f"state: given a {type(state).__name__}; allowed: what read() or load_state() returned, or "
                            "model.state")  # fmt: skip
        if state._run.identity != self.run.identity:
            raise UserError("state: given one of other weights; read the text again with this model")


def _loaded(path: Path, device: str | torch.device, precision: str | None) -> "LoadedRun":
    """Loads the argument of :meth:`Titan.from_pretrained` as a run."""
    from titans_pt.runs import checkpoints
    from titans_pt.runs.folder import RunFolder
    from titans_pt.runs.loaded import load_run

    if not path.exists() and path.name == str(path) and (PRETRAINED / path).is_dir():
        path = PRETRAINED / path
    if checkpoints.is_checkpoint(checkpoint := path.resolve()):
        step = checkpoints.step_of(checkpoint)
        return load_run(checkpoint.parent.parent, step, device, precision=precision)
    if RunFolder(path).config.is_file():
        return load_run(path, device=device, precision=precision)
    if (path / "config.json").is_file():
        return _exported(path, device, precision)
    raise UserError(
        f"{path}: neither a run's folder nor one of its checkpoints (checkpoints/step-...) nor a folder that "
        f"titans export wrote; name one of these, or one of {', '.join(sorted(p.name for p in PRETRAINED.iterdir()))}"
    )


def _exported(folder: Path, device: str | torch.device, precision: str | None) -> "LoadedRun":
    """Loads an exported folder as a run, through a temporary run folder.

    While the files are unchanged since the export, the run has the hash of the exported checkpoint: state files of the
    original run fit it.
    """
    from titans_pt.huggingface import import_run  # imports transformers, which runs do not need
    from titans_pt.runs.folder import RunFolder
    from titans_pt.runs.loaded import load_run
    from titans_pt.tools.tensor_files import SUMS

    with tempfile.TemporaryDirectory(prefix="titans-") as scratch:
        import_run(folder, Path(scratch, "run"))
        run = load_run(Path(scratch, "run"), device=device, precision=precision)
    run = replace(run, folder=RunFolder(folder))
    if not (folder / SUMS).is_file():  # saved again by transformers, perhaps with other weights
        return run
    origin = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("checkpoint_hash")
    return replace(run, checkpoint_hash=origin or run.checkpoint_hash)
