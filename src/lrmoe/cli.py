"""The ``lrmoe`` command: one module of :mod:`lrmoe.commands` a verb. Exit codes: 0 done, 1 ran and found a fault, 2 bad
input, 130 interrupted, 141 nobody reads the output any more.

Nothing here, and nothing that a verb imports before it runs, needs torch: help and what is wrong with the arguments
are told at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from typing import Any, NoReturn, Protocol

import lrmoe
from lrmoe import moved
from lrmoe.commands import balance, compare, doctor, plan, report, study, train
from lrmoe.commands.run_options import EXTRA
from lrmoe.commands.spelling import as_options


class Verb(Protocol):
    """A module of :mod:`lrmoe.commands`, or whatever else has its functions. ``ALIASES``, if it has them, are settings
    that have another one's option."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Its options."""

    def run(self, given: dict[str, Any]) -> int:
        """Carries it out, and returns the exit code. ``given`` is what was typed, by setting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A command line.

    Attributes:
        name: what is typed before the verb.
        description: of the help.
        verbs: by name, each with a line of help.
        go_on: by verb, how one that was interrupted is continued.
        moved: by a verb that was here once, a sentence on where it is now.
    """

    name: str
    description: str
    verbs: Mapping[str, tuple[Verb, str]]
    go_on: Mapping[str, str]
    moved: Mapping[str, str]

    def command(self, verb: str) -> str:
        """What is typed; without a verb the program's name."""
        return f"{self.name} {verb}".rstrip()


SAME_AGAIN = "; give the same command again to continue"
_VERBS: Mapping[str, tuple[Verb, str]] = {
    "train": (train, "Train a model and write a run folder."),
    "compare": (compare, "Train variants from the same weights on the same data, and compare them."),
    "report": (report, "Write report.html again from the records of a run folder, or an index of a folder of them."),
    "balance": (balance, "Plan loads under each balancing policy, or play a run to them."),
    "plan": (
        plan,
        "Say what of a model fits on a cluster, under which policy, slots, drop and save mode, and how fast.",
    ),
    "study": (
        study,
        "Ask whether the loss holds: which pairs, how many, when; for the models here or for one of yours.",
    ),
    "doctor": (doctor, "Check the installation, and that a model's experts learn under recalibration."),
}
LRMOE = Program(
    name="lrmoe",
    description="Train mixture-of-experts models with a recalibrated backward.",
    verbs=_VERBS,
    go_on={"train": "; continue with --resume", "compare": "; continue with --resume", "study": SAME_AGAIN},
    moved={verb: moved.where(f"lrmoe {verb}", verb) for verb in moved.VERBS},
)


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def main(argv: Sequence[str] | None = None, program: Program = LRMOE) -> int:
    """Runs the command line and returns the exit code.

    Args:
        argv: what was typed; default: what this process was started with.
        program: whose command line.
    """
    for stream in (sys.stdout, sys.stderr):
        # A name or a sign that the terminal cannot show must not end a run that has done its work.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # Torch says so of a wheel beside which there is no NumPy. What needs NumPy here says it by itself.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
    try:
        try:
            return _main(sys.argv[1:] if argv is None else argv, program)
        finally:
            # Here it can be told that nobody reads any more; at the interpreter's end it would be an error.
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _main(argv: Sequence[str], program: Program) -> int:
    if argv and argv[0] in program.moved:
        return _fail(program.name, program.moved[argv[0]])
    parser, by_verb = parsers(program)
    verb, options = "", {}
    try:
        given = vars(parser.parse_args(argv))
        verb = given.pop("verb")
        module = program.verbs[verb][0]
        options = _options(by_verb[verb], given, getattr(module, "ALIASES", {}))
        return module.run(given)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRA:
            raise
        return _fail(
            program.command(verb), f'this command needs {error.name}: in a clone of LRMoE, pip install -e ".[train]"'
        )
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        return _fail(program.command(verb), as_options(str(error), options))
    except RuntimeError as error:
        from lrmoe.training.launch import in_a_line

        if (message := in_a_line(error)) is None:
            raise
        _fail(program.command(verb), message)
        return 1
    except KeyboardInterrupt:
        print(f"{program.command(verb)}: interrupted{program.go_on.get(verb, '')}", file=sys.stderr)
        return 130


def _fail(command: str, message: str) -> int:
    # One line whatever a name or a library's message holds.
    print(f"{command}: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def parsers(program: Program = LRMOE) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """That of the command, and those of its verbs."""
    parser = _Parser(prog=program.name, description=program.description)
    parser.add_argument("--version", action="version", version=f"lrmoe {lrmoe.__version__}")
    verbs = parser.add_subparsers(title="commands", dest="verb", required=True, metavar="COMMAND")
    by_verb: dict[str, argparse.ArgumentParser] = {}
    for name, (module, text) in program.verbs.items():
        by_verb[name] = verbs.add_parser(name, help=text, description=text, argument_default=argparse.SUPPRESS)
        module.add_options(by_verb[name])
    return parser, by_verb


def _options(parser: argparse.ArgumentParser, given: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, str]:
    """For each setting the option that gives it.

    Args:
        parser: of the verb.
        given: what was typed.
        aliases: settings that have another one's option: where they have none, or where that one was typed.
    """
    options = {action.dest: action.option_strings[-1] for action in parser._actions if action.option_strings}
    for field, other in aliases.items():
        if field not in options or other in given:
            options[field] = options[other]
    return options


if __name__ == "__main__":
    sys.exit(main())
