"""Breaks one precondition at a time, and asks the tests whether they see it: `make mutants`.

Each mutant is one exact replacement in one file of a temporary copy of the packages, and the tests that should fail for
it. Killed: a test fails. Survived: they all pass, so that nothing holds the precondition. The list is written by hand,
what a person could forget to check: in the rules, the packer, the collectives and the in-place checks, when a graph is
compiled and when it runs. It is data, and longer than a file should be. `python tests/mutants.py NAME ...` runs some of
them; `--workers N` several at a time. Nothing is run without a mutant: that is `make test`, which has to pass before.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
COPIED = ("fx_passes", "slime_compile", "tests", "bench", "pyproject.toml")
SECONDS = 600  # a mutant that makes a walk endless is killed, too

FX = "tests/fx_passes/"


@dataclass(frozen=True)
class Mutant:
    """`old` stands once in `file`, seen from fx_passes/, and becomes `new`; `tests` are pytest's arguments."""

    name: str
    file: str
    tests: str
    old: str
    new: str

    @property
    def arguments(self) -> list[str]:
        file, *chosen = self.tests.split(" ", 1)
        return [FX + file, *(["-k", chosen[0]] if chosen else [])]

    def applied(self, text: str) -> str:
        """The file's text with the mutation.

        Raises:
            ValueError: `old` does not stand there exactly once.
        """
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: {self.old!r} must stand once in {self.file}, stands {text.count(self.old)} times"
            )
        return text.replace(self.old, self.new)


