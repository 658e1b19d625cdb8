"""Programs made up from plain torch, run as they come: what is drawn and works in eager code is a program.

Entry points: `generate(seed, ...) -> Program`, `Program.function()`, `script(program)`. It shares nothing with the
passes' algebra: a statement is drawn from `program_parts.PARTS`, its holes are filled with variables of the right kind
and the same leading shape, and it is executed on real tensors; if torch raises, or the kind of the result is not what
its text promises, it is not in the program. What the passes make of it, and whether that is right, is for
`program_judge`.
"""

from __future__ import annotations

import linecache
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Categorical
from torch.utils.checkpoint import checkpoint

from tests.cases.changes import Doubled, DoubledUnmarked
from tests.support import program_functions
from tests.support.program_inputs import LAYOUTS, MISSES, NAMES, ROWS, Shape, Spec, make
from tests.support.program_parts import BESIDE, MOVES, PARTS, TWINS

KIND_OF = {"x": "f", "y": "f", "t": "i", "u": "i", "w": "s", "keep": "k", "allow": "m", "col": "c"}
KIND_OF |= {"tau": "r", "h": "h", "e": "e", "reward": "n", "state": "n"}
OF_KIND = {"g": "f", "q": "r", "p": "s", "o": "n"}  # a hole's second name
HOLE = re.compile(r"\{(\w+)\}")
VARIABLE = re.compile(r"\bv\d+(?:_\d+)?\b")
ASSIGNED = re.compile(
    r"(?:^|\n)\s*((?:v\d+(?:_\d+)?(?:, )?)+) = "
)  # the names before a statement's first `=`
EXPONENTIAL = re.compile("exp|softmax|entropy|Categorical|Softmax|Entropy")

# How often a statement makes each kind; families within a kind, and texts within a family, are equally likely.
WEIGHTS = {"f": 34, "s": 24, "r": 8, "m": 6, "k": 4, "i": 4, "c": 2, "z": 4, "w": 2, "move": 6}
FAMILIES = {"softmaxes": 4.0, "losses": 1.5, "taken": 2.0, "inside": 0.5, "own backward": 0.7}
FURTHER = 0.5  # of all programs have numbers beside the logits, or return values together
BESIDE_WEIGHTS = {"s": 3, "w": 2}
HEADS = ("h @ e.t()", "F.linear(h, e, e[:, 0])", "2 * (h @ e.t()) / 3", "(h @ e.t()) / tau")
OVER_HEADS: Sequence[Shape] = ((6,), (3, 3), (6, 1), (2, 3), (1, 6), (7,), (3, 2), (3,), (3, 1))
CHAINS = (
    "{} / 0.7", "2 * {}", "-{}", "torch.tanh({} / 3) * 3", "{} * tau", "{} - e[:, 0]", "{}.double()", "{}.float()",
    "{}.contiguous()", "{}[1:]", "{}[..., :-1, :]", "{}[-1:]", "{}[[0, 0, -1]]", "{}.flatten(0, -2)", "{}.unsqueeze(0)",
    "{}.transpose(0, 1)", "{}.view({}.shape)",
)  # fmt: skip
"""What is made of logits on their way out of a program."""

SCALARS = 0.6  # of the programs over heads return one number: its gradient may be taken in forward
SECOND_HEADS = 0.4  # have another head, or the same one again
LARGEST = 1e30  # beyond it all is inf, and nothing is compared


def names() -> dict[str, Any]:
    """What a program's text can name."""
    found = {k: v for k, v in vars(program_functions).items() if isinstance(v, type)}
    found |= {"Doubled": Doubled, "DoubledUnmarked": DoubledUnmarked, "checkpoint": checkpoint}
    return found | {
        "nn": torch.nn,
        "torch": torch,
        "F": F,
        "math": math,
        "dist": dist,
        "Categorical": Categorical,
    }


@dataclass(frozen=True)
class Program:
    """A function's body, one string per statement, its last a return; and what it is called with."""

    statements: tuple[str, ...]
    spec: Spec

    @property
    def source(self) -> str:
        body = "\n".join(self.statements).replace("\n", "\n    ")
        return f"def program({', '.join(NAMES)}):\n    {body}\n"

    def function(self) -> Callable[..., tuple[Tensor, ...]]:
        """The program, whose lines a report can name."""
        source = self.source
        file = f"<program {hash(source)}>"
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        space = names()
        exec(compile(source, file, "exec"), space)
        return space["program"]


