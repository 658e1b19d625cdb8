"""Reports: fused operators, refusals and their reasons.

    values    Report and its parts
    text      a report's dict as text
    page      the same as HTML
    terminal  the same with rich's tables
    places    short paths of files, notebook cells by number
    record    one graph during compilation
    aside     graphs without our operators, in files next to torch's compile cache
    process   all graphs this process has compiled or loaded from torch's compile cache: `reports`, `summary`

`text` reads plain values, `values` calls `text`, `page` and `terminal`; no file of this folder imports the names below.
"""

from slime_compile.report.process import reports, summary
from slime_compile.report.values import Report

__all__ = ["Report", "reports", "summary"]
