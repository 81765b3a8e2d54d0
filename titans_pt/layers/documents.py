"""Starts of documents in packed sequences, worked out once for all layers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from titans_pt.kernels.common import sent


@dataclass
class Documents:
    """Starts of documents in B rows of T tokens.

    starts: (B, T) bool, True where one starts.
    begin: (B, T) int64, the newest start in the row at or before each token; -1 where it lies before the first token.
    bounds: (n + 1,) int32, starts in the rows laid end to end, with each row's first token, padded with B * T.
    most: upper bound on the starts in a row, known without asking the GPU.
    host: ``starts`` on the CPU, for mixers that cut their calls there; copying them from the GPU would wait for it.
    """

    starts: Tensor
    begin: Tensor
    bounds: Tensor
    most: int
    host: Tensor

    @staticmethod
    def of(reset: Tensor, device: torch.device) -> "Documents":
        """Documents that start where ``reset``, (B, T) bool, is True; if it is on the CPU, nothing waits for a GPU.

        ``most`` is a power of two, 8 at least: code compiled for it serves nearly all batches.
        """
        count = max(8, int(reset.sum(1).max()))
        return Documents._make(sent(reset, device), 1 << (count - 1).bit_length(), reset.cpu())

    @staticmethod
    def _make(starts: Tensor, most: int, host: Tensor | None = None) -> "Documents":
        """host: ``starts`` on the CPU; None if ``starts`` itself is there."""
        rows, length = starts.shape
        place = torch.arange(rows * length, device=starts.device).view(rows, length)
        first = starts | (place % length == 0)
        bounds = torch.where(first, place, rows * length).flatten().sort().values
        bounds = torch.cat([bounds, bounds.new_full((1,), rows * length)])[: rows * (most + 1) + 1]
        begin = torch.where(starts, place[0], -1).cummax(1).values
        return Documents(starts, begin, bounds.to(torch.int32), most, starts if host is None else host)

    def to(self, device: torch.device) -> "Documents":
        """The same on another device."""
        return Documents(self.starts.to(device), self.begin.to(device), self.bounds.to(device), self.most, self.host)

    def cut(self, begin: int, end: int) -> "Documents":
        """Documents of the tokens begin .. end - 1 of each row."""
        return Documents._make(self.starts[:, begin:end], min(self.most, end - begin), self.host[:, begin:end])
