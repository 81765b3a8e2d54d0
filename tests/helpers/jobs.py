"""Several trainings in one process per rank, since starting a process takes seconds.

    tests.helpers.jobs CONFIG FOLDER --NAME [KEY=VALUE ...] --NAME ...

Each trains in the folder FOLDER/NAME; --NAME@1 and --NAME@2 are two trainings in the same folder.
"""

import sys
from contextlib import nullcontext

from titans_pt.config.files import load_config
from titans_pt.training import engine, loop
from titans_pt.training.ranks import process_group


def main(config: str, folder: str, *words: str):
    jobs: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            jobs[name := word[2:]] = []
        else:
            jobs[name].append(word)
    shard_everything()
    with process_group() as ranks:
        loop.process_group = lambda timeout: nullcontext(ranks)
        for name, overrides in jobs.items():
            loop.train(load_config(config, [f"run.dir={folder}/{name.partition('@')[0]}", *overrides]))


def shard_everything():
    """Make ZeRO 3 shard small parameters; by default it keeps them whole, and a tiny model is never sharded."""
    derived = engine.deepspeed_config

    def all_sharded(*args):
        settings = derived(*args)
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return settings

    engine.deepspeed_config = all_sharded


if __name__ == "__main__":
    main(*sys.argv[1:])
