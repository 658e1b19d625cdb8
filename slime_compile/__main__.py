"""Check this machine, or show what the backend fuses in a function. Each command has its own `--help`."""

import argparse
import sys
from collections.abc import Sequence

from slime_compile.doctor import doctor
from slime_compile.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 1 if the doctor found a problem.

    Raises:
        SystemExit: 2, if the arguments are unusable.
    """
    parser = argparse.ArgumentParser(prog="python -m slime_compile", description=__doc__)
    parser.add_argument("--version", action="version", version=f"slime_compile {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="check this machine; include the output in bug reports")
    explaining = commands.add_parser(
        "explain", help="a dry run: the report of a function, without computing anything"
    )
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] != ["explain"]:
        parser.parse_args(given)
        return doctor()
    from slime_compile.dry_run import command  # imports torch

    explaining.description = command.__doc__
    explaining.formatter_class = argparse.RawDescriptionHelpFormatter
    command.add_arguments(explaining)
    try:
        return command.run(parser.parse_args(given))
    except command.Refused as refused:
        print(f"slime_compile explain: {refused}", file=sys.stderr)
        raise


if __name__ == "__main__":
    sys.exit(main())
