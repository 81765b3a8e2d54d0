"""The program's commands, and command lines that are parsed but not run."""

import click

from titans_pt.cli import program


def parsed(*words: str) -> dict:
    """Parameter values that the command named at the beginning of ``words`` would get.

    Raises:
        click.UsageError: the program would refuse these words.
    """
    command, context, rest = program, None, list(words)
    while isinstance(command, click.Group):
        context = click.Context(command, parent=context, **command.context_settings)
        command = command.commands[rest.pop(0)]
    return command.make_context(command.name, rest, parent=context).params


def leaves(command: click.Command = program, words: tuple[str, ...] = ()):
    """Yield (words, command) for a command, or for every command of a group."""
    if isinstance(command, click.Group):
        for name, part in command.commands.items():
            yield from leaves(part, (*words, name))
    else:
        yield words, command
