import click

from titans_pt.commands import COMPLETION

SECTION = "tools"


@click.command()
@click.argument("shell", metavar="SHELL", type=click.Choice(("bash", "zsh", "fish")), help="bash, zsh or fish")
@click.pass_context
def completion(context: click.Context, shell: str):
    """Print the script that completes titans commands in a shell.

    \b
    bash, in ~/.bashrc:                   eval "$(titans completion bash)"
    zsh, in ~/.zshrc:                     eval "$(titans completion zsh)"
    fish, in ~/.config/fish/config.fish:  titans completion fish | source
    """
    from click.shell_completion import get_completion_class

    script = get_completion_class(shell)
    assert script is not None  # click has all shells that the option allows
    click.echo(script(context.find_root().command, {}, "titans", COMPLETION).source())
