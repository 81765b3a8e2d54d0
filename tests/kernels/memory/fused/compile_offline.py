"""Compile kernels for sm_90a without a GPU and print what ptxas reports, one JSON object per line.

A separate program, because Triton decides once per process whether to interpret.

    python compile_offline.py '[{"kernel": "scan"}]'
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"
sys.path.insert(0, str(Path(__file__).parents[4]))

import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends import backends  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import CUDABackend, get_ptxas  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from titans_pt.kernels.memory.fused import coefficients, deferred, read, scan, step  # noqa: E402
from titans_pt.kernels.memory.fused.configurations import (  # noqa: E402
    KERNELS,
    MAX_BLOCK,
    block_tokens,
    chunk_tokens,
    precision,
    scale,
)

OPERANDS = {"base", "q", "k", "v", "d_y", "out", "weights", "momenta", "hidden", "pulled", "active", "bent", "error",
            "mixes", "query_active", "d_query_hidden", "d_out", "turned", "d_z", "d_pulled", "d_q", "d_k",
            "d_v"}  # fmt: skip
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
INTEGERS = {"T", "H", "N", "first", "K"}
FUNCTIONS = {f.__name__: f for f in (
    coefficients.coefficients, coefficients.coefficients_backward, scan.scan, scan.scan_backward,
    deferred.chunk_gradients, read.read, read.read_backward, step.step,
)}  # fmt: skip


KINDS = {
    "wgmma": "HGMMA", "mma": "HMMA", "waits for wgmma": "WARPGROUP.DEPBAR|WARPGROUP.ARRIVE", "barriers": "BAR",
    "global loads": "LDG", "global stores": "STG", "shared loads": "LDS", "shared stores": "STS",
    "spill loads": "LDL", "spill stores": "STL", "special functions": "MUFU",
    "fp32": "FADD|FMUL|FFMA|FSEL|FSETP|FMNMX|F2F|FCHK", "packed halves": "HADD2|HMUL2|HFMA2|F2FP|HMNMX2",
    "shuffles": "SHFL",
}  # fmt: skip
"""Kinds of machine instructions, by the beginning of their names; all others (integers, moves, branches) are "other".
"""


def instructions(cubin: bytes, trips: list[int]) -> dict[str, float]:
    """Instructions that a warp executes, by kind (KINDS) and in "all"; "static": instructions in the
    code; "loops": the depth of each loop.

    trips: number of repetitions of loops, by depth. [1, 4] counts one repetition of outer loops and four of the loops
    inside them. Code outside all loops counts once if the first number is above one, else not at all.
    """
    with tempfile.NamedTemporaryFile("wb", suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(get_ptxas(90).path).with_name("nvdisasm")
        said = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    names, labels, jumps = [], {}, []
    for line in said.splitlines():
        if label := re.match(r"(\.L\S*):", line):
            labels[label[1]] = len(names)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\S+\s+)?([A-Z]\S*)(.*)", line):
            if found[1].startswith("BRA") and (to := re.search(r"\(?(\.L\S+?)\)", found[2])):
                jumps.append((len(names), to[1]))
            names.append(found[1])
    loops = [(labels[to], at) for at, to in jumps if labels.get(to, at + 1) < at]  # a loop jumps back
    counts: dict[str, float] = dict.fromkeys([*KINDS, "other", "all"], 0)
    for at, name in enumerate(names):
        depth = len({begin for begin, end in loops if begin <= at <= end})
        weight = math.prod(trips[:depth]) * (1 if depth else trips[0] > 1)
        kind = next((k for k, begins in KINDS.items() if re.match(f"({begins})", name)), "other")
        counts[kind] += weight
        counts["all"] += weight
    return counts | {"static": len(names), "loops": [len({b for b, e in loops if b <= x <= e}) for x, _ in loops]}


class Allocated(Exception):
    """Raised once shared memory is allocated; the argument is its size in bytes."""


class Compiler(CUDABackend):
    """Triton's CUDA compiler, which can stop as soon as the shared memory is known."""

    until_shared = False

    def add_stages(self, stages, *options):
        super().add_stages(stages, *options)
        if self.until_shared:

            def stop(source, metadata):
                raise Allocated(metadata["shared"])

            stages["ptx"] = stop


backends["nvidia"] = replace(backends["nvidia"], compiler=Compiler)


def resources(
    kernel: str, D=64, expansion=2, C=64, depth=2, dtype="bf16", gates=1, forget_to="zero", **changed
) -> dict:
    """Registers and spills (bytes) per thread, shared memory (bytes) per program.

    changed: slice, warps; plain: no LayerNorm and residual, but resets; trips: see :func:`instructions`;
    only="shared": only the shared memory, in a third of the time.
    """
    Compiler.until_shared = changed.get("only") == "shared"
    function = FUNCTIONS[kernel]
    chosen = KERNELS[kernel][D]
    plain = bool(changed.get("plain"))
    width, block = D * expansion if depth == 2 else D, block_tokens(C, changed.get("length", MAX_BLOCK))
    constants = {
        "D": D, "HIDDEN": width, "BLOCK": block, "LAYERS": depth, "GATES": gates, "CHUNK": C, "NORM": not plain,
        "RESIDUAL": not plain, "RESET": plain, "TO_START": forget_to == "start", "ACTIVATION": "gelu",
        "PRECISION": precision(DTYPES[dtype]),
        "SCALE": scale(DTYPES[dtype], C),
        **chunk_tokens(C, block),
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
    try:
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    except Allocated as found:
        return {"shared": found.args[0], "triton": triton.__version__}
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", file.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    counts = instructions(made.asm["cubin"], changed["trips"]) if "trips" in changed else {}
    return {
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
        "spills": int(re.search(r"(\d+) bytes spill stores", said)[1]),
        "shared": made.metadata.shared,
        "wgmma": made.asm["ptx"].count("wgmma.mma_async"),
        "triton": triton.__version__,
    } | counts


if __name__ == "__main__":
    for case in json.loads(sys.argv[1]):
        print(json.dumps(case | resources(**case)), flush=True)
