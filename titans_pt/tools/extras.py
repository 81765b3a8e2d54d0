"""The package's extras: which imports each one brings, and the error message for a missing import."""

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
"""Extra -> the packages that it installs, by import name; tests compare this with pyproject.toml."""
WITHIN = {"demo": ("text",), "train": ("text", "demo")}
"""Extra -> other extras that it includes."""


def missing(error: ModuleNotFoundError, user: str, ask_for: Sequence[str] = ()) -> UserError | None:
    """Error for a package that is not installed; None if no extra installs it, which is a bug of ours.

    Args:
        user: the program that needs the package, such as "titans train".
        ask_for: extras to name instead of the smallest one, if they include the package.
    """
    package = (error.name or "").partition(".")[0]
    owner = next((extra for extra, packages in EXTRAS.items() if package in packages), None)
    if owner is None:
        return None
    extra = next((extra for extra in ask_for if owner == extra or owner in WITHIN.get(extra, ())), owner)
    return UserError(f"{package}: not installed, and {user} needs it; pip install 'titans-pt[{extra}]'")


@contextmanager
def needed(user: str) -> Iterator[None]:
    """Turns the import error of an extra's missing package into a UserError inside the ``with``.

    Raises:
        UserError: one line with the package, ``user`` and the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (told := missing(error, user)) is None:
            raise
        raise told from None
