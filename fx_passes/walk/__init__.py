"""One walk over the joint graph: every node as a form, and the new nodes for values leaving the algebra.

context.py      the interface of the walk to rules      results.py    the types of a rule's answer
roots.py        logits and their moved rows             walk.py       the walk itself
row_scalars.py  numbers per row as polynomials          account.py    replacements and refusals
statistics.py   row statistics, once per root           verdict.py    whether a root pays
columns.py      values at a column                      gradient.py   full-vocabulary values leaving the algebra
"""
