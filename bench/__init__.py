"""Measurements: `python -m bench` makes the table of README.md; the protocol is in bench/README.md."""
