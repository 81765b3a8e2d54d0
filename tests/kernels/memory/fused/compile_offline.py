"""Compiles kernels for sm_90a without a GPU and prints what ptxas says of each, one JSON object a line.

A program of its own: Triton decides once whether it interprets.    python compile_offline.py '[{"kernel": "scan"}]'
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"
sys.path.insert(0, str(Path(__file__).parents[4]))

import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import get_ptxas  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from titans_pt.kernels.memory.fused import coefficients, read, scan, step  # noqa: E402
from titans_pt.kernels.memory.fused.configurations import KERNELS, block_tokens, chunk_tokens, precision, scale  # noqa: E402

OPERANDS = {"base", "q", "k", "v", "d_y", "out", "weights", "momenta", "hidden", "pulled", "error", "query_hidden",
            "d_query_hidden", "d_out", "d_q", "d_k", "d_v"}  # fmt: skip
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
INTEGERS = {"T", "H", "N", "first", "K"}
FUNCTIONS = {f.__name__: f for f in (
    coefficients.coefficients, coefficients.coefficients_backward, scan.scan, scan.scan_backward, read.read,
    read.read_backward, step.step,
)}  # fmt: skip


def resources(
    kernel: str, D=64, expansion=2, C=64, depth=2, dtype="bf16", gates=1, forget_to="zero", **changed
) -> dict:
    """registers and spills (bytes) of a thread, shared memory (bytes) of a program; changed: slice, warps."""
    function = FUNCTIONS[kernel]
    chosen = KERNELS[kernel][D]
    width = D * expansion if depth == 2 else D
    constants = {
        "D": D, "HIDDEN": width, "BLOCK": block_tokens(C), "LAYERS": depth, "GATES": gates, "CHUNK": C, "NORM": True,
        "RESIDUAL": True, "RESET": False, "TO_START": forget_to == "start", "ACTIVATION": "gelu",
        "PRECISION": precision(DTYPES[dtype]),
        "SCALE": scale(DTYPES[dtype], C),
        **chunk_tokens(C, block_tokens(C)),
        "SLICE": min(changed.get("slice", chosen.slice), width) if depth == 2 else D,
    }  # fmt: skip
    names = function.arg_names
    constants = {n: c for n, c in constants.items() if n in names}
    signature, attributes = {}, {}
    for n, name in enumerate(names):
        if name in constants or name in INTEGERS:
            signature[name] = "constexpr" if name in constants else "i32"
            continue
        signature[name] = {"info": "*i32", "offset": "*i64"}.get(name, f"*{dtype if name in OPERANDS else 'fp32'}")
        attributes[(n,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, {(names.index(n),): c for n, c in constants.items()}, attributes)
    options = {"num_warps": changed.get("warps", chosen.warps), "num_stages": 1}
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
        "wgmma": made.asm["ptx"].count("wgmma.mma_async"),
        "triton": triton.__version__,
    }


if __name__ == "__main__":
    for case in json.loads(sys.argv[1]):
        print(json.dumps(case | resources(**case)), flush=True)
