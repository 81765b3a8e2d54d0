"""Nucleotide sequences: their alphabet, FASTA, genomes that install from packages, labelled sets, and baselines."""
