"""Reference pretraining stack for Titans: models whose memory keeps learning at test time."""

__version__ = "0.1.0"
