"""One walk over the joint graph: every node as a form, and the new nodes for values leaving the algebra.

context.py      what a rule may use                  results.py    what a rule answers
roots.py        logits and their moved rows          walk.py       the walk itself
row_scalars.py  numbers per row as polynomials       account.py    what stands in for what
statistics.py   row statistics, once per root        verdict.py    whether a root pays
columns.py      values at a column                   gradient.py   full-vocabulary values that leave
"""
