"""Progress of a training on the screen, and the peak speed of known GPUs."""

import re
import sys

import torch
from tqdm import tqdm

from titans_pt.tools.screen import drop

PEAK_FLOPS = {
    "H200 NVL": 835e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12
}  # fmt: skip
"""Dense bf16 FLOP/s of known GPUs, SXM unless the key says otherwise.

A key is a part of the GPU's name that no digit follows (RTX A1000); the first that fits counts. Source: NVIDIA's data
sheets, half of the figures with sparsity.
"""


class Progress:
    """A progress bar on stderr with loss, tokens per second and time left; hidden if ``shown`` is False."""

    def __init__(self, step: int, last: int, shown: bool):
        self._bar = tqdm(
            total=last, initial=step, unit="step", dynamic_ncols=True, disable=not shown,
            mininterval=0.5 if sys.stderr.isatty() else 15.0,  # a log file wants few lines
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} steps [{elapsed}, {remaining} left{postfix}]",
        )  # fmt: skip

    def update(self, loss: float, tokens_per_second: float):
        self._bar.set_postfix_str(f"loss {loss:.4f}, {tokens_per_second:,.0f} tokens/s", refresh=False)
        try:
            self._bar.update()
        except OSError:  # the terminal or pipe has closed; the run goes on without its bar
            drop(sys.stderr)

    def close(self):
        try:
            self._bar.close()
        except OSError:
            drop(sys.stderr)


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of a device, or None if unknown (CPUs, other GPUs, parts of a GPU under MIG)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if " MIG " in name:
        return None
    return next((peak for part, peak in PEAK_FLOPS.items() if re.search(rf"{part}(?!\d)", name)), None)
