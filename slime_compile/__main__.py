"""`python -m slime_compile doctor | explain FILE.py:FUNCTION`; `--help` after each says more."""

import argparse
import sys
from collections.abc import Sequence

from slime_compile.doctor import doctor
from slime_compile.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 1 where the doctor found something that must be mended.

    Raises:
        SystemExit: 2, where what was given cannot be used.
    """
    parser = argparse.ArgumentParser(prog="python -m slime_compile", description=__doc__)
    parser.add_argument("--version", action="version", version=f"slime_compile {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="is this machine ready? paste its output into issues")
    explaining = commands.add_parser("explain", help="what would be fused, as a dry run")
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
