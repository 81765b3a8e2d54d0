import json

import click

from titans_pt.commands._arguments import config_name, overrides

SECTION = "tools"


def _print_schema(context: click.Context, _parameter: click.Parameter, value: bool):
    if value and not context.resilient_parsing:
        from titans_pt.config.docs import json_schema

        click.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))
        context.exit()


@click.command()
@config_name
@overrides()
@click.option(
    "--schema", is_flag=True, is_eager=True, expose_value=False, callback=_print_schema,
    help="print the JSON schema of all settings for editors; needs no CONFIG",
)  # fmt: skip
def config(config: str, overrides: tuple[str, ...]):
    """Print the resolved settings as YAML, with the source of each value."""
    from titans_pt.config.files import explained

    click.echo(explained(config, overrides), nl=False)
