"""The extras of the package: which import belongs to which, and what to say where one is missing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from titans_pt.errors import UserError

EXTRAS = {
    "text": ("yaml", "sentencepiece", "tokenizers"),
    "demo": ("click", "tqdm", "matplotlib"),
    "train": ("deepspeed", "datasets", "pyarrow", "wandb", "wonderwords", "pooch", "requests"),
    "eval": ("lm_eval", "nltk", "transformers", "huggingface_hub", "accelerate", "gguf"),
    "data": ("rensa",),
    "gpu": ("liger_kernel", "fla"),
    "tensorboard": ("tensorboard",),
}
"""Extra -> the packages that it brings, by the names with which they are imported; tests hold it to pyproject.toml."""
WITHIN = {"demo": ("text",), "train": ("text", "demo")}
"""Extra -> the extras whose packages it brings, besides its own."""


def missing(error: ModuleNotFoundError, user: str, ask_for: Sequence[str] = ()) -> UserError | None:
    """Message about a package that is not installed; None if no extra brings it, which is a fault of ours.

    Args:
        user: what needs the package, such as "titans train".
        ask_for: extras to name rather than the smallest, if they bring the package.
    """
    package = (error.name or "").partition(".")[0]
    owner = next((extra for extra, packages in EXTRAS.items() if package in packages), None)
    if owner is None:
        return None
    extra = next((extra for extra in ask_for if owner == extra or owner in WITHIN.get(extra, ())), owner)
    return UserError(f"{package}: not installed, and {user} needs it; pip install 'titans-pt[{extra}]'")


@contextmanager
def needed(user: str) -> Iterator[None]:
    """A missing package of an extra is a UserError inside it.

    Raises:
        UserError: one line with the package, ``user`` and the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (told := missing(error, user)) is None:
            raise
        raise told from None
