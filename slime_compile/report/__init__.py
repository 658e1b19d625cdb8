"""What was fused, what was not and why.

    values    Report, and what it holds
    text      a report's dict as text that a person reads
    record    one graph while it is compiled
    unfused   what was refused, where torch's compile cache has no operator of ours to tell it
    process   everything that this process has compiled or loaded from torch's compile cache: `reports`, `summary`

`text` reads plain values, `values` calls `text`; no file of this folder imports the names below.
"""

from slime_compile.report.process import reports, summary
from slime_compile.report.values import Report

__all__ = ["Report", "reports", "summary"]
