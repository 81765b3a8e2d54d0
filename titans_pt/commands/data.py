import click

from titans_pt.commands._arguments import data_settings, whole

SECTION = "data"


@click.group(no_args_is_help=False)
def data():
    """Inspect token files."""


@data.command()
@data_settings
@click.option("--documents", type=whole(0), default=3, metavar="K", help="documents to show per stream")
@click.option("--verify", is_flag=True, help="compare the token files with their checksums")
@click.option("--sample", type=whole(0), metavar="N", help="show the training sample at position N, counted from 0")
@click.option("--step", type=whole(1), metavar="S", help="show the samples of training step S; not with --sample")
@click.option("--count", type=whole(1), metavar="K", help="number of samples with --sample (default: 1)")
def inspect(config, documents: int, verify: bool, sample: int | None, step: int | None, count: int | None):
    """Show documents, tokens, lengths, and the content of samples."""
    if sample is not None and step is not None:
        raise click.UsageError("--sample and --step exclude each other; leave one out.")
    if count is not None and sample is None:
        raise click.UsageError("--count is a number of samples from --sample on; give --sample, or leave --count out.")
    from titans_pt.config.checks import checked, import_modules
    from titans_pt.data_pipeline.inspection import inspect_data
    from titans_pt.errors import UserError
    from titans_pt.tasks import TASKS, task_of
    from titans_pt.tasks.answers import AnswersOnly
    from titans_pt.tasks.language import Language

    import_modules(config.run.imports)
    kind = TASKS.find(config.task)
    if not issubclass(kind, Language):
        raise UserError(
            f"task: given {config.task!r}, which reads no token files to inspect; name a config of task=language"
        )

    def opened():
        return task_of(checked(config)).open().train

    only = opened if issubclass(kind, AnswersOnly) else None
    inspect_data(config, sample, step, count or 1, documents, verify, only)
