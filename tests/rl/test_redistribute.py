"""All-gather layout to zigzag, in real processes over gloo."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from slime_compile.rl.packed import response_slices, split_responses
from slime_compile.rl.packing import Packing
from slime_compile.rl.redistribute import redistribute_to_zigzag
from tests.support.dispatch import Collectives
from tests.support.ranks import on_ranks


@dataclass(frozen=True)
class Case:
    """What each rank holds. Sets hold pairs (name, rank)."""

    name: str
    ranks: int
    totals: list[int]
    responses: list[int]
    dtypes: dict[str, torch.dtype] = field(
        default_factory=lambda: {"log_probs": torch.float32, "entropy": torch.float32}
    )
    untracked: set[tuple[str, int]] = field(default_factory=set)
    absent: set[tuple[str, int]] = field(default_factory=set)  # the whole name is None
    none_for_empty: bool = False  # None for a sample that the rank has no response of
    no_grad: bool = False

    def packing(self, rank: int) -> Packing:
        return Packing(
            self.totals,
            self.responses,
            context_parallel="all_gather",
            cp_rank=rank,
            cp_size=self.ranks,
        )

    def zigzag(self, rank: int) -> Packing:
        return replace(self.packing(rank), context_parallel="zigzag", rows=None)

    def full(self, name: str) -> list[Tensor]:
        """The values of whole responses; special ones too, which must arrive as they are."""
        generator = torch.Generator().manual_seed(len(name))
        full = [
            torch.randn(r, dtype=torch.float64, generator=generator).to(self.dtypes[name])
            for r in self.responses
        ]
        if full and len(full[0]) > 2:
            full[0][1] = -torch.inf
        return full

    def weights(self, name: str) -> list[Tensor]:
        generator = torch.Generator().manual_seed(100 + len(name))
        return [
            torch.rand(r, dtype=torch.float64, generator=generator).to(self.dtypes[name])
            for r in self.responses
        ]

    def held(self, tensors: list[Tensor], packing: Packing) -> list[Tensor]:
        """The parts of per-sample tensors that a rank holds."""
        return [
            torch.cat([tensor[part.response] for part in parts] or [tensor[:0]])
            for tensor, parts in zip(tensors, response_slices(packing), strict=True)
        ]

    def tracked(self, name: str) -> bool:
        """Some rank holds values of the name that need a gradient, or none holds any."""
        return not self.no_grad and any(
            any(len(h) or not sum(self.responses) for h in self.held(self.full(name), packing))
            and (name, rank) not in self.untracked | self.absent
            for rank, packing in enumerate(map(self.packing, range(self.ranks)))
        )


LP, ENT = "log_probs", "entropy"
BOTH = (LP, ENT)
SPREAD = ([9, 14, 5, 8], [6, 11, 1, 0])  # responses over all ranks, one of one token, one of none
# All responses in the first half: the last ranks hold prompts only.
EARLY = ([7, 30], [5, 1])
CASES = [
    Case("all tracked", 2, *SPREAD),
    Case("three ranks", 3, *SPREAD),
    Case("four ranks", 4, *SPREAD),
    Case("one rank", 1, *SPREAD),
    Case("ranks without a response", 4, *EARLY),
    Case("None for what is not held", 4, *EARLY, none_for_empty=True),
    Case("names absent where nothing is held", 4, *EARLY, absent={(LP, 2), (ENT, 1), (ENT, 2)}),
    Case("entropy not computed", 3, *SPREAD, absent={(ENT, r) for r in range(3)}),
    Case("nothing computed", 2, *SPREAD, absent={(n, r) for n in BOTH for r in range(2)}),
    Case("entropy only logged", 3, *SPREAD, untracked={(ENT, r) for r in range(3)}),
    # The one that hung: entropy under no_grad where there are responses, on some ranks.
    Case("entropy without gradient on one rank", 3, *SPREAD, untracked={(ENT, 1)}),
    Case("entropy with gradient on one rank", 3, *SPREAD, untracked={(ENT, 0), (ENT, 2)}),
    Case(
        "entropy with gradient only where there is none",
        4,
        *EARLY,
        untracked={(ENT, r) for r in (0, 1, 3)},
        absent={(ENT, 2)},
    ),
    Case("one rank needs no gradient", 3, *SPREAD, untracked={(n, 1) for n in BOTH}),
    Case("no rank needs a gradient", 3, *SPREAD, untracked={(n, r) for n in BOTH for r in range(3)}),
    Case("no_grad", 2, *SPREAD, no_grad=True),
    Case("no response at all", 2, [4, 3], [0, 0]),
    Case("no sample", 2, [], []),
    Case("other dtypes", 3, *SPREAD, {LP: torch.bfloat16, ENT: torch.float64}),
    Case("dtypes unknown on some ranks", 4, *EARLY, {LP: torch.float16, ENT: torch.float64},
         none_for_empty=True),
]  # fmt: skip


def run_case(rank: int, case: Case) -> list[str]:
    """Compares with the reference on this rank; what is wrong, in words."""
    packing = case.packing(rank)
    leaves = {
        name: [
            held.requires_grad_((name, rank) not in case.untracked)
            for held in case.held(case.full(name), packing)
        ]
        for name in case.dtypes
    }
    values = {name: given(case, rank, name, leaves[name]) for name in case.dtypes}
    any_tracked = any(map(case.tracked, case.dtypes))
    wrong: list[str] = []
    with Collectives() as forward, torch.set_grad_enabled(not case.no_grad):
        moved = redistribute_to_zigzag(values, packing)
    if forward.count != 1:
        wrong.append(f"{forward.count} collectives in the forward")
    if list(moved) != list(values):
        wrong.append(f"names {list(moved)}")
    for name in case.dtypes:
        wrong += wrong_values(case, rank, name, moved[name])
    with Collectives() as backward:
        run_backward(case, rank, moved)
    if backward.count != any_tracked:
        wrong.append(f"{backward.count} collectives in the backward")
    for name in case.dtypes:
        wrong += wrong_gradients(case, rank, name, leaves[name])
    return wrong + unpaired(rank, case.ranks)


def given(case: Case, rank: int, name: str, leaves: list[Tensor]) -> list[Tensor | None] | None:
    if (name, rank) in case.absent:
        return None
    return [None if case.none_for_empty and not len(leaf) else leaf for leaf in leaves]


def wrong_values(case: Case, rank: int, name: str, got: list[Tensor] | None) -> list[str]:
    if all((name, r) in case.absent for r in range(case.ranks)):
        return [f"{name} is not None"] if got is not None else []
    assert got is not None
    expected = case.held(case.full(name), case.zigzag(rank))
    wrong = []
    if len(got) != len(expected) or not all(map(same, got, expected)):
        wrong.append(f"{name}: got {got}, expected {expected}")
    if any(value.requires_grad != case.tracked(name) for value in got):
        wrong.append(f"{name}: requires_grad is not {case.tracked(name)}")
    return wrong


def run_backward(case: Case, rank: int, moved: dict[str, list[Tensor] | None]) -> None:
    """This rank's part of sum(weight * value ** 2), whose gradient differs in every place."""
    loss = torch.zeros((), dtype=torch.float64)
    for name, values in moved.items():
        weights = case.held(case.weights(name), case.zigzag(rank))
        for weight, value in zip(weights, values or (), strict=values is not None):
            loss = loss + (weight * value * value).sum()
    if loss.requires_grad:
        loss.backward()