def script(program: Program, note: str = "", **options: Any) -> str:
    """Reproduces a failure: `PYTHONPATH=. python the_script.py` from the repository's root."""
    quoted = "\n".join(f"    {statement!r}," for statement in program.statements)
    return f'''"""{note}

{program.source}"""
from tests.support.program_inputs import Spec
from tests.support.program_judge import Judge
from tests.support.programs import Program

program = Program(
    (
{quoted}
    ),
    {program.spec},
)
print(Judge({", ".join(f"{k}={v!r}" for k, v in options.items())}).judge(program))
'''


# ---------------------------------------------------------------- drawing


def draw_spec(rng: random.Random) -> Spec:
    lead: Shape = rng.choice(
        [(5,), (6,), (4,), (7,), (1,), (2, 3), (3, 2), (1, 4), (2, 1), (5,), (6,)]
    )
    vocab = rng.choice([7, 7, 6, 9, 5, 33])
    dtype = rng.choice(["float32"] * 5 + ["float64"] * 2 + ["float16", "bfloat16", "bfloat16"])
    row = rng.choice([dtype, "float32"])
    layouts = [*LAYOUTS, *["plain"] * 8]
    return Spec(
        lead,
        vocab,
        dtype,
        row,
        (rng.choice(layouts), rng.choice(layouts)),
        (rng.choice(["leaf", "inside", "inside", "leaf", "none"]), rng.choice(["none", "leaf"])),
        _rows(rng),
        rng.choice([*MISSES]),
    )


def _rows(rng: random.Random) -> tuple[str, ...]:
    if rng.random() < 0.4:
        return ("plain",)
    return ("plain", *rng.sample([*ROWS], rng.randint(1, 3)))


def generate(seed: int, spec: Spec | None = None, collectives: bool = False) -> Program:
    """The program of a seed; drawn again where little is left of it, nine times of ten where it has no exponential.

    What half of the programs have beside, numbers that are not of the logits and values that are returned together, is
    drawn by itself: the others are what they are without it.
    """
    rng, beside = random.Random(seed), random.Random(f"beside {seed}")
    further = not collectives and beside.random() < FURTHER
    while True:
        drawn = _Drawing(rng, spec or draw_spec(rng), collectives)
        if further and not spec and beside.random() < 0.3:
            drawn = _Drawing(rng, replace(drawn.spec, row_dtype="float64"), collectives)
        for _ in range(rng.randint(2, 10)):
            drawn.statement()
            if further:
                drawn.further(beside)
        returned = drawn.returned()
        if not returned:
            continue
        if further:
            returned += drawn.together(beside)
        statements = needed((*drawn.statements, f"return ({', '.join(returned)},)"))
        text = "".join(statements)
        if collectives and "dist." not in text and "AllReduced" not in text:
            continue
        if len(statements) > 2 and (EXPONENTIAL.search(text) or rng.random() < 0.1):
            return Program(statements, drawn.spec)


def over_a_head(seed: int) -> Program:
    """A program of a seed whose logits a matmul makes, of finite numbers."""
    rng = random.Random(f"head {seed}")
    dtype = rng.choice(["float32", "float32", "float64", "bfloat16", "float16"])
    spec = Spec(
        lead=rng.choice(OVER_HEADS),
        vocab=rng.choice([6, 7, 9, 33]),
        dtype=dtype,
        row_dtype=rng.choice([dtype, dtype, "float32"]),
        grads=(rng.choice(["leaf", "inside"]), "none"),
        misses=rng.choice([*MISSES]),
    )
    drawn = generate(seed, spec)
    *statements, last = drawn.statements
    if rng.random() < SCALARS:
        values = last.removeprefix("return ")
        last = f"return (sum(0.7 * v.sum() for v in {values} if v.is_floating_point()),)"
    heads = [f"x = {rng.choice(HEADS)}"]
    if rng.random() < SECOND_HEADS:
        heads.append(f"y = {rng.choice(['h @ e.t()', 'h @ e.detach().t()', 'h @ (e * 0.5).t()'])}")
    return Program((*heads, *statements, last), spec)


