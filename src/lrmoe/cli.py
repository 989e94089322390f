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
from io import TextIOWrapper
from types import ModuleType
from typing import Any, NoReturn

import lrmoe
from lrmoe.commands import balance, compare, doctor, plan, pressure, report, study, train
from lrmoe.commands.run_options import EXTRA
from lrmoe.commands.spelling import as_options

_VERBS: Mapping[str, tuple[ModuleType, str]] = {
    "train": (train, "Train a model and write a run folder."),
    "compare": (compare, "Train variants from the same weights on the same data, and compare them."),
    "report": (report, "Write report.html again from the records of a run folder, or an index of a folder of them."),
    "balance": (balance, "Plan loads under each balancing policy, or play a run to them."),
    "plan": (
        plan,
        "Say what of a model fits on a cluster, under which policy, slots, drop and save mode, and how fast.",
    ),
    "pressure": (
        pressure,
        "Grow the batch under a hard memory budget, and see what completes under each policy.",
    ),
    "study": (
        study,
        "Ask whether the loss holds: which pairs, how many, when; for the models here or for one of yours.",
    ),
    "doctor": (doctor, "Check the installation, and that a model's experts learn under recalibration."),
}
_CONTINUE = {
    "train": "; continue with --resume",
    "compare": "; continue with --resume",
    "study": "; give the same command again to continue",
}


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A name or a sign that the terminal cannot show must not end a run that has done its work.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # Torch says so of a wheel beside which there is no NumPy. What needs NumPy here says it by itself.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
    try:
        try:
            return _main(argv)
        finally:
            # Here it can be told that nobody reads any more; at the interpreter's end it would be an error.
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _main(argv: Sequence[str] | None) -> int:
    parser, by_verb = parsers()
    verb, options = "", {}
    try:
        given = vars(parser.parse_args(argv))
        verb = given.pop("verb")
        module = _VERBS[verb][0]
        options = _options(by_verb[verb], given, getattr(module, "ALIASES", {}))
        code: int = module.run(given)
        return code
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRA:
            raise
        return _fail(verb, f'this command needs {error.name}: in a clone of LRMoE, pip install -e ".[train]"')
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        return _fail(verb, as_options(str(error), options))
    except RuntimeError as error:
        from lrmoe.training.launch import in_a_line

        if (message := in_a_line(error)) is None:
            raise
        _fail(verb, message)
        return 1
    except KeyboardInterrupt:
        print(f"{_name(verb)}: interrupted{_CONTINUE.get(verb, '')}", file=sys.stderr)
        return 130


def _name(verb: str) -> str:
    return f"lrmoe {verb}".rstrip()


def _fail(verb: str, message: str) -> int:
    # One line whatever a name or a library's message holds.
    print(f"{_name(verb)}: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """That of the command, and those of its verbs."""
    parser = _Parser(prog="lrmoe", description="Train mixture-of-experts models with a recalibrated backward.")
    parser.add_argument("--version", action="version", version=f"lrmoe {lrmoe.__version__}")
    verbs = parser.add_subparsers(title="commands", dest="verb", required=True, metavar="COMMAND")
    by_verb: dict[str, argparse.ArgumentParser] = {}
    for name, (module, text) in _VERBS.items():
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
