"""Settings: plain data, validated, read from YAML and documented. Modules here do not import torch.

The settings tree and its sections are exported: ``from titans_pt.config import Config, Section``.
"""

from titans_pt.config.data import (
    DataConfig,
    GenomeName,
    SourceConfig,
    TokenizerConfig,
)
from titans_pt.config.evaluation import (
    NEEDLE_TASKS,
    BabilongConfig,
    EvaluationConfig,
    HarnessConfig,
    NeedleConfig,
    NeedlesInNoiseConfig,
    PerplexityConfig,
    RecallConfig,
)
from titans_pt.config.fields import (
    PATH,
    Fraction,
    NonNegative,
    NoSettings,
    Once,
    PathName,
    Positive,
    Section,
    Seed,
)
from titans_pt.config.model import (
    FORMER_NAMES,
    AttentionConfig,
    CachingConfig,
    HierarchyConfig,
    LoraConfig,
    MemoryConfig,
    ModelConfig,
    ReadCachingConfig,
    RopeScaling,
    with_todays_names,
)
from titans_pt.config.train import (
    ParallelConfig,
    TrainConfig,
)
from titans_pt.config.tree import (
    Config,
    RunConfig,
    WandbConfig,
    config_hash,
)

__all__ = [
    "FORMER_NAMES",
    "NEEDLE_TASKS",
    "PATH",
    "AttentionConfig",
    "BabilongConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "Fraction",
    "GenomeName",
    "HarnessConfig",
    "CachingConfig",
    "HierarchyConfig",
    "LoraConfig",
    "MemoryConfig",
    "ModelConfig",
    "NeedleConfig",
    "NeedlesInNoiseConfig",
    "NonNegative",
    "Once",
    "ParallelConfig",
    "PathName",
    "PerplexityConfig",
    "Positive",
    "ReadCachingConfig",
    "RecallConfig",
    "RopeScaling",
    "RunConfig",
    "NoSettings",
    "Section",
    "Seed",
    "SourceConfig",
    "TokenizerConfig",
    "TrainConfig",
    "WandbConfig",
    "config_hash",
    "with_todays_names",
]
