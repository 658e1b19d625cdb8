"""`python -m bench [memory|estimate|speed|tp|lm_head|partial|rows|compile|holders|readme]`; without: a short table."""

import argparse
import os
import sys
from pathlib import Path

from bench.cases.losses import SPELLINGS
from bench.commands import compile as first_compile
from bench.commands import estimate, holders, lm_head, loss, memory, partial, readme, speed, tp
from bench.measure.cells import RESULTS

COMMANDS = {
    "short": (loss.short, "slime's policy loss in float32, beside eager and inductor: two minutes"),
    "table": (loss.main, "the whole table of it: memory, time, error, also in bfloat16"),
    "memory": (memory.main, "the tables of slime#2011, re-made"),
    "estimate": (estimate.main, "estimated peaks beside the measured ones"),
    "speed": (speed.main, "forward and backward beside other packages"),
    "tp": (tp.main, "vocabulary shards: per rank, TP = 1, 2, 4"),
    "lm_head": (lm_head.main, "heads, beside other packages: memory, time, error"),
    "partial": (partial.main, "partly fused losses, beside inductor: memory, time"),
    "rows": (partial.rows, "any loss that works row by row, beside inductor: memory, time"),
    "compile": (first_compile.main, "the passes' share of a first compile, by graph size"),
    "holders": (holders.main, "references to the logits in real trainers during backward"),
    "readme": (readme.main, "put the tables into the documents"),
}


def main() -> None:
    listed = "\n".join(f"  {name:10} {text}" for name, (_, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        "python -m bench",
        epilog=f"commands:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", nargs="?", choices=COMMANDS, default="short")
    parser.add_argument("--out", type=Path, default=RESULTS, help="for JSON, tables and pictures")
    parser.add_argument("--resume", action="store_true", help="keep finished cells of this machine")
    parser.add_argument("--jobs", type=int, default=2, help="memory cells at a time (short, table)")
    parser.add_argument("--seconds", type=float, default=8, help="seconds of rounds per case")
    parser.add_argument("--minutes", type=float, default=60, help="start no cell later than this")
    parser.add_argument("--spelling", choices=SPELLINGS, default="megatron", help="(short, table)")
    parser.add_argument("--match", default="", help="losses with this in their names (rows)")
    parser.add_argument(
        "--device", choices=["own", "stand-in"], default="own",
        help="stand-in: torch's CUDA build without a GPU; kernels do nothing, full size (memory)",
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