def wrong_gradients(case: Case, rank: int, name: str, leaves: list[Tensor]) -> list[str]:
    needs = case.tracked(name) and (name, rank) not in case.untracked | case.absent
    wrong = []
    weights = case.held(case.weights(name), case.packing(rank))
    for leaf, weight in zip(leaves, weights, strict=True):
        if not len(leaf):
            continue
        reference = leaf.detach().clone().requires_grad_()
        (weight * reference * reference).sum().backward()
        assert reference.grad is not None
        if not needs and leaf.grad is not None:
            wrong.append(f"{name}: an unexpected gradient")
        elif needs and (leaf.grad is None or not same(leaf.grad, reference.grad)):
            wrong.append(f"{name}: gradient {leaf.grad}, expected {reference.grad}")
    return wrong


def same(got: Tensor, expected: Tensor) -> bool:
    return got.dtype == expected.dtype and torch.equal(got, expected)


def unpaired(rank: int, ranks: int) -> list[str]:
    """A collective that one rank entered too often would take part in this one."""
    check = torch.full((3,), float(rank))
    dist.all_reduce(check)
    return [] if check.tolist() == [sum(range(ranks))] * 3 else [f"unpaired: {check}"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_gradients_and_collectives(case: Case) -> None:
    assert on_ranks(case.ranks, run_case, case) == [[]] * case.ranks


class AllReduce(torch.autograd.Function):
    """As torch.distributed.nn.functional.all_reduce, which is deprecated."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def naive(rank: int, case: Case) -> None:
    """Each name with its own all-reduce in both directions, zeros that require a gradient."""
    total = torch.zeros(())
    for name in case.dtypes:
        samples = []
        held = case.held(case.full(name), case.packing(rank))
        for value, parts in zip(held, response_slices(case.packing(rank)), strict=True):
            length = case.responses[len(samples)]
            if not parts:
                samples.append(torch.zeros(length, requires_grad=True))
                continue
            value.requires_grad_((name, rank) not in case.untracked)
            before, after = parts[0].response.start, length - parts[0].response.stop
            samples.append(torch.nn.functional.pad(value, (before, after)))
        total = total + AllReduce.apply(torch.cat(samples)).sum()
    total.backward()
    assert not unpaired(rank, case.ranks)


def test_the_naive_way_fails() -> None:
    """The tests above can fail: the same case without the agreement hangs, or gloo gives up."""
    untracked = {(ENT, r) for r in range(3)}
    # Rank 2 holds both responses, and so makes no zeros.
    case = Case("entropy only logged", 3, [22, 8], [1, 7], untracked=untracked)
    assert on_ranks(3, run_case, case) == [[]] * 3
    results = on_ranks(3, naive, case, timeout_s=2)
    assert any(isinstance(result, RuntimeError) for result in results), results


def two_groups(rank: int, case: Case) -> list[str]:
    """Four ranks, two context-parallel groups, of which only one tracks gradients."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine, place = rank % 2, rank // 2
    packing = case.packing(place)
    zigzag = replace(packing, context_parallel="zigzag", rows=None)
    held = [h.requires_grad_(mine == 1) for h in case.held(case.full(LP), packing)]
    moved = redistribute_to_zigzag({LP: held}, packing, groups[mine])[LP]
    assert moved is not None
    wrong = []
    if not all(map(same, moved, case.held(case.full(LP), zigzag))):
        wrong.append(f"values {moved}")
    if mine == 1:
        torch.cat(moved).sum().backward()
        if any(leaf.grad is None or not (leaf.grad == 1).all() for leaf in held):
            wrong.append("gradient")
    return wrong + unpaired(rank, 4)


def test_two_groups_in_one_world() -> None:
    assert on_ranks(4, two_groups, Case("two groups", 2, *SPREAD)) == [[]] * 4


def into_a_model(rank: int, case: Case) -> list[Any]:
    """A rank without a response still runs its model's backward, which may hold collectives."""
    packing = case.packing(rank)
    weight = torch.ones((), requires_grad=True)
    rows = weight * torch.ones(packing.local_rows)
    moved = redistribute_to_zigzag({LP: split_responses(rows, packing)}, packing)[LP]
    assert moved is not None
    torch.cat(moved).sum().backward()
    return [None if weight.grad is None else weight.grad.item()]


def test_a_rank_without_response_reaches_its_model() -> None:
    case = Case("early", 4, *EARLY)
    counts = [
        float(sum(map(len, case.held(case.full(LP), case.packing(rank))))) for rank in range(4)
    ]
    assert 0.0 in counts
    assert on_ranks(4, into_a_model, case) == [[count] for count in counts]


def with_a_fault(rank: int, fault: str) -> str:
    """One rank's values are wrong; every rank must raise, and go on together."""
    case = Case("faults", 3, [14, 14, 8], [6, 6, 3])  # rank 1 holds parts of two responses
    packing = case.packing(rank)
    values: dict[str, list[Tensor] | None] = {
        name: case.held(case.full(name), packing) for name in BOTH
    }
    entropy = values[ENT]
    assert entropy is not None
    if rank == 1:
        if fault == "shape":
            values[ENT] = [torch.zeros(99), *entropy[1:]]
        elif fault == "samples":
            values[ENT] = entropy[1:]
        elif fault == "integers":
            values[ENT] = [value.int() for value in entropy]
        elif fault == "mixed":
            values[ENT] = [entropy[0].half(), *entropy[1:]]
        elif fault == "dtype":
            values[ENT] = [value.double() for value in entropy]
        elif fault == "absent":
            values[ENT] = None
        elif fault == "rank":
            packing = replace(packing, cp_rank=0)
    try:
        redistribute_to_zigzag(values, packing)
    except (ValueError, RuntimeError) as error:
        assert not unpaired(rank, 3)
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("fault", "own", "others"),
    [
        ("shape", "ValueError: `values['entropy']` must have shapes [(1,), (", "RuntimeError"),
        ("samples", "ValueError: `values['entropy']` must have shapes", "RuntimeError"),
        ("integers", "ValueError: `values['entropy']` must have one dtype of", "RuntimeError"),
        ("mixed", "ValueError: `values['entropy']` must have one dtype of", "RuntimeError"),
        ("rank", "ValueError: `packing.cp_rank` must be the rank in `group`, 1", "RuntimeError"),
        ("dtype", "ValueError: `values['entropy']` must have one dtype on all ranks", "ValueError"),
        ("absent", "ValueError: `values['entropy']` is None on a rank with", "ValueError"),
    ],
)
def test_every_rank_raises(fault: str, own: str, others: str) -> None:
    results = on_ranks(3, with_a_fault, fault)
    assert results[1].startswith(own), results
    for rank in (0, 2):
        expected = f"{others}: ranks [1] of the group" if others == "RuntimeError" else own
        assert results[rank].startswith(expected), results


def wrong_program(rank: int) -> list[str]:
    messages = []
    for packing in (
        Packing([4], [2], context_parallel="zigzag", cp_rank=rank, cp_size=2),
        Packing([4], [2], context_parallel="all_gather", cp_rank=rank, cp_size=3),
    ):
        with pytest.raises(ValueError, match="must") as error:
            redistribute_to_zigzag({}, packing)
        messages.append(str(error.value))
    return messages


def test_errors_that_are_the_same_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for messages in on_ranks(2, wrong_program):
        assert "must be 'all_gather', the layout to move from, got 'zigzag'" in messages[0]
        assert "`group` must have packing.cp_size = 3 ranks, got 2" in messages[1]
    # another test may have begun a default group
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=None))
    with pytest.raises(ValueError, match="`group` must be given"):
        redistribute_to_zigzag({}, Packing([4], [2], context_parallel="all_gather"))
