"""Compile the scan's kernels for sm_90a without a GPU and print what ptxas reports, one JSON object per line.

A separate program, because Triton decides once per process whether to interpret.

    python compile_offline.py '[{"kernel": "scan"}]'
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"
sys.path.insert(0, str(Path(__file__).parents[3]))

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import get_ptxas  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from titans_pt.kernels.channel_scan import fused  # noqa: E402

INPUTS = {"x", "step", "k", "q", "out", "d_out", "d_x", "d_step"}
INTEGERS = {"T", "D", "B"}


def resources(kernel: str, N=16, dtype="bf16", mamba=True, reset=False, **changed) -> dict:
    """Registers and spills (bytes) per thread, shared memory (bytes) per program; changed: tokens, cells, warps."""
    function = getattr(fused, kernel)
    constants = {
        "N": N, "TOKENS": changed.get("tokens", fused.TOKENS),
        "CHANNELS": max(1, changed.get("cells", fused.CELLS) // N),
        "RATE": mamba, "RESET": reset, "KEEP": True,
    }  # fmt: skip
    names = function.arg_names
    constants = {name: constant for name, constant in constants.items() if name in names}
    signature, attributes = {}, {}
    for n, name in enumerate(names):
        if name in constants or name in INTEGERS:
            signature[name] = "constexpr" if name in constants else "i32"
        else:
            signature[name] = "*u8" if name == "reset" else f"*{dtype if name in INPUTS else 'fp32'}"
        if signature[name].startswith("*") or name == "D":
            attributes[(n,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, {(names.index(n),): c for n, c in constants.items()}, attributes)
    options = {"num_warps": changed.get("warps", fused.WARPS), "num_stages": 1}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", file.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
        "spills": int(re.search(r"(\d+) bytes spill stores", said)[1]),
        "shared": made.metadata.shared,
        "triton": triton.__version__,
    }


if __name__ == "__main__":
    for case in json.loads(sys.argv[1]):
        print(json.dumps(case | resources(**case)), flush=True)
