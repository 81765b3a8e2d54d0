"""Shape of the memory's network: everything but its weights."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class NetworkShape:
    """M(x) = x + LN(W_L act(... act(W_1 x))), an MLP of each head.

    width: D, of inputs and outputs. hidden: width between layers (meaningless at depth 1).
    depth: L, weight matrices. norm: the LayerNorm (eps 1e-5, affine). residual: the ``x +``.
    activation: "gelu" (exact), "silu" or "relu". inputs: input width of the first matrix, if its input is not x but
    features of x (Rule.features); None: width.
    """

    width: int
    hidden: int
    depth: int = 2
    norm: bool = True
    residual: bool = True
    activation: str = "gelu"
    inputs: int | None = None

    @property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """(d_in, d_out) of each weight matrix, from input to output."""
        widths = [self.inputs or self.width, *[self.hidden] * (self.depth - 1), self.width]
        return tuple(zip(widths[:-1], widths[1:], strict=True))

    @property
    def channels(self) -> int:
        """Number of input channels of all weight matrices: a token's number of alphas if each channel has its own."""
        return sum(d_in for d_in, _ in self.layers)

    def per_layer(self, gate: Tensor) -> list[Tensor]:
        """Splits a gate by layer: (.., 1) or (.., L) -> L tensors (.., 1); (.., channels) -> L (.., d_in)."""
        if gate.shape[-1] == 1:
            return [gate] * self.depth
        if gate.shape[-1] == self.depth:
            return list(gate.split(1, -1))
        return list(gate.split([d_in for d_in, _ in self.layers], -1))

    @staticmethod
    def of(
        weights: tuple[Tensor, ...],
        norm: tuple[Tensor, ...] | None,
        residual: bool = True,
        activation: str = "gelu",
    ) -> "NetworkShape":
        """The shape of given weights (..., d_in, d_out) and LayerNorm.

        Raises:
            ValueError: no weights.
        """
        if not weights:
            raise ValueError("a memory has at least one weight matrix, got none")
        (inputs, hidden), width = weights[0].shape[-2:], weights[-1].shape[-1]
        return NetworkShape(
            width, hidden, len(weights), norm is not None, residual, activation, None if inputs == width else inputs
        )