# fmt: off
# name, file, pytest's file and -k, the text, what it becomes
MUTANTS = [
    Mutant(*fields)
    for fields in (
        (
            "forms over two logits are added", "algebra/arithmetic.py", "test_near_misses.py (left_as or torchs_own or beside) and (expected_reward or forward_kl or two)",
            "if left.x is not None and right.x is not None and left.x is not right.x:",
            "if False:",
        ),
        (
            "forms with the vocabulary elsewhere are added", "algebra/arithmetic.py", "test_small_programs.py right and (transpose or dimensions)",
            "    if left.vdim != right.vdim:",
            "    if False:",
        ),
        (
            "numbers among themselves are tensors", "walk/row_nodes.py", "test_spellings.py numbers_of_dynamic",
            "target if tensors else _OF_NUMBERS[target]",
            "target",
        ),
        (
            "numbers are rounded before they are multiplied", "walk/row_nodes.py", "walk/test_row_scalars.py wider",
            "self._summands(poly, self._widest(poly, dtype))",
            "self._summands(poly, dtype)",
        ),
        (
            "numbers are multiplied before what comes in", "walk/row_nodes.py", "test_small_programs.py overflows",
            "key=lambda each: not is_backward(each[0]))",
            "key=lambda each: False)",
        ),
        (
            "one-hot terms are not scaled", "algebra/arithmetic.py", "test_spellings.py test_spelling and fp32 and (smoothed or label_smoothing or one_hot or temperature_per_token)",
            "hots=tuple(replace(t, weight=t.weight * factor) for t in form.hots),",
            "hots=form.hots,",
        ),
        (
            "b of an exponential is not scaled", "algebra/arithmetic.py", "test_spellings.py test_spelling and fp32 and (entropy_coefficient_zero or entropy_as_given or entropy_cast_back or two_temperatures or group_policy_loss or jensen)",
            "exps=tuple(Exp(t.scale, t.shift, t.a * factor, t.b * factor, t.extent) for t in form.exps),",
            "exps=tuple(Exp(t.scale, t.shift, t.a * factor, t.b, t.extent) for t in form.exps),",
        ),
        (
            "a value beside is not scaled", "algebra/arithmetic.py", "test_small_programs.py right and (another_use)",
            "others=tuple((node, weight * factor) for node, weight in form.others),",
            "others=form.others,",
        ),
        (
            "terms of other scales are merged", "algebra/arithmetic.py", "test_small_programs.py right and (two_scales)",
            "if other.scale == term.scale and other.shift == term.shift:",
            "if other.shift == term.shift:",
        ),
        (
            "terms of other shifts are merged", "algebra/arithmetic.py", "test_small_programs.py right and (two_shifts or a_given_shift)",
            "if other.scale == term.scale and other.shift == term.shift:",
            "if other.scale == term.scale:",
        ),
        (
            "columns of other indices are merged", "algebra/arithmetic.py", "test_small_programs.py right and (two_targets or two_columns_of or another_target)",
            "        if other.index == hot.index:",
            "        if True:",
        ),
        (
            "rows that overlap are overlaid", "algebra/arithmetic.py", "algebra/test_arithmetic.py terms",
            "if other.extent and term.extent and other.extent.disjoint(term.extent):",
            "if other.extent and term.extent:",
        ),
        (
            "a part of one side need not be zero on the other's rows", "algebra/arithmetic.py", "algebra/test_arithmetic.py terms",
            "if (x is None or y is None) and not any(",
            "if False and not any(",
        ),
        (
            "columns are joined where neither is zero outside", "algebra/arithmetic.py", "test_small_programs.py right and (targets_of_some)",
            "        if apart and all(node in zero_outside for node in other.index + hot.index):",
            "        if apart:",
        ),
        (
            "a square of the logits is no reason to refuse", "algebra/arithmetic.py", "test_soundness.py square or squared",
            "    if not left.f.is_zero and not right.f.is_zero:",
            "    if False:",
        ),
        (
            "an exponential times the logits forgets the scale", "algebra/arithmetic.py", "test_spellings.py test_spelling and fp32 and (two_temperatures or temperature_number or entropy_expected or group_policy)",
            "b = b + term.a * factor",
            "b = b + term.a * affine_side.f",
        ),
        (
            "a softmax times two factors of logits", "algebra/arithmetic.py", "test_small_programs.py right and (times_log)",
            "            if not term.b.is_zero:",
            "            if False:",
        ),
        (
            "a scale of zero is divided by", "algebra/poly.py", "test_soundness.py zero_factor",
            "return None if below & above else result",
            "return result",
        ),
        (
            "a product in another dimension", "algebra/arithmetic.py", "test_soundness.py counting",
            'raise Refused("the operands keep the vocabulary in different dimensions")',
            "pass",
        ),
        (
            "a product of two softmaxes", "algebra/arithmetic.py", "test_refusals.py softmaxes",
            "    if left.exps and right.exps:",
            "    if False:",
        ),
        (
            "a clamped value is added", "algebra/arithmetic.py", "test_small_programs.py right and (beside_a_softmax)",
            "        if one.clamped and not two.is_row:",
            "        if False:",
        ),
        (
            "a softmax over itself is one everywhere", "algebra/arithmetic.py", "test_zero_softmax.py",
            'f=b * term.scale, beside=softmax)',
            'f=b * term.scale)',
        ),
        (
            "an exponential over another's is one", "algebra/arithmetic.py", "test_small_programs.py right and over_another",
            "    base = join(form, divisor)",
            "    base = form.with_(exps=())",
        ),
        (
            "beside one softmax is beside all", "algebra/arithmetic.py", "test_zero_softmax.py",
            '    return form.is_exp and all((term.scale, term.shift) == softmax for term in form.exps)',
            '    return form.is_exp',
        ),
        (
            "two softmaxes are zero at once", "algebra/arithmetic.py", "test_zero_softmax.py",
            '    if left.beside is not None and right.beside is not None and left.beside != right.beside:',
            '    if False:',
        ),
        (
            "a sum forgets beside what it is known", "algebra/arithmetic.py", "test_zero_softmax.py",
            '        clamped=left.clamped or right.clamped,\n        beside=beside,',
            '        clamped=left.clamped or right.clamped,',
        ),
        (
            "a product forgets beside what it is known", "algebra/arithmetic.py", "test_zero_softmax.py",
            '        f=left.e * right.f + left.f * right.e,\n        beside=beside,',
            '        f=left.e * right.f + left.f * right.e,',
        ),
        (
            "a value beside a softmax is a number per row", "algebra/forms.py", "test_zero_softmax.py",
            'return self.is_affine and self.f.is_zero and self.beside is None',
            'return self.is_affine and self.f.is_zero',
        ),
        (
            "a value beside a softmax is an exponential", "algebra/forms.py", "test_zero_softmax.py",
            'return bool(self.exps) and not self.hots and plain and self.beside is None',
            'return bool(self.exps) and not self.hots and plain',
        ),
        (
            "what is lost beside a larger number is known", "rules/two_numbers.py", "rules/test_two_numbers.py",
            '    if lost or not all(',
            '    if not all(',
        ),
        (
            "any number is exact in half precision", "rules/two_numbers.py", "rules/test_two_numbers.py",
            '    return number == 0 or limits.tiny <= abs(number) <= limits.max',
            '    return True',
        ),
        (
            "a number per row is a flag", "rules/two_numbers.py", "rules/test_two_numbers.py",
            '        if not (_is_one_column(operand, column) and all(map(_is_flag, flags))):',
            '        if not _is_one_column(operand, column):',
        ),
        (
            "several columns are one", "rules/two_numbers.py", "rules/test_two_numbers.py",
            '    return plain and all(same(shape_of(index)[form.vdim], 1) for index in hot.index)',
            '    return plain',
        ),
        (
            "a row without a column has one", "rules/two_numbers.py", "rules/test_two_numbers.py",
            '        index = c.emitter.where(missed, c.emitter.full([], -1, torch.int64, index), index)',
            '        pass',
        ),
        (
            "the logarithm of zero is a number", "rules/pointwise.py", "rules/test_two_numbers.py",
            '    if numbers is not None and min(numbers.elsewhere, numbers.there) > 0:',
            '    if numbers is not None and numbers.there > 0:',
        ),
        (
            "one number is compared as another", "rules/guards.py", "test_spellings.py one_hot_as_a_mask",
            "            return compared_with(c, node, numbers, number)",
            "            return compared_with(c, node, numbers, number - 1)",
        ),
        (
            "other columns are the column", "rules/guards.py", "test_spellings.py others_filled",
            "    return found.invert() if isinstance(found, Mask) else found",
            "    return found",
        ),
        (
            "what is copied has no offset", "graph/operators.py", "walk/test_row_differences.py parts",
            "SHOWN: set[Target] = VIEWS | SAME_VALUE",
            "SHOWN: set[Target] = VIEWS",
        ),
        (
            "a rank alone exchanges", "walk/exchange.py", "test_vocabulary_parallel.py offset",
            "    if ranks_of(group) == 1:",
            "    if False:",
        ),
        (
            "any number is compared as zero", "rules/guards.py", "rules/test_two_numbers.py",
            '        exact = number == 0 or are_integers(node.args[0])',
            '        exact = True',
        ),
        (
            "what others see is handed over", "writable.py", "../backend/test_writable.py",
            'taken = [node for node in graph.nodes if node in donated and _pays(node)]',
            'taken = [node for node in graph.nodes if _pays(node)]',
        ),
        (
            "what an operator of ours reads is handed over", "writable.py", "../backend/test_writable.py",
            '    return not ours and any(map(is_elementwise, readers))',
            '    return any(map(is_elementwise, readers))',
        ),
        (
            "a view's readers are not seen", "writable.py", "../backend/test_writable.py",
            '        waiting += [user for user in users if user.target in VIEWS]',
            '        pass',
        ),
        (
            "a retained graph is written over", "../slime_compile/ops/operators.py", "../backend/test_writable.py",
            '    again = holders.keeps_graph() or _is_recorded(x)',
            '    again = _is_recorded(x)',
        ),
        (
            "pieces in any order are the whole", "rules/row_scalars.py", "rules/test_row_scalars.py",
            '        if spread or [start for start, _ in ends] != [reached]:',
            '        if spread or len(ends) != 1:',
        ),
        (
            "some of the pieces are the whole", "rules/row_scalars.py", "rules/test_row_scalars.py",
            '    if others or any(rank_of(a)',
            '    if others and any(rank_of(a)',
        ),
        (
            "every other row is all rows", "rules/row_scalars.py", "rules/test_row_scalars.py",
            ' and where[2:] in ([], [1])',
            '',
        ),
        (
            "infinite is -inf", "rules/guards.py", "test_zero_softmax.py",
            '    return form.e == -c.stats(form, form.f).logsumexp',
            '    return True',
        ),
        (
            "a softmax over a masked one", "rules/pointwise.py", "test_zero_softmax.py",
            '    _check_unmasked(c, divisor)\n    return same',
            '    return same',
        ),
        (
            "the place of the maximum beside a softmax", "rules/reductions.py", "test_zero_softmax.py",
            '    only_everywhere(form)\n    assert form.x is not None\n    call, shifted',
            '    assert form.x is not None\n    call, shifted',
        ),
        (
            "a value beside a softmax is computed", "walk/walk.py", "test_zero_softmax.py",
            '    known = form.beside is None and (bool(form.exps) or vanishes)',
            '    known = bool(form.exps) or vanishes',
        ),
        (
            "scaled logits beside a softmax are computed", "algebra/forms.py", "test_zero_softmax.py",
            "        return not self.clamped and self.beside is None",
            "        return not self.clamped",
        ),
        (
            "the clamp is forgotten", "rules/guards.py", "test_soundness.py garbage or lowest or clamp",
            "    return operand.with_(clamped=True)",
            "    return operand",
        ),
        (
            "a mask's index is taken to hit", "rules/operands.py", "test_soundness.py miss",
            "    return c.emitter.where(hits, index, zero), Poly.atom(hit)",
            "    return c.emitter.where(hits, index, zero), Poly.number(1.0)",
        ),
        (
            "an index below 0 is taken to hit", "rules/operands.py", "test_soundness.py miss",
            "call(aten.ge.Scalar, index, 0)",
            "call(aten.ge.Scalar, index, -1000)",
        ),
        (
            "an index of V or more is taken to hit", "rules/operands.py", "test_soundness.py miss",
            "inside = call(aten.lt.Scalar, index, c.size_of(mask.form, mask.form.vdim))",
            "inside = call(aten.le.Scalar, index, 100000)",
        ),
        (
            "a negated mask counts as the mask", "rules/operands.py", "test_small_programs.py right and (negated or everywhere)",
            "    if mask.guard is not Guard.COLUMN or mask.negated:",
            "    if mask.guard is not Guard.COLUMN:",
        ),
        (
            "logits may be broadcast against larger values", "rules/operands.py", "test_small_programs.py right and (many_targets)",
            "        if form.x is not None and not all(map(same, form.shape, shape)):",
            "        if False:",
        ),
        (
            "a fraction is a column", "rules/indices.py", "test_soundness.py miss",
            "    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)",
            "    return True",
        ),
        (
            "counting may begin anywhere", "rules/indices.py", "test_small_programs.py right and (from_one)",
            '    if node.op != "call_function" or node.kwargs.get("start", 0) != 0:',
            '    if node.op != "call_function":',
        ),
        (
            "counting may skip", "rules/indices.py", "test_small_programs.py right and (by_two)",
            '    if node.kwargs.get("step", 1) != 1:',
            "    if False:",
        ),
        (
            "columns of any operator are distinct", "rules/indices.py", "test_soundness.py best_columns",
            "    if found.target is not operator.getitem or found.args[1] != 1:\n        return False",
            "    if found.target is not operator.getitem or found.args[1] != 1:\n        return True",
        ),
        (
            "any numbers that are written down count", "rules/indices.py", "test_soundness.py written",
            "        return torch.equal(constant.cpu(), torch.arange(len(constant), dtype=constant.dtype))",
            "        return True",
        ),
        (
            "an expanded count of one counts", "rules/indices.py", "test_soundness.py counting",
            "        return place if same(shape[place], inner[axis]) else None",
            "        return place",
        ),
        (
            "a slice of a count from elsewhere counts", "rules/indices.py", "test_soundness.py counting",
            "        return axis if node.args[1] % rank != axis or _from_zero(node) else None  # type: ignore[operator]",
            "        return axis",
        ),
        (
            "a slice of a count with a step counts", "rules/indices.py", "test_soundness.py counting",
            " and node.args[4:5] in ((), (1,))",
            "",
        ),
        (
            "a roll of another length", "rules/indices.py", "test_small_programs.py right and (rolled)",
            "    if not whole or not same(shape_of(counted)[0], size) or not isinstance(shift, int):",
            "    if not whole or not isinstance(shift, int):",
        ),
        (
            "a larger number is the lowest", "rules/guards.py", "test_small_programs.py right and (low_number)",
            "    known = form.is_affine and -math.inf < number <= _lowest(node, form)",
            "    known = form.is_affine and -math.inf < number <= -1.0",
        ),
        (
            "above the lowest number is not -inf", "rules/guards.py", "test_soundness.py another_mask",
            "    return Guard.LOWEST if number == lowest else Guard.MINUS_INF, True",
            "    return Guard.MINUS_INF, True",
        ),
        (
            "a larger number is no less than the lowest", "rules/guards.py",
            "test_small_programs.py right and above",
            "    if not form.is_affine or number > lowest:",
            "    if not form.is_affine or number > -1.0:",
        ),
        (
            "p > anything is p > 0", "rules/guards.py", "test_small_programs.py right and (above)",
            "    if form.is_exp and number == 0:\n        positive",
            "    if form.is_exp:\n        positive",
        ),
        (
            "a guard of another value's NaN", "rules/guards.py", "test_small_programs.py right and (NaN_where)",
            "        if _is_nan_too(c, mask.form, right):",
            "        if True:",
        ),
        (
            "a guard of another logits' probability", "rules/guards.py", "test_small_programs.py right and (zero_where)",
            "        if right.x is mask.form.x and all(_vanishes(c, mask, term) for term in right.exps):",
            "        if all(_vanishes(c, mask, term) for term in right.exps):",
        ),
        (
            "a guard of any probability", "rules/guards.py", "test_soundness.py another_mask",
            "        if right.x is mask.form.x and all(_vanishes(c, mask, term) for term in right.exps):",
            "        if right.x is mask.form.x:",
        ),
        (
            "a weighted probability is zero where it is", "rules/guards.py", "test_soundness.py another_mask",
            "        plain = not others and guarded.b.is_zero and c.rows.is_positive(guarded.a)",
            "        plain = True",
        ),
        (
            "a product that overflows is a mask", "rules/guards.py", "test_soundness.py products_that_overflow",
            "scale > 0 and 0 < factor <= 1",
            "scale > 0 and 0 < factor",
        ),
        (
            "a guard puts anything", "rules/guards.py", "test_small_programs.py right and (one_where)",
            "    if mask.guard in _LIMITS and constant == 0 and right.is_exp:",
            "    if mask.guard in _LIMITS and right.is_exp:",
        ),
        (
            "an index that misses is written", "rules/guards.py", "test_soundness.py labels_at_columns_that",
            "    return with_column(c, outside, at, column(c, inside, (at,)), hit)",
            "    return with_column(c, outside, at, column(c, inside, (at,)))",
        ),
        (
            "where chooses the other side", "rules/guards.py", "test_small_programs.py right and (number_but)",
            "            condition, chosen, other = condition.invert(), other, chosen",
            "            condition = condition.invert()",
        ),
        (
            "what is left out is filled with an infinite value", "rules/guards.py", "test_refusals.py infinite",
            "    if is_infinite(form):",
            "    if False:",
        ),
        (
            "masked rows are read", "rules/guards.py", "test_soundness.py garbage",
            "    yes, no = (Poly.atom(c.rows.place(c.emitter.cast(flag, dtype))) for flag in flags)",
            "    yes, no = (Poly.atom(c.emitter.cast(flag, dtype)) for flag in flags)",
        ),
        (
            "a comparison's index may have columns", "rules/guards.py", "test_small_programs.py right and (several_columns)",
            "        if same(shape_of(index)[-1], 1):",
            "        if True:",
        ),
        (
            "a count along the rows is one of columns", "rules/guards.py", "test_soundness.py counting",
            "        last = counting_axis(columns) == rank_of(columns) - 1",
            "        last = counting_axis(columns) is not None",
        ),
        (
            "a gather over another dimension", "rules/columns.py", "test_small_programs.py right and (gather_over)",
            "    if dim % len(form.shape) != form.vdim or not isinstance(index, Node) or not rank_of(index):",
            "    if not isinstance(index, Node) or not rank_of(index):",
        ),
        (
            "as many rows as columns need not be counted", "rules/columns.py", "test_small_programs.py right and (first_row)",
            "    return counted and guarded_same(shape_of(rows)[place], shape_of(columns)[dim])",
            "    return counted",
        ),
        (
            "indexing does not count from the end", "rules/columns.py", "test_spellings.py negative_target",
            "    return c.emitter.where(call(aten.lt.Scalar, columns, 0), counted, columns)",
            "    return columns",
        ),
        (
            "several columns are overwritten", "rules/columns.py", "test_small_programs.py right and (overwritten)",
            "    if not (accumulate or same(shape_of(index)[dim], 1) or are_distinct(index, dim)):",
            "    if False:",
        ),
        (
            "what is overwritten stays", "rules/columns.py", "test_soundness.py precision or indices",
            "    return with_column(c, form, index, weight)",
            "    return plus_column(c, form, index, weight)",
        ),
        (
            "an overwritten column may cancel", "walk/walk.py", "test_soundness.py precision",
            "                only_with_its_columns(self.context, result)\n",
            "",
        ),
        (
            "weights have nothing of a column", "walk/left_out.py", "test_soundness.py precision",
            "    return not all(map(c.is_free_of_logits",
            "    return not any(map(c.is_free_of_logits",
        ),
        (
            "a column that may be missed is left", "walk/left_out.py", "test_spellings.py smoothed_by_where",
            "_without(c.rows.zero_outside - masks, _known(c, hot.weight))",
            "_known(c, hot.weight)",
        ),
        (
            "logits without a column are summed", "walk/left_out.py", "test_soundness.py precision",
            "    if not form.f.is_zero:\n        yield",
            "    if False:\n        yield",
        ),
        (
            "what is taken out by parts is not seen", "walk/left_out.py", "test_soundness.py precision",
            "    return inner if inner == Poly.atom(atom) else _meant(c, inner)",
            "    return inner",
        ),
        (
            "a number per row is not one", "walk/left_out.py", "test_soundness.py precision",
            "        if not less.terms.keys() <= whole.terms.keys():",
            "        if False:",
        ),
        (
            "what is taken of all rows is of none with a mask", "walk/left_out.py", "test_soundness.py precision",
            "    if any(_masked_out(each, masks) in everywhere for each in elsewhere):",
            "    if False:",
        ),
        (
            "a maximum of rounded exponentials is that of the exact ones", "walk/walk.py", "test_soundness.py precision",
            "                self._check_rounding(result)\n",
            "",
        ),
        (
            "two columns are not the same", "walk/left_out.py", "test_soundness.py precision",
            "near = together > 1 - _LEAST or any(",
            "near = any(",
        ),
        (
            "several columns of a row are not the same", "walk/left_out.py", "test_soundness.py precision",
            "    return 1.0 if repeats and found > 0 else found",
            "    return found",
        ),
        (
            "a product of a weight and logits is one number", "walk/columns.py", "test_soundness.py precision",
            "    c.rows.guarded[scaled] = Guarded(difference * scale, scale)\n",
            "",
        ),
        (
            "a product of a softmax and logits is one number", "walk/columns.py", "test_soundness.py precision",
            "    c.rows.guarded[weighted] = Guarded(factor, Poly.atom(probability))\n",
            "",
        ),
        (
            "an index with fewer rows is written to all", "rules/columns.py", "test_small_programs.py right and (overwritten)",
            "    if dim != form.vdim or not _covers_rows(form, shape_of(index)):",
            "    if dim != form.vdim:",
        ),
        (
            "a repeated column is held once", "walk/columns.py", "test_soundness.py repeat",
            "    if hot.index == index and all(same(shape_of(node)[form.vdim], 1) for node in index):",
            "    if hot.index == index:",
        ),
        (
            "a column of another index hits", "walk/columns.py", "test_small_programs.py right and (another_target)",
            "        return Poly.atom(c.emitter.where(hit, held, zero))",
            "        return Poly.atom(held)",
        ),
        (
            "the first row's value at a column is every row's", "walk/columns.py", "test_soundness.py broadcast",
            "        everywhere = c.spread(",
            "        everywhere = (lambda form, index: index)(",
        ),
        (
            "an exponential's weight by the logits is forgotten", "walk/columns.py", "test_small_programs.py right and (part_at)",
            "    factor = Poly.atom(probability) * (term.a + term.b * y)",
            "    factor = Poly.atom(probability) * term.a",
        ),
        (
            "the total of the logits is not scaled", "rules/reductions.py", "test_small_programs.py right and (sum_of_scaled)",
            "        return Poly.atom(plain) * form.f",
            "        return Poly.atom(plain)",
        ),
        (
            "a sum of rows counts them once", "rules/reductions.py", "test_small_programs.py right",
            "        return form.e * c.vocabulary(form) if not form.e.is_zero else ZERO",
            "        return form.e",
        ),
        (
            "a sum counts the constant once", "rules/reductions.py", "test_spellings.py test_spelling and fp32 and (smoothed or label_smoothing or mean)",
            "        return form.e * c.vocabulary(form) + c.total(form)",
            "        return form.e + c.total(form)",
        ),
        (
            "a sum over rows is one over the vocabulary", "rules/reductions.py", "test_small_programs.py right and (over_rows)",
            '    if form.vdim not in over:\n        raise Refused("rows of full-vocabulary values are summed")',
            '    if False:\n        raise Refused("rows of full-vocabulary values are summed")',
        ),
        (
            "a maximum over other dimensions", "rules/reductions.py", "test_small_programs.py right and (maximum_over)",
            "    if _reduced_dims(form, dims) != [form.vdim]:",
            "    if False:",
        ),
        (
            "the argmax of a negative multiple", "rules/reductions.py", "test_small_programs.py right and (smallest)",
            "    if not (form.is_affine and factor and factor > 0):",
            "    if not (form.is_affine and factor):",
        ),
        (
            "weights of several columns are not summed", "rules/reductions.py", "test_soundness.py repeat",
            "    if same(shape_of(index)[form.vdim], 1):",
            "    if True:",
        ),
        (
            "a clamped value is summed", "rules/reductions.py", "test_small_programs.py right and (clamped and scaled)",
            "    only_known(form)\n    only_everywhere(form)",
            "    only_known(form)",
        ),
        (
            "alpha is not looked at", "rules/pointwise.py", "test_small_programs.py right and (alpha)",
            "        other = scaled(two, Poly.number(sign * factor))",
            "        other = scaled(two, Poly.number(sign))",
        ),
        (
            "logits vanish from a value", "rules/pointwise.py", "test_soundness.py not_a_number",
            "    if result.is_row or (told",
            "    if (told",
        ),
        (
            "a sum is divided by in the exponent, however often", "rules/pointwise.py", "test_soundness.py precision",
            "            if not _is_centered(moved, exponent):",
            "            if False:",
        ),
        (
            "a moved mask lets garbage through", "walk/row_nodes.py", "test_soundness.py garbage",
            "- seen if node.target in _ROW_MOVES else set()",
            "- seen if False else set()",
        ),
        (
            "exp of anything", "rules/pointwise.py", "test_small_programs.py right and (exp_of)",
            '    if not form.is_affine:\n        raise Refused("exp of',
            '    if False:\n        raise Refused("exp of',
        ),
        (
            "log of several softmaxes", "rules/pointwise.py", "test_small_programs.py right and (log_of_a_sum)",
            '    if not form.is_exp or len(form.exps) != 1 or not form.exps[0].b.is_zero:\n        raise Refused("log of',
            '    if not form.is_exp or not form.exps[0].b.is_zero:\n        raise Refused("log of',
        ),
        (
            "1 / W forgets the weight", "rules/pointwise.py", "test_small_programs.py right and (twice_an_exponential)",
            "    return form.with_(exps=(Exp(-term.scale, -term.shift, _inverse(c, term.a, form)),))",
            "    return form.with_(exps=(Exp(-term.scale, -term.shift, ONE),))",
        ),
        (
            "a softmax that is clamped has an exp", "rules/pointwise.py", "test_small_programs.py right and (nearly_nothing)",
            "    if form.clamped and not _vanishes_at_lowest(c, form):",
            "    if False:",
        ),
        (
            "a clamped row of nothing but -inf has no softmax", "rules/pointwise.py",
            "test_small_programs.py right and (empty_rows)",
            "        shift is not None or c.statistics.shifts(form)\n",
            "        True\n",
        ),
        (
            "a slice forgets its step", "rules/row_moves.py", "test_small_programs.py right and (steps)",
            "    x = call(aten.slice.Tensor, form.x, dim, start, stop, step)",
            "    x = call(aten.slice.Tensor, form.x, dim, start, stop, 1)",
        ),
        (
            "a slice of the vocabulary is one of rows", "rules/row_moves.py", "test_small_programs.py right and (some_columns)",
            '    if dim == form.vdim:\n        raise Refused("a part of the vocabulary is taken")',
            '    if False:\n        raise Refused("a part of the vocabulary is taken")',
        ),
        (
            "a slice with a step takes all", "graph/slices.py", "test_small_programs.py right and (steps)",
            "    return bool(step == 1 and start == 0 and (stop == END or same(stop, size)))",
            "    return bool(start == 0 and (stop == END or same(stop, size)))",
        ),
        (
            "a bound from the end is one from the start", "graph/slices.py", "test_small_programs.py right and (from_the_end)",
            "        start = min(max(start + size if start < 0 else start, 0), size)",
            "        start = min(max(start, 0), size)",
        ),
        (
            "a roll goes the other way", "rules/row_moves.py", "test_small_programs.py right and (rolled_logits)",
            "        return _rolled(c, atom, dim, size, -shift)",
            "        return _rolled(c, atom, dim, size, shift)",
        ),
        (
            "columns are not spread before rows are reshaped", "rules/row_moves.py", "test_soundness.py one_temperature",
            "        atom = c.spread(form, atom)\n        return c.emitter.reshape(",
            "        return c.emitter.reshape(",
        ),
        (
            "pieces with a step are joined", "rules/row_writes.py", "test_small_programs.py right and (then_the_others)",
            '        one_by_one = kind == "select" or step.key[4:] == (1,)',
            "        one_by_one = True",
        ),
        (
            "pieces in another order are joined", "rules/row_writes.py", "test_small_programs.py right and (chunks_in_another)",
            '        if kind not in ("slice", "select") or step.key[:3] != (kind, dim, at) or not one_by_one:',
            '        if kind not in ("slice", "select") or not one_by_one:',
        ),
        (
            "some pieces are all", "rules/row_writes.py", "test_small_programs.py right and (without_the_last)",
            '    if not all_taken or (kind == "select" and dim != 0):',
            '    if kind == "select" and dim != 0:',
        ),
        (
            "rows are written elsewhere", "rules/row_writes.py", "test_soundness.py row_order or indices",
            "    if step is None or step.key != key or not same_shape(shape_of(step.parent), shape):",
            "    if step is None:",
        ),
        (
            "what was in written rows stays", "rules/row_writes.py", "test_rules.py operator_computes and slice_scatter",
            "    return add(scaled(base, rest), placed, c.rows.zero_outside)",
            "    return add(base, placed, c.rows.zero_outside)",
        ),
        (
            "the extent of a step is its first row", "rules/row_writes.py", "rules/test_row_writes.py overlapping",
            '    stop = start + 1 if kind == "select" else rest[0]  # type: ignore[operator]',
            "    stop = start + 1  # type: ignore[operator]",
        ),
        (
            "a coefficient does not vanish outside", "rules/row_writes.py", "test_rules.py operator_computes and slice_scatter",
            "        if not rest and not vanish:",
            "        if not rest:",
        ),
        (
            "how far the maximum of all shards is from the peak is lost", "walk/near.py", "test_soundness.py shards_over_a_temperature",
            "part + Poly.atom(c.rows.emit_node(distance, dtype, x))",
            "part",
        ),
        (
            "the peak of a row of -inf is taken away", "walk/near.py", "test_soundness.py nothing_in_a_row",
            "        center = Poly.atom(c.emitter.where(finite, peak, c.rows.emit_node(ZERO, dtype, x)))",
            "        center = stats.peak",
        ),
        (
            "the center is not given back to a", "walk/gradient.py", "test_spellings.py test_spelling and fp32 and (entropy_as_given or entropy_shifted)",
            "    a = c.statistics.centered(form.x, term.a + term.b * around.value)",
            "    a = term.a",
        ),
        (
            "the shift keeps the center", "walk/gradient.py", "test_spellings.py test_spelling and fp32 and (entropy_as_given or log_softmax_gather)",
            "    return term.scale, around.center, term.shift - around.value, a, term.b",
            "    return term.scale, around.center, term.shift, a, term.b",
        ),
        (
            "columns are scaled before the peak is taken away", "walk/columns.py", "test_soundness.py soft_labels",
            "        around = affine_center(c, form)",
            "        around = Near()",
        ),
        (
            "a softmax of float64 logits is kept in float32", "walk/gradient.py", "test_soundness.py entropy_in_float64",
            "    if dtype_of(form) is torch.float64 and dtype is not torch.float64:",
            "    if False:",
        ),
        (
            "all softmaxes sum to a number", "rules/reductions.py", "test_soundness.py all_probabilities",
            "c.emitter.expand(c.emit_sum(poly, form, node), c.lead_sizes(form))",
            "c.emitter.expand(c.emit_rows(poly, form, node), c.lead_sizes(form))",
        ),
        (
            "what a column mask leaves of NaN is a number", "rules/pointwise.py", "test_small_programs.py missed or beside",
            "        return result.with_(e=result.e + _nothing(c, one) + _nothing(c, two))",
            "        return result",
        ),
        (
            "a multiple of a column mask is read elsewhere", "walk/columns.py", "test_refusals.py multiple",
            "    if hot.multiplied:",
            "    if False:",
        ),
        (
            "a masked row's softmax sums to NaN", "walk/context.py", "test_soundness.py masked_whole",
            "            result += Poly.atom(self.where_any([factor], nothing, zero))",
            "            result += Poly.atom(nothing)",
        ),
        (
            "a rounded logsumexp is mixed with exact statistics", "walk/walk.py", "test_soundness.py without_their_mean",
            "                    if any(map(rows.is_peak, poly.atoms())) and not _is_exact(rows, poly):",
            "                    if False:",
        ),
        (
            "a maximum over a temperature is mixed with rounded logits", "walk/walk.py", "test_soundness.py at_a_temperature_that",
            "    return math.frexp(abs(number))[0] == 0.5 and others <= rows.zero_outside\n",
            "    return number != 0 and others <= rows.zero_outside\n",
        ),
        (
            "an overflowing mass meets its negative", "walk/context.py", "test_soundness.py times_their_logits",
            "        product = self.emitter.call(aten.mul.Tensor, mass, self.rows.emit_node(number, dtype, mass))",
            "        product = self.rows.emit_node(Poly.atom(mass) * number, dtype, mass)",
        ),
        (
            "a column is not spread over the rows", "walk/gradient.py", "test_soundness.py broadcast",
            "            indices.append(self.ordered(self.c.emitter.expand(whole, self._sizes(count))))",
            "            indices.append(self.ordered(whole))",
        ),
        (
            "a shift that only backward knows is saved", "walk/gradient.py", "walk/test_gradient.py saved and temperature",
            "    return not any(is_backward(atom) for poly in known for atom in poly.atoms())",
            "    return True",
        ),
        (
            "an exponential that is no probability is saved", "walk/gradient.py", "walk/test_gradient.py saved and probability",
            "    if term.shift != stats.logsumexp or dtype is torch.float16:",
            "    if dtype is torch.float16:",
        ),
        (
            "a softmax is saved in float16", "walk/gradient.py", "walk/test_gradient.py saved and float16",
            "    if term.shift != stats.logsumexp or dtype is torch.float16:",
            "    if term.shift != stats.logsumexp:",
        ),
        (
            "a value beside is not added", "walk/gradient.py", "test_small_programs.py right and (another_use)",
            "        node = c.emitter.call(aten.add.Tensor, node, term)",
            "        pass",
        ),
        (
            "what backward makes is not marked", "walk/gradient.py", "walk/test_gradient.py what_is_saved",
            "    if in_backward(c):  # also where",
            "    if False:  # also where",
        ),
        (
            "float64 is float32", "walk/statistics.py", "test_linear_in_forward.py float64",
            "    return torch.float64 if x is not None and value(x).dtype == torch.float64 else torch.float32",
            "    return torch.float32",
        ),
        (
            "statistics of one scale serve all", "walk/statistics.py", "test_spellings.py test_spelling and fp32 and (two_temperatures)",
            "        key = (x, scale)",
            "        key = (x, Poly.number(1.0))",
        ),
        (
            "returned logits of what is changed", "returned_logits.py", "../backend/test_returned_logits.py left",
            "chain.made <= usual and not _changed(graph, chain)",
            "chain.made <= usual",
        ),
        (
            "returned logits of another mode", "returned_logits.py", "../backend/test_returned_logits.py left",
            "chain.made <= usual and not _changed(graph, chain)",
            "not _changed(graph, chain)",
        ),
        (
            "returned logits whose gradients are on inside alone", "row_demand/modes.py",
            "../backend/test_returned_logits.py inside_alone",
            "    given: Any = torch.is_grad_enabled()",
            "    given: Any = True",
        ),
        (
            "returned logits without a loss", "returned_logits.py", "../backend/test_returned_logits.py left",
            "and _has_loss(outputs, node, chain):",
            "and True:",
        ),
        (
            "returned hidden states are logits", "returned_logits.py",
            "../backend/test_returned_logits.py hidden_states_as_wide",
            "again and not _is_hidden(node, heads) and",
            "again and",
        ),
        (
            "returned logits of memory that is changed", "returned_logits.py",
            "../backend/test_returned_logits.py left",
            "_memory(each) == _memory(one) for each in written for one in way if one < node",
            "False for _ in ()",
        ),
        (
            "returned logits of a weight that its gradient does not read", "returned_logits.py",
            "../backend/test_returned_logits.py left",
            "return _has_gradient(head.hidden) and all(",
            "return all(",
        ),
        (
            "returned logits that are given ones", "returned_logits.py", "../backend/test_returned_logits.py given",
            'own = not _shares_memory(node, [*outputs, *graph.find_nodes(op="placeholder")])',
            "own = True",
        ),
        (
            "returned logits of a matrix that is computed", "returned_logits.py",
            "../backend/test_returned_logits.py left",
            "        return again and all(self._is_weight(each) for each in node.all_input_nodes)",
            "        return all(self._is_weight(each) for each in node.all_input_nodes)",
        ),
        (
            "an output behind the user's is returned", "../slime_compile/backend/returned.py",
            "../backend/test_returned_logits.py graph_returns",
            "    return tuple(outputs[: len(outputs) - returned.added])",
            "    return tuple(outputs)",
        ),
        (
            "returned logits run again without autocast", "../slime_compile/backend/returned.py",
            "../backend/test_returned_logits.py autocast",
            "            for device, (enabled, dtype) in ctx.autocast.items():",
            "            for device, (enabled, dtype) in ():",
        ),
        (
            "columns that a reshape has mixed with rows are told apart", "inlined.py", "test_inlined.py mixed",
            "    if not (single and counted and math.prod(shape_of(coefficient)[rows:]) == len(columns)):",
            "    if not (single and counted):",
        ),
        (
            "columns one below the other stand side by side", "inlined.py", "test_inlined.py mixed",
            "    if not (single and counted and math",
            "    if not (single and math",
        ),
        (
            "formulas of what is on a GPU", "inlined.py", "test_inlined.py small",
            '    known = logits.device.type == "cpu" and all(',
            "    known = all(",
        ),
        (
            "formulas without vector instructions", "../slime_compile/backend/passes.py",
            "../backend/test_inline_below.py without_vector",
            "    return small and native.has_vectors()",
            "    return small",
        ),
        (
            "formulas of sizes that are not known", "inlined.py", "test_inlined.py not_known",
            "all(isinstance(size, int) for size in logits.shape)",
            "True",
        ),
        (
            "what a formula does not need stays in the graph", "inlined.py", "test_inlined.py",
            "    while nodes:",
            "    while False:",
        ),
        (
            "every column is the number that one has", "inlined.py", "test_inlined.py",
            "    number = filled.args[1] if filled.target is aten.full.default else None",
            "    number = 1.0",
        ),
        (
            "an infinite weight is in every column", "../slime_compile/ops/reference.py", "test_inlined.py infinite",
            "        out = torch.where(column == at, out + value, out)",
            "        out = out + (column == at) * value",
        ),
        (
            "formulas though the softmax is to be kept", "../slime_compile/backend/options.py",
            "../backend/test_inline_below.py operators_are_called",
            'self.consume_logits is True or self.save != "logits"',
            "self.consume_logits is True",
        ),
        (
            "formulas though the logits are to be consumed", "../slime_compile/backend/options.py",
            "../backend/test_inline_below.py operators_are_called",
            'self.consume_logits is True or self.save != "logits"',
            'self.save != "logits"',
        ),
        (
            "a formula's report is lost in the cache", "../slime_compile/backend/passes.py",
            "../report/test_compile_cache.py formulas",
            "            record.keep_aside(record.placements_region())",
            "            pass",
        ),
        (
            "logits are overwritten before a later reader", "inplace.py", "test_inplace.py",
            "            if user > node:",
            "            if False:",
        ),
        (
            "logits that leave backward are overwritten", "inplace.py", "test_inplace.py",
            '            if user.op == "output":',
            "            if False:",
        ),
        (
            "logits of another dtype are overwritten", "inplace.py", "test_inplace.py",
            "    if old.dtype != new.dtype:",
            "    if False:",
        ),
        (
            "overlapping logits are overwritten", "inplace.py", "test_inplace.py",
            "    if not (leaves_only and _non_overlapping(old)):",
            "    if not leaves_only:",
        ),
        (
            "the stride of a single row counts", "graph/facts.py", "test_inplace.py single_row",
            "same(size, 1) or ",
            "",
        ),
        (
            "strides that are read are lost", "walk/walk.py", "walk/test_layouts.py",
            "            keep_layouts(self.context.emitter, self.account)\n",
            "",
        ),
        (
            "as_strided reads no strides", "walk/layouts.py", "walk/test_layouts.py",
            'if node.op == "output" or node.target in _READ_MEMORY:',
            'if node.op == "output":',
        ),
        (
            "gaps are packed", "walk/layouts.py", "walk/test_layouts.py",
            '                raise NotImplementedError(f"{reader.target} of a value with gaps in its memory")',
            "                return",
        ),
        (
            "element-wise operators have strides of their own", "walk/layouts.py", "walk/test_layouts.py",
            "        if not _alike(value(node), made):",
            "        if False:",
        ),
        (
            "operators that are not torch's take any strides", "walk/layouts.py", "walk/test_layouts.py",
            " or node.target.namespace not in _KNOWN",
            "",
        ),
        (
            "returned values have any strides", "walk/layouts.py", "walk/test_layouts.py",
            "            read = [arg for arg in read if not is_backward(arg)]",
            "            read = []",
        ),
        (
            "given logits are consumed unasked", "inplace.py", "test_inplace.py",
            "    if not consume_logits:",
            "    if False:",
        ),
        (
            "a leaf is consumed", "inplace.py", "test_inplace.py",
            '    if reason:\n        raise _Refused(f"the logits are an input and {reason}")\n',
            "",
        ),
        (
            "a view of given logits is consumed", "inplace.py", "test_inplace.py",
            '    if owner is not x:\n        raise _Refused("only a view of the caller',
            '    if False:\n        raise _Refused("only a view of the caller',
        ),
        (
            "who holds a view is counted for the logits", "inplace.py", "test_inplace.py",
            '    if owner is not x:\n        raise _Refused("only a view of the logits',
            '    if False:\n        raise _Refused("only a view of the logits',
        ),
        (
            "a changed input is anyone's", "inplace.py", "test_inplace.py",
            "    if owner.meta.get(_INPUT) == _CHANGED:",
            "    if False:",
        ),
        (
            "a gradient waits for no other reader", "inplace.py", "test_inplace.py",
            '                    **({"after": after} if after else {}),\n',
            "",
        ),
        (
            "CUDA graphs decide at run time", "inplace.py", "test_inplace.py",
            "            elif recorded and owner:",
            "            elif False:",
        ),
        (
            "saved logits are overwritten though the graph may be retained", "inplace.py", "test_inplace.py",
            '        return "graph"',
            '        return ""',
        ),
        (
            "a slice is the whole of the logits", "whole_logits.py", "test_whole_logits.py no_reshape",
            "_SAME_ROWS = RESHAPES | {aten.alias.default, aten.detach.default}",
            "_SAME_ROWS = RESHAPES | {aten.alias.default, aten.slice.Tensor, aten.transpose.int, aten.permute.default, aten.clone.default}",
        ),
        (
            "every piece has the first one's weight", "stacks.py", "test_stacks.py weights",
            "operand, at, index, index + 1)",
            "operand, at, 0, 1)",
        ),
        (
            "a size has a device", "rules/pointwise.py", "test_spellings.py sizes_alone",
            "return c.rows.emit_node(poly, dtype_of(form), c.emitter.origin)",
            "return c.rows.emit_node(poly, dtype_of(form), next(iter(poly.atoms())))",
        ),
        (
            "an integer is divided by one of no row", "sliced_gradients.py", "test_sliced_gradients.py what_stays and divided",
            "    return node.target in _DIVISIONS and",
            "    return False and",
        ),
        (
            "rows beside the slice are not zero", "sliced_gradients.py", "test_sliced_gradients.py left_out",
            "return emit.where(rows.are_kept(), grown, zero)",
            "return grown",
        ),
        (
            "a slice may start elsewhere", "sliced_gradients.py", "test_sliced_gradients.py what_stays",
            "alike = (dim, start, step) == (kept.dim, kept.start, 1)",
            "alike = (dim, step) == (kept.dim, 1)",
        ),
        (
            "rows before the slice are not zero", "sliced_gradients.py", "test_sliced_gradients.py left_out",
            "        if kept.start:\n            after",
            "        if False:\n            after",
        ),
        (
            "a weight per column is one per row", "sliced_gradients.py", "test_sliced_gradients.py weights or columns",
            "        if same(shape[-1], 1):\n            return self.row",
            "        if True:\n            return self.row",
        ),
        (
            "what forward changes is read in backward", "sliced_gradients.py", "test_sliced_gradients.py what_forward_changes",
            "any(changed.intersection(node.all_input_nodes) for node in emit.created)",
            "False",
        ),
        (
            "gradients of few rows grow", "sliced_gradients.py", "test_sliced_gradients.py what_stays",
            "_LEAST_KEPT = 0.5",
            "_LEAST_KEPT = 0.0",
        ),
        (
            "a gradient grows although nothing is reduced", "sliced_gradients.py", "test_sliced_gradients.py what_stays",
            "    if not rows.reduced and sum(map(is_elementwise, emit.created)) <= _MOST_INLINED:\n        return None\n",
            "",
        ),
        (
            "a long sum of a slice is stored", "sliced_gradients.py", "test_sliced_gradients.py test_rewritten and many",
            "_MOST_INLINED = 20",
            "_MOST_INLINED = 2000",
        ),
        (
            "a lone softmax is taken", "walk/verdict.py", "test_near_misses.py",
            "return computed_there and _meets_others(walk, root)",
            "return computed_there",
        ),
        (
            "a stack of half precision is summed in it", "stacks.py", "test_stacks.py half_precision",
            "    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype\n",
            "    wide = dtype\n",
        ),
        (
            "a view of one sample's stack is no stack", "stacks.py", "test_stacks.py sample",
            "(join not in stacks or node.target in TO_SHAPE)",
            "join not in stacks",
        ),
        (
            "a reduction over more than the stack", "stacks.py", "test_stacks.py what_stays",
            "    if dims != [stack.dim]:\n        raise _Stays\n",
            "",
        ),
        (
            "rows are moved behind selections' operands only", "row_demand/rewrite.py", "test_row_demand.py asked_for_behind",
            "    moves = region.inner.keys() - region.points\n",
            "    moves = region.takes\n",
        ),
        (
            "what is taken out of a stack is what was put in", "stacks.py", "test_stacks.py taken_out",
            "    return emit.call(aten.clone.default, piece)",
            "    return piece",
        ),
        (
            "a view reads what was written elsewhere", "graph/operators.py", "test_small_programs.py changed",
            " or _where(whole, 2) != _where(node, 1):",
            ":",
        ),
        (
            "a write replaces one that was elsewhere", "graph/operators.py", "test_small_programs.py changed",
            " and _where(base, 2) == _where(node, 2):",
            ":",
        ),
        (
            "a copy in another precision is what was copied", "graph/operators.py", "graph/test_operators.py",
            "        if below is None or value(below).dtype != value(found).dtype:",
            "        if below is None:",
        ),
        (
            "what is put where it is NaN may be finite", "rules/guards.py", "test_nan_masks.py",
            "    if infinite and isinstance(outside, Form)",
            "    if isinstance(outside, Form)",
        ),
        (
            "rows of NaN may be weighted with zero", "rules/guards.py", "test_nan_masks.py",
            " and _is_nan_too(c, mask.form, outside):",
            ":",
        ),
        (
            "a weighted p log p is NaN where p log p is", "rules/operands.py", "test_nan_masks.py",
            "    if not plain or not factor.as_number():",
            "    if not plain:",
        ),
        (
            "what is laid out with gaps has results with gaps", "graph/fakes.py", "graph/test_fakes.py",
            "    return first if first.is_contiguous() else None",
            "    return first",
        ),
        (
            "arithmetic of integers gives integers", "graph/fakes.py", "graph/test_fakes.py",
            "not first.is_floating_point() or ",
            "",
        ),
        (
            "arithmetic of two dtypes gives the first", "graph/fakes.py", "graph/test_fakes.py",
            "(arg.dtype, arg.device, arg.shape, arg.stride()) != described",
            "(arg.device, arg.shape, arg.stride()) != described[1:]",
        ),
        (
            "two inputs of one storage", "inplace.py", "test_inplace.py",
            "    if len(owners) > 1:",
            "    if False:",
        ),
        (
            "another input with a vocabulary is read", "inplace.py", "test_inplace.py",
            '            raise _Refused("another input with the same vocabulary is read in backward")',
            "            pass",
        ),
        (
            "saved logits that a caller sees are overwritten", "inplace.py", "test_inplace.py",
            '    if reason is None:\n        raise _Refused("the saved logits alias a value that the caller can see")\n',
            "",
        ),
        (
            "an element-wise reader is a kernel", "inplace.py", "test_inplace.py",
            "            if not _is_kernel(user) and not descendants([user], node) <= ancestors([node]):",
            "            if False:",
        ),
        (
            "a value is written over logits that it is not copied to", "inplace.py", "test_inplace.py copied",
            " and copy.args[0] is x",
            "",
        ),
        (
            "backward's writes stand where they are", "graph/order.py", "test_changed_logits.py changed",
            "    late = [write for write in before if is_backward(write)]",
            "    late = []",
        ),
        (
            "logits that backward changes are written over though they are read later", "inplace.py", "test_inplace.py copied",
            "        _check_readers(aliases, x, node, copy)\n    except",
            "        pass\n    except",
        ),
        (
            "changed inputs are roots", "graph/changes.py", "test_changed_logits.py divided",
            "    if not is_joint(graph):",
            "    if True:",
        ),
        (
            "new readers come after the write", "graph/order.py", "test_changed_logits.py zeroed",
            "            needed = (*top.all_input_nodes, *before.get(top, ()))",
            "            needed = top.all_input_nodes",
        ),
        (
            "what an autograd.Function does in backward is forward", "graph/backward.py", "graph/test_backward.py",
            "            if late or (traced and untagged):",
            "            if False:",
        ),
        (
            "a softmax left in the logits is taken though the program reads another", "walk/left.py", "test_changed_logits.py confident",
            "    if value(node).dtype == compute_dtype(x):",
            "    if True:",
        ),
        (
            "another exponential is left in the logits", "walk/left.py", "test_changed_logits.py another",
            "    if there.scale != term.scale or not there.b.is_zero or there.extent is not None:",
            "    if not there.b.is_zero or there.extent is not None:",
        ),
        (
            "exponentials that are left are relative to the maximum", "walk/left.py", "test_changed_logits.py exponentials",
            "there.shift != stats.max or ",
            "",
        ),
        (
            "what is left is divided already", "walk/left.py", "test_changed_logits.py exponentials",
            "    if there.shift == term.shift:",
            "    if True:",
        ),
        (
            "logits that forward changes are read in backward", "fuse.py", "test_changed_logits.py",
            "            read = _read_in_backward(walk) & verdict.accepted",
            "            read: set[Node] = set()",
        ),
        (
            "a result of another group is merged", "collectives/__init__.py", "test_collectives.py group",
            "    found = [each for each in _all_reduces(graph) if each.group == group]",
            "    found = _all_reduces(graph)",
        ),
        (
            "backward's all-reduces are merged", "collectives/plan.py", "test_collectives.py backward",
            '        if is_backward(node) or node.op == "output":',
            '        if node.op == "output":',
        ),
        (
            "a number between is the same on all ranks", "collectives/plan.py", "test_collectives.py number_between",
            '        if self.is_wide(node) or (has_number(node) and not node.meta.get("slime_fused")):',
            "        if self.is_wide(node):",
        ),
        (
            "a wide value is gathered", "collectives/plan.py", "test_collectives.py column",
            '        if not isinstance(found, torch.Tensor) or self.is_wide(node):\n            return False',
            '        if not isinstance(found, torch.Tensor):\n            return False',
        ),
        (
            "a maximum is a sum", "collectives/plan.py", "test_collectives.py operation",
            '    "max": aten.maximum.default,',
            '    "max": aten.add.Tensor,',
        ),
        (
            "every rank is the first", "collectives/replay.py", "test_collectives.py become_one",
            "row = call(aten.select.int, call(operator.getitem, pieces, at), 0, rank)",
            "row = call(aten.select.int, call(operator.getitem, pieces, at), 0, 0)",
        ),
        (
            "float64 is gathered in float32", "collectives/replay.py", "test_collectives.py become_one",
            "        dtype = torch.float64 if double else torch.float32",
            "        dtype = torch.float32",
        ),
        (
            "in-place all-reduces have torch's gradient", "collective_gradients.py", "test_vocabulary_parallel_processes.py gradient_of_a_plain",
            '        detached = [copy.graph.call_method("detach", (arg,)) for arg in copy.args[:2]]',
            "        detached = list(copy.args[:2])",
        ),
        (
            "two results may be one tensor", "fuse.py", "test_returned.py",
            "    returned.keep_apart(emitter.fake_mode, lambda node: node in roots or is_wide(node))\n",
            "",
        ),
        (
            "a copy of a result loses its views", "graph/returned.py", "test_returned.py views_of_both",
            "                    copies: dict[Node, Node] = {}\n                    for at in places:",
            "                    for at in places:\n                        copies: dict[Node, Node] = {}",
        ),
        (
            "a copy of a changed input comes after its readers", "graph/changes.py",
            "test_changed_rows.py beside_a_constant",
            '    *_, last = graph.find_nodes(op="placeholder")\n',
            '    *_, last = (n for n in graph.nodes if n.op in ("placeholder", "get_attr"))\n',
        ),
        (
            "an exponential of an empty row is NaN beside a one-hot", "rules/pointwise.py",
            "test_soundness.py one_hot_of_exponentials",
            "            nothing = c.emitter.where(c.is_empty(factor, stats), zero, nothing)\n",
            "            pass\n",
        ),
        (
            "a masked row is NaN beside a one-hot", "rules/pointwise.py",
            "test_soundness.py one_hot_of_masked_rows",
            "        nothing = c.where_any([term.a, term.b], nothing, zero)\n",
            "",
        ),
        (
            "columns are filled with a large value", "walk/columns.py",
            "test_soundness.py all_but_the_target or beside_a_low_number",
            "    if form.is_row and form.e.exceeds(LARGE):",
            "    if False:",
        ),
        (
            "the log of a negative number is left out", "rules/pointwise.py",
            "test_soundness.py may_be_negative or log_of_a_negative_number",
            "c.rows.is_positive(Poly.atom(inner)):",
            "not c.rows.is_given(inner):",
        ),
        (
            "logits over an infinite norm are taken out", "rules/pointwise.py",
            "test_soundness.py over_their_norm",
            "    if c.roots.root_of[form.x] not in ancestors(by.atoms()):",
            "    if True:",
        ),
        (
            "given rows are not rounded", "rules/row_scalars.py", "test_soundness.py given_rows_that_are_rounded",
            "    return None if stays_rounded(node, poly, value(first).dtype) else poly\n",
            "    return poly\n",
        ),
        (
            "given rows that are spread are not rounded", "rules/pointwise.py",
            "test_soundness.py given_rows_that_are_rounded",
            "    if form.is_row and stays_rounded(node, form.e, dtype_of(form)):",
            "    if False:",
        ),
        (
            "columns in half precision are added exactly", "algebra/arithmetic.py", "test_soundness.py probabilities_of_columns or probabilities_by_index",
            "    if factor.exps and any(hot.rounded for hot in form.hots):",
            "    if False:",
        ),
        (
            "what is not known is added last", "rules/pointwise.py", "test_soundness.py beside_a_divergence or what_they_come_to",
            "    if summed and any(map(_may_cancel, operands)):\n",
            "    if False:\n",
        ),
        (
            "half precision adds what is known exactly", "rules/pointwise.py", "test_soundness.py distances_to_the_maximum",
            "torch.float32.itemsize and _may_cancel(result):",
            "torch.float32.itemsize and False:",
        ),
        (
            "an infinite constant cancels", "rules/pointwise.py", "test_soundness.py lost_in_a_number",
            "form.e.exceeds(SWALLOWS) for",
            "False for",
        ),
        (
            "the mean of no rows is 0", "rules/reductions.py", "test_soundness.py mean_of_no_rows",
            "over, keepdim, aten.mean.dim)",
            "over, keepdim)",
        ),
        (
            "no rows are rolled", "rules/row_moves.py", "test_soundness.py roll_of_no_rows",
            "not isinstance(size, int) or not size:",
            "not isinstance(size, int):",
        ),
        (
            "rows are multiplied with NaN", "rules/pointwise.py", "test_soundness.py masked_rows_times_nan",
            "    if is_infinite(one) or is_infinite(two):",
            "    if False:",
        ),
        (
            "rows are divided by NaN", "rules/pointwise.py", "test_soundness.py masked_rows_over_nan",
            "    if poly.is_zero or poly.exceeds(sys.float_info.max):",
            "    if poly.is_zero:",
        ),
        (
            "pieces of the rows share a peak", "walk/near.py", "test_soundness.py one_is_shifted or some_are_shifted",
            "    return bool(part.terms) and part.terms.items() <= whole.terms.items()",
            "    return not part.terms.keys().isdisjoint(whole.terms)",
        ),
        (
            "log of a masked softmax", "rules/pointwise.py", "test_soundness.py log_of_rows_that",
            "    if c.rows.is_placed(term.a):",
            "    if False:",
        ),
        (
            "a multiple of NaN is a number", "algebra/poly.py", "rules/test_constants_and_columns.py multiples",
            "        return not all(abs(number) <= largest for number in self.terms.values())",
            "        return not all(abs(number) <= largest for number in [self.as_number() or 0.0])",
        ),
        (
            "float64 is computed from float32 rows", "walk/walk.py",
            "rules/test_constants_and_columns.py of_their_dtype",
            "    if dtype_of(form) is not torch.float64:\n",
            "    if form.x is not None and dtype_of(form) is not torch.float64:\n",
        ),
        (
            "a number per row is limited as inductor does not compile", "rules/pointwise.py",
            "test_soundness.py half_logits_over_their_norm",
            "    return Poly.atom(divisor)\n",
            "    return Poly.atom(c.emitter.call(aten.clamp.default, divisor, -largest, largest))\n",
        ),
        (
            "each term of a factor times -inf", "walk/context.py", "rules/test_infinite_factors.py",
            "        if len(factor.terms) < 2 or self.rows.is_placed(factor):\n",
            "        if factor.terms:\n",
        ),
        (
            "p > 0 of a negative p", "rules/guards.py", "rules/test_constants_and_columns.py negative",
            "        return (Guard.NULL, True) if positive else None",
            "        return Guard.NULL, True",
        ),
        (
            "log of a negative p", "rules/pointwise.py", "rules/test_constants_and_columns.py negative",
            "    if number is not None and not number > 0:",
            "    if False:",
        ),
        (
            "a view of a result comes back as a copy", "graph/returned.py", "test_returned.py columns_of_results",
            "                found |= one ^ other\n",
            "                pass\n",
        ),
        (
            "two ways to one result are rewritten each by itself", "graph/returned.py",
            "test_returned.py one_column_by_two_ways",
            "            paths = [{node, *ancestors([node], viewed_inputs)} for node in returned]\n",
            "            paths = [{node} for node in returned]\n",
        ),
        (
            "a part of the logits that is returned has a gradient of its own", "walk/walk.py", "test_returned.py shifted",
            "            if not (meaning.is_identity and under(arg, VIEWS) in self.context.roots.root_of):\n",
            "            if True:\n",
        ),
        (
            "sizes that data says are all the same", "graph/facts.py", "graph/test_facts.py unknown",
            "1_000_003**power",
            "1_000_003",
        ),
        (
            "the report lists what is made of the logits themselves", "fuse.py", "../report/test_report.py logits_themselves",
            "kept = set() if after else {refusal.node for refusal in account.refusals}",
            "kept: set[Node] = set()",
        ),
        (
            "the report lists nothing of what is left", "fuse.py", "../report/test_report.py logits_themselves",
            "kept = set() if after else {refusal.node for refusal in account.refusals}",
            "kept = {refusal.node for refusal in account.refusals}",
        ),
        (
            "a result may be what backward has saved", "graph/returned.py",
            "test_returned.py sums_of_exponentials",
            "                late = not group.isdisjoint(saved)\n",
            "                late = False\n",
        ),
        (
            "a number per row may cancel in the logits", "rules/pointwise.py", "test_soundness.py given_rows",
            "    if _loses_rows(c, result, operands, in_a_sum=summed and is_backward(node)):",
            "    if False:",
        ),
        (
            "a number per row may cancel in a shift", "rules/row_scalars.py", "test_soundness.py given_rows",
            "        return None if any(map(rows.is_given, gone)) and not is_backward(node) else total",
            "        return total",
        ),
        (
            "a copy that row_grad reads is computed again", "graph/recompute.py", "test_recompute.py",
            "or reader.target is slime_fused.row_grad.default",
            "or False",
        ),
        (
            "a copy that is to be kept is computed again", "graph/recompute.py", "test_recompute.py",
            'if "recompute" not in n.meta',
            "",
        ),
        (
            "a teacher's softmax is kept", "graph/recompute.py", "test_spelled_out.py was_given and interpolated",
            "node in logits or node in of_statistics or not",
            "node in logits or not",
        ),
        (
            "what reads a result is made again", "graph/recompute.py", "test_returned.py threshold",
            "if returned.intersection(node.all_input_nodes) <= found:",
            "if True:",
        ),
        (
            "backward reads what was returned", "graph/recompute.py", "test_recompute.py overwrites",
            "(node in returned or not _is_stored(node))",
            "not _is_stored(node)",
        ),
        (
            "what reads a result that is made again is kept", "graph/recompute.py", "test_recompute.py overwrites",
            "<= found:",
            "<= set():",
        ),
        (
            "what reads given logits that come back is kept", "graph/recompute.py", "test_recompute.py logits_returned",
            "if not any(map(is_given, group)) ",
            "",
        ),
        (
            "logits keep the mark of what torch takes out", "graph/recompute.py", "test_recompute.py torch",
            'node.meta.get("recompute") in _AGAIN',
            "False",
        ),
        (
            "numbers per row are not there", "graph/recompute.py", "test_recompute.py among",
            "same(found.numel() * wide.shape[-1], wide.numel())",
            "False",
        ),
        (
            "what a copy is made of is kept", "graph/recompute.py", "test_recompute.py",
            "node in of_statistics or not again.isdisjoint(node.users)",
            "node in of_statistics",
        ),
        (
            "a value that a matmul reads in backward is computed again", "graph/recompute.py", "test_recompute.py matmul",
            "return is_backward(reader) and not absorbed",
            "return False",
        ),
        (
            "backward reads rows that forward has changed", "graph/changes.py", "test_changed_rows.py",
            "    if readers - computed(graph, {}, forward=True):",
            "    if False:",
        ),
        (
            "differences of given rows are spread", "rules/row_scalars.py", "test_soundness.py given_rows",
            "    return bool(atoms) and all(map(rows.is_given, atoms))",
            "    return False",
        ),
        (
            "a clamp is forgotten where a value leaves", "algebra/forms.py", "test_soundness.py clamped_log_probs_by_weights",
            "        return not self.clamped and self.beside is None",
            "        return self.beside is None",
        ),
        (
            "a row that a guard takes whole is NaN", "rules/guards.py", "test_soundness.py empty_rows",
            "            return _beside_guarded_rows(c, mask, right)",
            "            return right",
        ),
        (
            "NaN is taken for zero", "rules/guards.py", "test_soundness.py entropy_where_not_zero",
            "at_nan=node.target in _TRUE_OF_NAN",
            "at_nan=False",
        ),
        (
            "a softmax of NaN sums to its weight", "walk/context.py", "test_soundness.py softmax_of_a_weight",
            "            if factor.is_zero or term.shift != stats.logsumexp:",
            "            if factor.as_number() is None or term.shift != stats.logsumexp:",
        ),
        (
            "only the last of equal values is spelled out", "walk/spelled_out.py", "test_spelled_out.py stored and entropies_apart",
            "            replaced[new].append(old)",
            "            replaced[new][:] = [old]",
        ),
        (
            "logits that are computed again are not rounded", "walk/spelled_out.py", "test_spelled_out.py computed_again",
            "        if _is_rounded_if_stored(c.roots.root_of[form.x]):",
            "        if False:",
        ),
        (
            "a choice of rounded numbers is not rounded", "walk/spelled_out.py", "test_spelled_out.py computed_again and capped_entropy",
            "            waiting += node.all_input_nodes\n        elif",
            "            pass\n        elif",
        ),
        (
            "a tie is rounded up", "walk/spelled_out.py", "test_spelled_out.py by_bits",
            "bitwise_and.Scalar, last, 1)",
            "bitwise_and.Scalar, last, 0)",
        ),
        (
            "float16 has no largest number", "walk/spelled_out.py", "test_spelled_out.py by_bits",
            "    if dtype is torch.float16:  #",
            "    if False:  #",
        ),
        (
            "the bits of NaN are rounded", "walk/spelled_out.py", "test_spelled_out.py by_bits",
            "    return c.emitter.where(call(aten.eq.Tensor, x, x), nearest, x)",
            "    return nearest",
        ),
        (
            "a mean of other rows shows NaN", "walk/context.py", "test_nan_masks.py",
            "            if not any(rows <= self.rows.placed_in(monomial) for rows in means)",
            "            if not means",
        ),
        (
            "a sum of exponentials is that of a softmax", "walk/context.py", "test_soundness.py",
            "            if factor.is_zero or term.shift != stats.logsumexp:",
            "            if factor.is_zero:",
        ),
        (
            "a row mask is not negated", "rules/operands.py", "test_nan_masks.py mask",
            "    return c.emitter.call(aten.logical_not.default, mask.index) if mask.negated else mask.index",
            "    return mask.index",
        ),
        (
            "a mask of columns is one of rows", "rules/guards.py", "test_nan_masks.py columns",
            "    c.operand(operand, form)\n    return c.emitter.align(",
            "    return c.emitter.align(",
        ),
        (
            "a row mask chooses between what is no form", "rules/guards.py", "test_nan_masks.py form",
            "                chosen = form_beside(c, chosen, condition.form)\n",
            "                pass\n",
        ),
        (
            "bfloat16 is as fine as float16", "rules/pointwise.py", "test_soundness.py rounded_stay",
            "    rounded = narrow.itemsize < dtype_of(form).itemsize\n",
            "    rounded = narrow.itemsize < min(4, value(form.x).dtype.itemsize)\n",
        ),
        (
            "float32 is as fine as float64", "rules/pointwise.py", "test_soundness.py rounded_stay",
            "    rounded = narrow.itemsize < dtype_of(form).itemsize\n",
            "    rounded = narrow.itemsize < 4\n",
        ),
        (
            "maxima are scaled one by one", "walk/row_nodes.py", "test_soundness.py log_sum_of_scaled",
            "        for mine in [monomial for monomial in terms if self.has_level(monomial)]:\n",
            "        for mine in []:\n",
        ),
        (
            "a column is weighted before the maximum is taken away", "walk/columns.py", "test_soundness.py smooth_labels",
            "            c.rows.levels[under(logit, SHOWN)] = c.roots.root_of[form.x]\n",
            "",
        ),
        (
            "constants are in float32", "walk/statistics.py", "test_refusals.py constants_in_float64",
            "    return torch.float32 if floating and torch.float64 not in floating else torch.float64\n",
            "    return torch.float64 if torch.float64 in floating else torch.float32\n",
        ),
        (
            "numbers of no known level are taken away in some rows", "walk/near.py", "test_soundness.py rows_beside_those",
            "    if c.rows.is_placed(form.f):  # `near`",
            "    if False:  # `near`",
        ),
        (
            "a constant is no offset", "walk/near.py", "test_soundness.py a_constant_near",
            "    if constant or len(given) > 1 or (given and levels):\n",
            "    if len(given) > 1 or (given and levels):\n",
        ),
        (
            "two numbers are one offset", "walk/near.py", "test_soundness.py two_given_numbers_near",
            "    if constant or len(given) > 1 or (given and levels):\n",
            "    if constant or (given and levels):\n",
        ),
        (
            "a number beside a column is the only offset", "walk/near.py", "test_refusals.py second",
            "    if constant or len(given) > 1 or (given and levels):\n",
            "    if constant or len(given) > 1:\n",
        ),
        (
            "numbers beside log-probs are offsets", "walk/near.py", "test_refusals.py no_offset",
            "    if form.f.is_zero or form.x is None or is_centered(c, form):\n",
            "    if form.f.is_zero or form.x is None:\n",
        ),
        (
            "what is made of logits is given", "walk/near.py", "test_refusals.py no_offset",
            "    if any(is_float_tensor(under(atom, SHOWN | CASTS)) for atom in others):\n",
            "    if False:\n",
        ),
        (
            "a part of the maximum is an offset", "walk/near.py", "test_soundness.py a_part_of_the_maximum_is_left",
            "    if any(map(c.rows.is_peak, form.e.atoms())) and not c.rows.is_placed(form.f):\n",
            "    if False:\n",
        ),
        (
            "maxima of two temperatures are two", "walk/near.py", "test_refusals.py no_offset",
            "    rest = whole.map_atoms(lambda atom: peaks[0] if atom in peaks else atom)\n",
            "    rest = whole\n",
        ),
        (
            "a constant in some rows is no offset", "walk/near.py", "test_soundness.py a_constant_in_some_rows",
            "    return bool(given) or not c.rows.is_placed(form.f)\n",
            "    return bool(given) or not monomial\n",
        ),
        (
            "what fills other rows is an offset", "walk/near.py", "test_refusals.py no_offset",
            "    return bool(given) or not c.rows.is_placed(form.f)\n",
            "    return True\n",
        ),
        (
            "logits may be broadcast", "walk/walk.py", "test_refusals.py broadcast",
            "                _check_shape(node, result)\n",
            "",
        ),
        (
            "a part of a level is subtracted first", "walk/row_nodes.py", "test_soundness.py half_the_logits",
            "for pair in pairs if whole.issuperset(pair[:2])]",
            "for pair in pairs]",
        ),
        (
            "log_sum is taken for an offset", "walk/row_nodes.py", "test_soundness.py a_maximum_beside",
            "        if self.is_level_free(two):\n",
            "        if False:\n",
        ),
        (
            "one maximum is not that of two temperatures", "walk/near.py", "test_soundness.py columns_at_two",
            "        found = _shared_peak(c, form, scale, shift)\n",
            "        found = []\n",
        ),
        (
            "a given number is scaled by itself", "walk/near.py", "test_soundness.py columns_beside_a_given",
            "            return Near(Poly.atom(share[1]), scale * Poly.atom(share[1]))\n",
            "            pass\n",
        ),
        (
            "a sum beside the maximum makes the logits", "rules/reductions.py", "test_unread_statistics.py",
            "    if is_centered(c, form):\n",
            "    if False:\n",
        ),
        (
            "a sum beside a given number is two sums", "rules/reductions.py", "test_soundness.py sums_of_distances",
            "    return Poly.atom(_plain_sum(c, form, arithmetic(c, affine, dtype_of(form))))\n",
            "    plain = Poly.atom(_plain_sum(c, form, affine.x)) * form.f\n    return plain + form.e * c.vocabulary(form)\n",
        ),
        (
            "the statistics of some rows are for all", "rules/reductions.py", "test_soundness.py some_rows",
            "    if is_centered(c, form):\n",
            "    if any(map(c.rows.is_peak, form.e.atoms())):\n",
        ),
        (
            "a view of a view of an input comes back as a copy", "fuse.py", "test_returned.py a_part_of_it",
            "{new, graph.output_node(), *views} if old in views else {new}",
            "{new, graph.output_node()} if old in views else {new}",
        ),
        (
            "a view of an input comes back as a copy", "fuse.py", "test_returned.py a_column",
            "{new, graph.output_node(), *views} if old in views else {new}",
            "{new}",
        ),
        (
            "a maximum without a softmax", "rules/reductions.py", "test_soundness.py maxima",
            "    if not set(stats.peak.atoms()) <= set(maximum.atoms()):  # -inf - -inf is NaN\n",
            "    if False:\n",
        ),
        (
            "a place without a softmax", "rules/reductions.py", "test_soundness.py maxima",
            "    place = c.emitter.where(known, place, c.emitter.full([], 0, torch.int64, place))\n",
            "",
        ),
        (
            "coefficients keep a dimension of the rows", "linear/in_forward.py", "test_linear_in_forward.py rows_of_one",
            "        if rest is None or len(rest) == dims:\n",
            "        if rest is None or len(rest) >= dims:\n",
        ),
        (
            "a number per column is one per row", "linear/in_forward.py", "test_linear_in_forward.py many_columns",
            "        if rest is None or len(shape) != len(wanted):\n            return False\n",
            "        if rest is None or len(shape) != len(wanted):\n            return self._rest(node) is not None\n",
        ),
        (
            "what is read has one dimension after its rows", "linear/in_forward.py", "test_linear_row_programs.py program",
            "        if rest is None or len(rest) == 1:\n            return at\n        return self._add([\"rows\", at, self._fixed_rest",
            "        if True:\n            return at\n        return self._add([\"rows\", at, self._fixed_rest",
        ),
        (
            "what is made of a boundary stays in the region", "row_demand/region.py", "test_row_demand.py taken_apart",
            "        each not in region for each in rows\n",
            "        False for each in rows\n",
        ),
        (
            "columns of another row are a row's own", "linear/in_forward.py", "test_linear_in_forward.py wait",
            "        if not places or min(places) < 1:  # none listed: a sum of all",
            "        if not places:",
        ),
        (
            "some columns are all of them", "linear/in_forward.py", "test_linear_in_forward.py several",
            "    return takes_all(size, *given)",
            "    return True",
        ),
        (
            "a sum with what is no multiple is one", "linear/degrees.py", "test_linear_in_forward.py wait",
            "    return PLAIN not in found[:2]",
            "    return True",
        ),
        (
            "a product of two multiples is one", "linear/degrees.py", "test_linear_in_forward.py wait",
            "    return found[:2].count(MULTIPLE) == 1",
            "    return True",
        ),
        (
            "what is divided by a multiple is one", "linear/degrees.py", "test_linear_in_forward.py wait",
            "    return found[1] == PLAIN",
            "    return True",
        ),
        (
            "any function of a multiple is one", "linear/degrees.py", "test_linear_in_forward.py wait",
            "    if rule is None or not rule(node, found):",
            "    if rule is not None and not rule(node, found):",
        ),
        (
            "what no rule knows is not counted", "fuse.py", "../report/test_report.py logits_themselves",
            'wide_values(walk) | unknown_values(walk)',
            'wide_values(walk)',
        ),
        (
            "the derivative of what logits are made of is counted", "walk/verdict.py", "../report/test_report.py made_of",
            'and (node in added or not is_backward(node))',
            'and True',
        ),
        (
            "samples of two dtypes are added in any order", "linear/samples.py", "test_linear_in_forward.py put_together",
            'isinstance(arg, Node) and value(arg).dtype == dtype for',
            'isinstance(arg, Node) for',
        ),
        (
            "samples of different values are one", "linear/in_forward.py", "test_linear_in_forward.py wait or put_together",
            'sets.setdefault(self._of_all(each), [])',
            'sets.setdefault(self._of_all(written[0]), [])',
        ),
        (
            "what is beside samples is forgotten", "linear/in_forward.py", "test_linear_in_forward.py put_together",
            'self._plus(left, right, node), [*sets, *rest])',
            'self._plus(left, right, node), [*sets])',
        ),
        (
            "what is taken away beside samples is added", "linear/in_forward.py", "test_linear_in_forward.py put_together",
            'self._signed(self._operand(each.node, node), each.sign)',
            'self._operand(each.node, node)',
        ),
        (
            "zeros times infinity are zeros", "linear/samples.py", "test_linear_in_forward.py put_together",
            'isinstance(factor, int | float) and math.isfinite(factor)',
            'isinstance(factor, int | float)',
        ),
        (
            "what is written into zeros is not rounded", "linear/samples.py", "test_linear_in_forward.py put_together",
            ' or value(source).dtype != value(node).dtype',
            '',
        ),
        (
            "samples are joined in any order", "linear/in_forward.py", "test_linear_in_forward.py wait or put_together",
            'if parts != [self._part_under(each.source) for each in found] or not are_all(parts):',
            'if not parts:',
        ),
        (
            "some samples are all", "linear/samples.py", "test_linear_in_forward.py wait or put_together",
            '    return bool(parts) and at == parts[0].size',
            '    return bool(parts)',
        ),
        (
            "what is added and taken away is one", "linear/in_forward.py", "test_linear_in_forward.py put_together",
            'return self._signed(at, written.sign)',
            'return at',
        ),
        (
            "a sample meets another", "linear/in_forward.py", "test_linear_in_forward.py wait or put_together",
            '        if any(part != found[0][0] or not same(rows, found[0][1]) for part, rows in found):',
            '        if False:',
        ),
        (
            "a sample meets what is not one of it", "linear/in_forward.py", "test_linear_in_forward.py wait or put_together",
            'of_others = node in self._parts and arg not in self._parts and not _is_one_element(arg)',
            'of_others = False',
        ),
        (
            "rows are expanded over other rows", "linear/in_forward.py", "test_linear_in_forward.py wait or put_together",
            '            if step == "expand" and ranks != (len(shape_of(node)), len(rest)):',
            '            if False:',
        ),
        (
            "columns of some samples are those of all", "linear/rewrite.py", "test_linear_in_forward.py of_some_samples",
            '        found += [nodes] if are_all(parts) else',
            '        found += [nodes] if True else',
        ),
        (
            "columns of some samples do not depend on the logits", "linear/in_forward.py", "test_linear_in_forward.py of_some_samples",
            "    moving = descendants(readers)",
            "    moving = descendants([*stats, *picks])",
        ),
        (
            "rounded logits meet the logsumexp of others", "fuse.py", "test_soundness.py their_own_logsumexp",
            "        read = walk.account.returned | _rounded_and_read(walk)",
            "        read = walk.account.returned",
        ),
        (
            "log-probs beside a number are rounded as they are", "walk/row_nodes.py", "test_soundness.py their_own_logsumexp",
            "        return own and offsets == factor.terms",
            "        return offsets == factor.terms",
        ),
        (
            "logits with an offset are rounded as log-probs are", "walk/row_nodes.py", "test_soundness.py their_own_logsumexp",
            "        return own and offsets == factor.terms",
            "        return own",
        ),
        (
            "inference tensors are saved", "../slime_compile/backend/inference.py", "../backend/test_inference.py teachers and reverse",
            "return given.clone() if",
            "return given if",
        ),
        (
            "changes of an inference tensor are lost", "../slime_compile/backend/inference.py", "../backend/test_inference.py changes",
            "if versions != [own._version for own in copies]:",
            "if False:",
        ),
        (
            "weak references lead nowhere", "../slime_compile/ops/holders.py", "../backend/test_logits_memory_is_held.py weak",
            "    if any(map(weakref.getweakrefcount, (x, owner, storage))):\n",
            "    if False:\n",
        ),
        (
            "all memory is torch's own", "../slime_compile/ops/holders.py", "../backend/test_logits_memory_is_held.py not_torchs_own",
            "    if not storage.resizable():\n",
            "    if False:\n",
        ),
        (
            "what a view is of does not count", "../slime_compile/ops/holders.py", "../backend/test_who_holds_logits.py a_view_is_saved or evaluates",
            "    if base is None:\n",
            "    if True:\n",
        ),
        (
            "only Python's references count", "../slime_compile/ops/holders.py", "../backend/test_logits_memory_is_held.py held",
            "    if seen == least:\n",
            "    if seen.python == least.python:\n",
        ),
        (
            "another input may be a view of consumed logits", "../slime_compile/ops/checks.py", "test_consumed_aliases.py",
            "        if x.numel() and other.numel() and other.untyped_storage().data_ptr() == memory:\n",
            "        if False:\n",
        ),
        (
            "rows that share memory are written", "../slime_compile/ops/checks.py", "../ops/test_ops.py",
            "    if has_internal_overlap(x) == 1:\n",
            "    if False:\n",
        ),
        (
            "a leaf is written", "../slime_compile/ops/checks.py", "../ops/test_ops.py",
            "    if owner.requires_grad and owner.is_leaf:\n",
            "    if False:\n",
        ),
        (
            "autograd does not hear of what is written", "../slime_compile/ops/operators.py", "../backend/test_consumed.py another_operation_saved",
            "    torch.autograd.graph.increment_version(x)\n",
            "",
        ),
        (
            "hooks for what is saved are not looked for", "../slime_compile/backend/consumed.py", "../backend/test_consumed.py hooks",
            "        if saved_tensors_hooks_at_work(True) is not None:\n",
            "        if False:\n",
        ),
        (
            "heads that change between are equal", "equal_heads.py", "test_equal_heads.py left",
            "    if any(is_change(n) and not changeable.isdisjoint(n.all_input_nodes) for n in graph.nodes):\n",
            "    if False:\n",
        ),
        (
            "heads in and out of no_grad are equal", "row_demand/modes.py", "test_equal_heads.py left",
            "        yield node, Modes(grad, entered, left, grad == given and entered == left)\n",
            "        yield node, Modes(True, entered, left, True)\n",
        ),
        (
            "1 and 1.0 are one number", "equal_heads.py", "test_equal_heads.py another_type",
            "    return (type(value), value) if not isinstance(value, Node) else value\n",
            "    return value\n",
        ),
        (
            "an output whose gradient is read is dropped", "function_outputs.py", "test_function_outputs.py",
            "if at in read or gradient.users]",
            "if at in read]",
        ),
        (
            "outputs keep their numbers", "function_outputs.py", "test_function_outputs.py",
            "    _renumber(call, kept)\n",
            "",
        ),
        (
            "a body of two calls is one's own", "function_outputs.py", "test_function_outputs.py two_calls",
            "    if sum(len(node.users) for node in same if node.target == argument.target) != 1:\n",
            "    if False:\n",
        ),
        (
            "another dtype is no difference", "verify.py", "test_verify.py",
            "        if want.dtype != have.dtype or want.shape != have.shape:\n",
            "        if want.shape != have.shape:\n",
        ),
        (
            "picked columns are rows", "picked_rows.py", "test_picked_rows.py stays",
            "    return last < rank_of(rows)\n",
            "    return True\n",
        ),
        (
            "a mask is over one dimension", "picked_rows.py", "test_picked_rows.py stays",
            "dims += rank_of(index) if is_mask else 1",
            "dims += 1",
        ),
        (
            "what reads picked rows sums them", "picked_rows.py", "test_picked_rows.py stay",
            "    return bool(summed) and all(_sums_columns(user) for user in summed)\n",
            "    return any(_sums_columns(user) for user in summed)\n",
        ),
        (
            "any sum is over the vocabulary", "picked_rows.py", "test_picked_rows.py stays",
            "    return any(dim % rank == rank - 1 for dim in _dims(user))\n",
            "    return True\n",
        ),
        (
            "a mean over columns is one over rows", "picked_rows.py", "test_picked_rows.py summed",
            "            whole = emit.call(aten.div.Tensor, whole, columns)\n",
            "",
        ),
        (
            "picked rows are summed in half precision", "picked_rows.py", "test_picked_rows.py half",
            "torch.promote_types(value(rows).dtype, torch.float32)",
            "value(rows).dtype",
        ),
        (
            "numbers per row leave as columns that share their memory", "picked_rows.py", "test_picked_rows.py leaves",
            "    alone = all(is_elementwise(u) and u.target not in SAME_VALUE for u in readers)\n",
            "    alone = True\n",
        ),
        (
            "what is put in is the same in all columns", "picked_rows.py", "test_picked_rows.py stays",
            "        if rank_of(source) and not same(shape_of(source)[-1], 1):\n            return None\n",
            "",
        ),
        (
            "all ranks share the code over a DTensor", "../slime_compile/backend/identity.py", "test_vocabulary_parallel_processes.py compile_cache",
            "    unkeyed = (_rank(gm), _shared(example_inputs), native.has_vectors())\n",
            "    unkeyed = (None, _shared(example_inputs), native.has_vectors())\n",
        ),
        (
            "memory that inputs share does not matter", "../slime_compile/backend/identity.py", "../backend/test_shared_inputs.py",
            "    unkeyed = (_rank(gm), _shared(example_inputs), native.has_vectors())\n",
            "    unkeyed = (_rank(gm), (), native.has_vectors())\n",
        ),
        (
            "inputs may overlap anywhere", "../slime_compile/backend/identity.py", "../backend/test_shared_inputs.py",
            "shared.append((at, before, str(behind)))",
            'shared.append((at, before, ""))',
        ),
        (
            "an optimizer that writes data changes nothing", "../slime_compile/deferred/expressions.py", "../deferred/test_compiled.py step",
            "        made.expired |= written or made.versions != made.read_versions()\n",
            "        made.expired |= made.versions != made.read_versions()\n",
        ),
        (
            "any step changes a weight", "../slime_compile/deferred/expressions.py", "../deferred/test_compiled.py step",
            "        made.expired |= written or made.versions != made.read_versions()\n",
            "        made.expired = True\n",
        ),
        (
            "a leaf's product is not watched", "../slime_compile/deferred/expressions.py", "../deferred/test_compiled.py step",
            "        made.versions = self.versions and (_version(hidden), *self.versions[1:])\n        _watch(made)\n",
            "        made.versions = self.versions and (_version(hidden), *self.versions[1:])\n",
        ),
        (
            "a reentrant checkpoint may return what is no tensor", "../slime_compile/deferred/handle.py", "../deferred/test_compiled.py around_the_head",
            "            run_by_function()\n            or any(",
            "            any(",
        ),
        (
            "a temperature is not watched", "../slime_compile/deferred/expressions.py", "../deferred/test_compiled.py temperature",
            "        made.versions = made.read_versions()\n        _watch(made)\n        return made\n\n    @property\n    def device(self) -> torch.device:\n        if self.before",
            "        made.versions = made.read_versions()\n        return made\n\n    @property\n    def device(self) -> torch.device:\n        if self.before",
        ),
        (
            "a compiled function reads an argument when it needs it", "../slime_compile/deferred/expressions.py", "../deferred/test_compiled.py before_the_read",
            "    return each.clone() if isinstance(each, Tensor) else each\n",
            "    return each\n",
        ),
        (
            "a hook after the loss is as good", "../slime_compile/deferred/expressions.py", "../deferred/test_compiled.py asked_for",
            "                self.read = True\n",
            "                pass\n",
        ),
        (
            "a frozen weight may be thawed", "../slime_compile/deferred/expressions.py", "../deferred/test_eager.py heads_line",
            "    return parameter.view_as(parameter) if used else parameter.detach()\n",
            "    return parameter.view_as(parameter) if used else parameter\n",
        ),
        (
            "no row holds garbage", "verify.py", "test_verify.py garbage",
            "    rows[2::5], rows[3::5] = math.nan, math.inf\n",
            "",
        ),
        (
            "a NaN is no difference", "verify.py", "test_verify.py",
            "        if not error <= max(_TOLERANCE.get(want.dtype, 0.0), least):\n",
            "        if error > 1:\n",
        ),
        (
            "what hides an empty row stands in", "walk/row_differences.py", "walk/test_row_differences.py empty_row",
            "any(key not in kept and key[0] not in shown for key in gone)",
            "False",
        ),
        (
            "other logits show an empty row", "walk/row_differences.py", "walk/test_row_differences.py other_logits",
            "key not in kept and key[0] not in shown for key in gone",
            "not kept and not shown - {None} for key in gone",
        ),
        (
            "a given number cancels unseen", "walk/row_differences.py",
            "walk/test_row_differences.py nothing_would_show",
            "    return gone[0][0] if given <= told else None\n",
            "    return gone[0][0]\n",
        ),
        (
            "a factor of zero is multiplied with", "walk/row_differences.py",
            "walk/test_row_differences.py factor_of_zero",
            "        found = c.where_any([Poly({guard: 1.0})], found, without)\n",
            "",
        ),
        (
            "what has one of two factors is their multiple", "walk/row_differences.py",
            "walk/test_row_differences.py two_factors",
            "    return all(powers.get(atom, 0) >= power for atom, power in of)\n",
            "    return any(powers.get(atom, 0) >= power for atom, power in of)\n",
        ),
        (
            "a level is there in the rows of a mask alone", "walk/row_differences.py",
            "walk/test_row_differences.py misses",
            "        result += term * both if whole else term\n",
            "        result += term * Poly.atom(mask) if whole else term\n",
        ),
        (
            "a temperature may take out a row", "walk/columns.py", "walk/test_row_differences.py offset and by_row",
            "    if number is not None or _is_quotient(scale):\n",
            "    if number is not None:\n",
        ),
        (
            "a share of another sum", "walk/exchange.py", "test_vocabulary_parallel.py offset",
            "    return c.shards.totals.get(total) is mass and c.shards.shared[total] == group\n",
            "    return total in c.shards.totals and c.shards.shared[total] == group\n",
        ),
        (
            "a rank's own number of a maximum is that of all", "walk/exchange.py",
            "test_vocabulary_parallel.py numbers_of_a_rank and maximum",
            "    if under(operand, RESHAPES | SAME_VALUE | CASTS) not in row_values:\n        return None\n",
            "",
        ),
        (
            "what ranks exchange has no offset", "walk/exchange.py",
            "test_vocabulary_parallel.py offset and combined_norms",
            "    if level is not None:\n",
            "    if False:\n",
        ),
        (
            "the largest over all ranks is no center", "walk/near.py", "test_vocabulary_parallel.py offset",
            "    largest = [atom for atom, _ in single[1] if c.shards.is_largest(atom)]\n",
            "    largest: list[Node] = []\n",
        ),
        (
            "the largest is written home with its factors", "rules/row_writes.py",
            "test_vocabulary_parallel.py offset",
            "        return len(monomial) > 1 and self.c.shards.is_largest(atom)\n",
            "        return False\n",
        ),
        (
            "a part of a logit may be taken", "walk/left_out.py", "test_refusals.py",
            "        if infinite or near:\n",
            "        if near:\n",
        ),
        (
            "one of several is all there is", "rules/row_scalars.py", "test_rules.py polynomial and select",
            "if same(shape_of(first)[dim], 1) else None",
            "if True else None",
        ),
        (
            "two outputs are one loss", "linear/in_forward.py", "test_linear_in_forward.py wait",
            "    if len(reached) != 1 or shape_of(reached[0]):",
            "    if not reached:",
        ),
    )
]
# fmt: on


