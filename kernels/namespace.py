"""The namespace of our operators for torch.compile."""

import hashlib
from pathlib import Path


def namespace(module: str, file: str) -> str:
    """Return ``titans``, or for a copy in an exported folder a namespace derived from the text of ``file``.

    PyTorch has one operator table per process, and the last definition of a name wins. The copies in an exported
    folder may be of another version, with other arguments: they must not take the names of the package.
    """
    if module.startswith("titans_pt."):
        return "titans"
    return f"titans_{hashlib.sha256(Path(file).read_bytes()).hexdigest()[:8]}"
