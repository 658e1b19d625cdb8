"""Which regions have run: an operator's `region` argument, counted when it is called.

A region's text is part of the generated code, so it also comes out of a warm compile cache, where no pass runs: see
NOTE [How a report survives the compile cache].
"""

seen_regions: dict[str, int] = {}
"""Calls of each named region in this process."""


def on_call(region: str) -> None:
    """Counts one call of `region`; the empty string is no region."""
    if region:
        seen_regions[region] = seen_regions.get(region, 0) + 1