# ---------------------------------------------------------------- running


def verdict(mutant: Mutant | None, arguments: Sequence[str]) -> str:
    """What the tests say of a copy with the mutant, or of a copy as it is: "survived", "killed", or why neither."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            source = REPOSITORY / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        if mutant is not None:
            target = copy / "fx_passes" / mutant.file
            try:
                target.write_text(mutant.applied(target.read_text()))
            except ValueError as error:
                return str(error)
        process = multiprocessing.get_context("fork").Process(target=_tests, args=(copy, arguments))
        process.start()
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
            return "killed"
        outcomes = {0: "survived", 1: "killed", 5: "no test was chosen"}
        return outcomes.get(process.exitcode or 0, f"broken, exit code {process.exitcode}")


def _tests(copy: Path, arguments: Sequence[str]) -> None:
    """In a process that has imported torch and nothing of this repository."""
    import pytest

    os.chdir(copy)
    sys.path.insert(0, str(copy))
    log = os.open(copy / "log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    os._exit(int(pytest.main([*options, *arguments])))


def verdicts(mutants: Sequence[Mutant], workers: int) -> Iterator[tuple[Mutant, str, float]]:
    def one(mutant: Mutant) -> tuple[Mutant, str, float]:
        started = time.monotonic()
        return mutant, verdict(mutant, mutant.arguments), time.monotonic() - started

    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(one, mutants)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="mutants to run; all where none is given")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    chosen = [each for each in MUTANTS if not given.names or each.name in given.names]
    import torch
    import torch._dynamo

    torch.set_num_threads(1)
    counts: dict[str, int] = {}
    for mutant, found, seconds in verdicts(chosen, given.workers):
        counts[found] = counts.get(found, 0) + 1
        print(f"{found:10} {seconds:4.0f} s  {mutant.name}", flush=True)
    print(", ".join(f"{found} {count}" for found, count in sorted(counts.items())))
    return int(counts != {"killed": len(chosen)})


if __name__ == "__main__":
    sys.exit(main())
