"""Genomes from packages, by name, for data.sources kind=genome."""

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from titans_pt.config import GenomeName
from titans_pt.genomics import packages
from titans_pt.genomics.packages import Package


@dataclass(frozen=True)
class Genome:
    """A FASTA file in a package. about: a description."""

    package: Package
    path: str
    about: str

    def fasta(self) -> Path:
        """Path of the file, downloaded at the first call.

        Raises:
            UserError: it cannot be downloaded.
        """
        return packages.member(self.package, self.path)


GENOMES: dict[str, Genome] = {
    "ecoli": Genome(
        packages.BOWTIE, "usr/share/doc/bowtie/examples/genomes/NC_008253.fna.gz",
        "Escherichia coli 536, NC_008253, 4.94 Mb",
    ),
    "worm-x": Genome(
        packages.BSGENOME, "usr/lib/R/site-library/BSgenome/extdata/ce2chrX.fa.gz",
        "Caenorhabditis elegans, chromosome X of ce2, 17.7 Mb",
    ),
    "human-x": Genome(
        packages.SMALT, "usr/share/doc/smalt/test/data/hs37chrXtrunc.fa.gz",
        "Homo sapiens, the first 70 Mb of chromosome X of GRCh37, 66.2 Mb of them known",
    ),
}  # fmt: skip
assert set(GENOMES) == set(get_args(GenomeName))
