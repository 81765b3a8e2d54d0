"""The program's commands, and command lines that are parsed but not run."""

import click

from titans_pt.cli import program


def parsed(*words: str) -> dict:
    """The values that the command named first in ``words`` would get.

    Raises:
        click.UsageError: what the program would refuse.
    """
    command, context, rest = program, None, list(words)
    while isinstance(command, click.Group):
        context = click.Context(command, parent=context, **command.context_settings)
        command = command.commands[rest.pop(0)]
    return command.make_context(command.name, rest, parent=context).params


def leaves(command: click.Command = program, words: tuple[str, ...] = ()):
    """(words, command) of a command, or of every command of a group."""
    if isinstance(command, click.Group):
        for name, part in command.commands.items():
            yield from leaves(part, (*words, name))
    else:
        yield words, command
