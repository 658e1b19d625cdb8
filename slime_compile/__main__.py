"""Check this machine, show the operators fused in a function, or estimate its peak memory.

Each command has its own `--help`.
"""

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
    parser = argparse.ArgumentParser(prog="slime-compile", description=__doc__)
    parser.add_argument("--version", action="version", version=f"slime_compile {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    doctors = "check this machine; include the output in bug reports"
    commands.add_parser("doctor", help=doctors, description=doctors)
    runs = {
        "explain": commands.add_parser(
            "explain", help="a dry run: the report of a function, without computing anything"
        ),
        "estimate": commands.add_parser(
            "estimate", help="a dry run: the peak memory of a function, without allocating it"
        ),
    }
    given = list(sys.argv[1:] if argv is None else argv)
    name = given[0] if given else ""
    if name not in runs:
        parser.parse_args(given)
        return doctor()
    from slime_compile.dry_run import command  # imports torch

    runs[name].description = command.__doc__
    runs[name].formatter_class = argparse.RawDescriptionHelpFormatter
    command.add_arguments(runs[name], estimates=name == "estimate")
    try:
        return command.run(parser.parse_args(given))
    except command.Refused as refused:
        print(f"slime_compile {name}: {refused}", file=sys.stderr)
        raise


if __name__ == "__main__":
    sys.exit(main())
