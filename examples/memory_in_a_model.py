"""A memory layer inside a plain PyTorch model: it learns to copy a key's value from earlier in the sequence.

python examples/memory_in_a_model.py --steps 200
"""

import argparse

import torch
from torch import nn

from titans_pt import LMM, parameter_groups

KEYS, VALUES = 8, 8


class Model(nn.Module):
    """Two blocks of x + layer(norm(x)); the layer stands where attention would."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.embedding = nn.Embedding(KEYS + VALUES, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.layers = nn.ModuleList(LMM(width, n_heads=2, chunk_size=8) for _ in range(2))
        self.head = nn.Linear(width, VALUES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))[0]
        return self.head(x)


def batch(rows: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Random samples: ids (rows, 17), key value ... key value key, and answers (rows,), the last key's value."""
    keys = torch.stack([torch.randperm(KEYS) for _ in range(rows)])
    values = torch.randint(VALUES, (rows, KEYS))
    asked = torch.randint(KEYS, (rows, 1))
    pairs = torch.stack([keys, KEYS + values], dim=-1).flatten(1)
    return torch.cat([pairs, keys.gather(1, asked)], 1), values.gather(1, asked).squeeze(1)


def main(steps: int) -> float:
    """Train the model and return its share of right answers at the end."""
    torch.manual_seed(0)
    model = Model()
    optimiser = torch.optim.AdamW(parameter_groups(model, 0.01), lr=3e-3)
    for step in range(1, steps + 1):
        ids, answers = batch()
        loss = nn.functional.cross_entropy(model(ids)[:, -1], answers)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % max(steps // 10, 1) == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    ids, answers = batch(256)
    with torch.no_grad():
        right = (model(ids)[:, -1].argmax(-1) == answers).float().mean().item()
    print(f"right answers: {100 * right:.0f} % (chance {100 / VALUES:.0f} %)")
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
