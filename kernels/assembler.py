"""Choice of the assembler, ptxas, that turns Triton's PTX into machine code.

Under ptxas 12.8, which Triton 3.6 uses for GPUs before Blackwell, the memory's kernels access illegal addresses on an
H200. The same kernels are correct under 12.9 and 13.0, and in an emulator of their PTX (docs/performance.md).
"""

import os
import re
import subprocess
from pathlib import Path

import torch

SOUND = (12, 9)
"""First ptxas version that compiles the kernels correctly."""


def version(ptxas: str) -> tuple[int, ...]:
    """Return the version of ``ptxas``: (13, 4, 59) for V13.4.59; () if it cannot be run."""
    try:
        said = subprocess.run([ptxas, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return ()
    found = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else ()


def sound(used: str, others: list[str]) -> str | None:
    """Return ``used`` if it compiles correctly, else the oldest of ``others`` that does; None if there is none.

    The oldest, because more drivers load its code.
    """
    known = {path: version(path) for path in (used, *others)}
    good = [path for path in known if known[path] >= SOUND]
    return used if used in good else min(good, key=known.__getitem__, default=None)


def installed(used: str) -> list[str]:
    """List other assemblers: next to Triton's own, in CUDA's toolkit and in NVIDIA's wheels."""
    homes = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    wheels = Path(torch.__file__).parent.with_name("nvidia").glob("*/bin/ptxas")
    beside = sorted(Path(used).parent.glob("ptxas*"))
    return [*map(str, beside), *(f"{home}/bin/ptxas" for home in homes if home), *map(str, wheels)]


def choose() -> str | None:
    """Make Triton use a correct assembler, in this process and its children, if its own is not.

    Returns the reason if it finds none, else None. An assembler that TRITON_PTXAS_PATH names is the user's choice and
    stays.
    """
    from triton.backends.nvidia.compiler import get_ptxas

    used = get_ptxas(90)
    given = os.environ.get("TRITON_PTXAS_PATH")
    found = sound(used.path, [] if given else installed(used.path))
    if found is None:
        whose = "that TRITON_PTXAS_PATH names" if given else "that Triton brings"
        return (
            f"the assembler {whose}, ptxas {used.version}, makes wrong code of these kernels; set TRITON_PTXAS_PATH to "
            "the ptxas of CUDA 12.9 or newer (python3 -m pip install nvidia-cuda-nvcc)"
        )
    if found != used.path:
        os.environ["TRITON_PTXAS_PATH"] = found
    return None


def unsound() -> str | None:
    """Call :func:`choose` on a machine with an NVIDIA GPU; return None elsewhere."""
    return choose() if torch.cuda.is_available() and torch.version.hip is None else None