def returning_logits(seed: int) -> Program:
    """A program of a seed, over a head or given logits, that returns a number and logits, as models and trainers do."""
    rng = random.Random(f"returned {seed}")
    program = over_a_head(seed) if rng.random() < 0.75 else generate(seed)
    *statements, last = program.statements
    values = last.removeprefix("return ")
    if not values.startswith("(sum("):
        values = f"(sum(0.7 * v.sum() for v in {values} if v.is_floating_point()),)"
    begins = 1 if statements and statements[0].startswith("x = ") else 0
    made = "x"
    for text in rng.sample(CHAINS, rng.randint(0, 3)):
        made = text.replace("{}", f"({made})")
    statements.insert(rng.choice([begins, len(statements)]), f"out = {made}")
    return replace(program, statements=(*statements, f"return ({values}[0], out)"))


def needed(statements: Sequence[str]) -> tuple[str, ...]:
    """Without what nothing returned or written over depends on."""
    live: set[str] = set()
    kept = []
    for statement in reversed(statements):
        used = set(VARIABLE.findall(statement))
        made = set(VARIABLE.findall(" ".join(ASSIGNED.findall(statement))))
        if not made or made & live:
            kept.append(statement)
            live |= used
    return tuple(reversed(kept))


@dataclass
class _Drawing:
    """A program in the making: its statements, its variables' values and kinds."""

    rng: random.Random
    spec: Spec
    collectives: bool
    statements: list[str] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=lambda: dict(KIND_OF))
    values: dict[str, Any] = field(default_factory=names)
    number: int = 0

    def __post_init__(self) -> None:
        arguments = make(self.spec, seed=0).arguments
        self.values.update(zip(NAMES, arguments, strict=True))

    def statement(self) -> None:
        weights = WEIGHTS | ({"d": 25} if self.collectives else {})
        for _ in range(20):
            kind = self.rng.choices([*weights], [*weights.values()])[0]
            if self.move() if kind == "move" else self.part(kind):
                return

    def further(self, rng: random.Random) -> None:
        """One statement of three with numbers beside the logits; nothing of it is drawn by `self.rng`."""
        if rng.random() > 0.35:
            return
        own, self.rng = self.rng, rng
        kind = rng.choices([*BESIDE_WEIGHTS], [*BESIDE_WEIGHTS.values()])[0]
        self.part(kind, BESIDE[kind])
        self.rng = own

    def part(self, kind: str, families: dict[str, tuple[str, ...]] | None = None) -> bool:
        families = families or PARTS[kind]
        family = self.rng.choices([*families], [FAMILIES.get(f, 1.0) for f in families])[0]
        text = self.rng.choice(families[family])
        filled = self.filled(text)
        if filled is None:
            return False
        name = f"v{self.number}"
        block = filled.startswith("\n")
        made = filled.strip().replace("{out}", name) if block else f"{name} = {filled}"
        if kind == "f" and not self.collectives and self.rng.random() < 0.05:
            made = "with torch.no_grad():\n    " + made.replace("\n", "\n    ")
        return self.run(made, {} if kind == "w" else {name: "r" if kind == "d" else kind})

    def filled(self, text: str) -> str | None:
        """The text with variables in its holes, all of one lead; newer variables are likelier."""
        holes = list(dict.fromkeys(HOLE.findall(text)))
        lead: Shape | None = None
        chosen = {"out": "{out}"}
        for hole in holes:
            if hole == "out":
                continue
            kind = OF_KIND.get(hole, hole)
            found = [n for n, k in self.kinds.items() if k == kind and self.beside(n, kind, lead)]
            if not found:
                return None
            name = self.rng.choices(found, [self.liking(n, at) for at, n in enumerate(found)])[0]
            lead = lead if kind in "czhe" or lead is not None else self.lead(name, kind)
            chosen[hole] = name
        return HOLE.sub(lambda hole: chosen[hole[1]], text)

    def liking(self, name: str, age: int) -> float:
        """What was just made and is not used yet is likeliest to be used."""
        unused = name not in NAMES and not any(
            re.search(rf"\b{name}\b", s) for s in self.statements[-3:] if not s.startswith(name)
        )
        return (1 + 2 * age) * (6 if unused else 1)

    def beside(self, name: str, kind: str, lead: Shape | None) -> bool:
        return kind in "czhe" or lead is None or self.lead(name, kind) == lead

    def lead(self, name: str, kind: str) -> Shape:
        shape = tuple(self.values[name].shape)
        return shape[:-1] if kind in "fmr" else shape

    def move(self) -> bool:
        """Rows of up to one variable of each kind, moved alike."""
        text = self.rng.choice(MOVES)
        anchor = self.rng.choice([n for n, k in self.kinds.items() if k == "f"])
        lead = self.lead(anchor, "f")
        moved = [anchor]
        for kind in "fisrkm":
            beside = [
                n
                for n, k in self.kinds.items()
                if k == kind and n != anchor and self.lead(n, k) == lead
            ]
            moved += beside[-1:]
        out = {f"v{self.number}_{at}": self.kinds[name] for at, name in enumerate(moved)}
        return self.run(f"{', '.join(out)} = ({text} for v in ({', '.join(moved)}))", out)

    def run(self, made: str, out: dict[str, str]) -> bool:
        """Execute the statement; it stays if torch agrees and its results are of the kinds it promises."""
        values = dict(self.values)
        try:
            exec(made, values)
        except Exception:  # any refusal of torch is one: the statement is not drawn
            return False
        if not all(self.is_kind(values[name], kind) for name, kind in out.items()):
            return False
        self.values, self.number = values, self.number + 1
        self.statements.append(made)
        self.kinds.update(out)
        return True

    def is_kind(self, value: object, kind: str) -> bool:
        if not isinstance(value, Tensor) or value.numel() == 0 or value.numel() > 4000:
            return False
        if kind == "any":
            return True
        if kind in "mk":
            return value.dtype is torch.bool and (kind == "k" or value.shape[-1] == self.spec.vocab)
        if kind == "i":
            return True
        last = {"f": self.spec.vocab, "c": self.spec.vocab, "r": 1}.get(kind)
        if last is not None and (value.ndim < 1 or value.shape[-1] != last):
            return False
        if (kind == "z" and value.ndim) or (kind == "c" and value.ndim != 1):
            return False
        return kind == "s" or kind == "z" or value.is_floating_point()

    def returned(self) -> list[str]:
        """One to three values that come of x: rows and numbers mostly, the newest first."""
        made = [n for n, k in self.kinds.items() if k in "srz" and n not in NAMES]
        wide = [n for n, k in self.kinds.items() if k in "fc" and n not in NAMES]
        alive = [n for n in made if self.tells(n)]
        if not alive:
            return []
        chosen = alive[-self.rng.randint(1, 3) :]
        if wide and self.rng.random() < 0.08:
            chosen.append(self.rng.choice(wide))
        return [self.spread(name) for name in chosen]

    def together(self, rng: random.Random) -> list[str]:
        """Twins, or rows and numbers as they are, whether they need a gradient or not."""
        own, self.rng = self.rng, rng
        found: list[str] = []
        if rng.random() < 0.6:
            twins = self.filled(" # ".join(rng.choice(TWINS)))
            found = self.twins(twins.split(" # ")) if twins else []
        if rng.random() < 0.45:
            found.append(rng.choice([n for n, k in self.kinds.items() if k in "srzn"]))
        self.rng = own
        return found

    def twins(self, texts: Sequence[str]) -> list[str]:
        """Variables with these values; one of four that is computed is computed without a gradient."""
        found = []
        for text in texts:
            name = f"v{self.number}"
            made = f"{name} = {text}"
            if "(" in text and self.rng.random() < 0.25:
                made = f"with torch.no_grad():\n    {made}"
            if not self.run(made, {name: "any"}):
                return []
            found.append(name)
        return found

    def tells(self, name: str) -> bool:
        value = self.values[name]
        needs = value.requires_grad or self.spec.grads == ("none", "none")
        return needs and bool((value.detach().abs() < LARGEST).any())

    def spread(self, name: str) -> str:
        """As it is, or reduced by what a loss does at its end."""
        texts = (
            ("{}", "{}", "{}.sum()", "({} * 2)[:1]", "{}.flatten()[1:]")
            if self.values[name].ndim
            else ("{}",)
        )
        return self.rng.choice(texts).format(name)


def programs(
    start: int, count: int, make: Callable[[int], Program] = generate
) -> Iterator[tuple[int, Program]]:
    for seed in range(start, start + count):
        yield seed, make(seed)
