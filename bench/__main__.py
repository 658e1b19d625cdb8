"""`python -m bench [memory|estimate|speed|tp|lm_head|partial|compile|holders|readme]`; without: README.md's table."""

import argparse
import os
import sys
from pathlib import Path

from bench.cases.losses import SPELLINGS
from bench.commands import compile as first_compile
from bench.commands import estimate, holders, lm_head, loss, memory, partial, readme, speed, tp
from bench.measure.cells import RESULTS

COMMANDS = {
    "table": (loss.main, "the seeds' loss before and after: memory, time, error"),
    "memory": (memory.main, "the tables of slime#2011, re-made"),
    "estimate": (estimate.main, "estimated peaks beside the measured ones"),
    "speed": (speed.main, "forward and backward beside peers"),
    "tp": (tp.main, "vocabulary shards: per rank, TP = 1, 2, 4"),
    "lm_head": (lm_head.main, "logits that a matmul makes, beside peers: memory, time, error"),
    "partial": (partial.main, "losses that are fused in part, beside inductor: memory, time"),
    "compile": (first_compile.main, "what the passes add to a first compile, and how it grows"),
    "holders": (holders.main, "who holds the logits in real trainers while backward runs"),
    "readme": (readme.main, "put the tables into the documents"),
}


def main() -> None:
    listed = "\n".join(f"  {name:10} {text}" for name, (_, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        "python -m bench",
        epilog=f"commands:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", nargs="?", choices=COMMANDS, default="table")
    parser.add_argument("--out", type=Path, default=RESULTS, help="for JSON, tables and pictures")
    parser.add_argument("--resume", action="store_true", help="keep the cells that are finished")
    parser.add_argument("--jobs", type=int, default=2, help="cells of memory at a time (table)")
    parser.add_argument("--seconds", type=float, default=8, help="for the rounds of a case")
    parser.add_argument("--minutes", type=float, default=60, help="no cell starts after that")
    parser.add_argument("--spelling", choices=SPELLINGS, default="megatron", help="(table)")
    parser.add_argument(
        "--device", choices=["own", "stand-in"], default="own",
        help="stand-in: for CUDA's, no GPU; kernels do nothing, at full size (memory)",
    )  # fmt: skip
    options = parser.parse_args()
    if options.device == "stand-in":
        _on_standin(parser, options.command)
    COMMANDS[options.command][0](options)


def _on_standin(parser: argparse.ArgumentParser, command: str) -> None:
    """Goes on in this process's place where torch finds the stand-in; returns if it is there."""
    if command != "memory":
        parser.error("--device stand-in measures memory, and nothing else")
    if "STANDIN" not in os.environ:
        there = [sys.executable, "-m", "tests.cuda.standin", "--no-kernels", sys.executable]
        os.execv(sys.executable, [*there, "-m", "bench", *sys.argv[1:]])


if __name__ == "__main__":
    main()
