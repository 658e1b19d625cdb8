"""PPO steps of a tiny GPT on packed samples, without and with `slime_fused`, in one run.

    python examples/packed_ppo_step.py [--steps 24] [--inner inductor] [--plot FILE]

What a trainer does between rollouts: micro-batches under a cap of tokens (`partition_by_tokens`, `max_tokens_for`),
packed (`Packing`, `shifted_targets`, `join_responses`), old and reference log-probs without gradient, then optimizer
steps on a clipped loss with an entropy bonus and a KL penalty. The loss is plain torch; the second run compiles it,
nothing else differs. Prints loss and peak memory of both, and plots them.

Samples are drawn once, by the initial policy, for both runs: with rollouts of its own, one token that rounding turns
into another would make a different experiment. Needs torch and matplotlib; about a minute on one core.
"""

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slime_compile import (
    Packing,
    flatten_logits,
    join_responses,
    max_tokens_for,
    memory_probe,
    partition_by_tokens,
    reports,
    shifted_targets,
)

VOCAB, HIDDEN, HEADS, LAYERS, POSITIONS = 8192, 64, 4, 2, 64
SAMPLES, PROMPT_MAX, RESPONSE_MAX = 48, 16, 40
BATCH = 24  # samples of one rollout batch; old log-probs are made anew for each
STEPS_PER_BATCH = 3
LOSS_MEMORY = 40 * 2**20  # for the logits of a micro-batch and their gradient
TEMPERATURE, CLIP, ENTROPY_WEIGHT, KL_WEIGHT = 0.9, 0.2, 0.01, 0.05


# ---- the model ----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)])
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(
            nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        # x [T, hidden], mask [T, T] bool
        q, k, v = self.qkv(self.norms[0](x)).view(len(x), 3, HEADS, -1).permute(1, 2, 0, 3)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(attended.transpose(0, 1).flatten(1))
        return x + self.mlp(self.norms[1](x))


class TinyGPT(nn.Module):
    """Packed samples of T tokens to logits `[1, T, VOCAB]`; a token sees its own sample up to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(POSITIONS, HIDDEN)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, samples: Sequence[Tensor]) -> Tensor:
        logits: Tensor = self.head(self.states(samples))
        return logits[None]

    def states(self, samples: Sequence[Tensor]) -> Tensor:
        sample = torch.cat([torch.full((len(s),), i) for i, s in enumerate(samples)])
        place = torch.cat([torch.arange(len(s)) for s in samples])
        mask = (sample[:, None] == sample) & (place[:, None] >= place)
        x = self.tokens(torch.cat(list(samples))) + self.places(place)
        for block in self.blocks:
            x = block(x, mask)
        normed: Tensor = self.norm(x)
        return normed


# ---- the loss, as one would write it ------------------------------------------------------------------------------


def log_probs_of(rows: Tensor, target: Tensor) -> Tensor:
    """The targets' log-probs, [T], of logits [T, V]."""
    log_probs = torch.log_softmax(rows / TEMPERATURE, -1)
    return log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)


def ppo_loss(
    rows: Tensor, target: Tensor, old: Tensor, reference: Tensor, advantage: Tensor, weight: Tensor
) -> Tensor:
    """Clipped policy loss, entropy bonus, KL penalty, of logits [T, V]; `weight` is 0 where not trained on."""
    log_probs_all = torch.log_softmax(rows / TEMPERATURE, -1)
    entropy = -(log_probs_all.exp() * log_probs_all).sum(-1)
    log_probs = log_probs_all.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    ratio = (log_probs - old).exp()
    policy = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP))
    difference = reference - log_probs
    kl = (
        difference.exp() - difference - 1
    )  # never negative (Schulman, "Approximating KL divergence")
    return (weight * (policy - ENTROPY_WEIGHT * entropy + KL_WEIGHT * kl)).sum()


# ---- samples ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    tokens: Tensor  # [total length] int64
    response: int  # its tokens at the end
    advantage: float = 0.0


@torch.no_grad()
def rollout(model: TinyGPT, seed: int) -> list[Sample]:
    """Samples of random prompts; the reward is the share of tokens from the lower half of the vocabulary."""
    draw = random.Random(seed)
    lengths = [(draw.randint(2, PROMPT_MAX), draw.randint(1, RESPONSE_MAX)) for _ in range(SAMPLES)]
    tokens = [torch.randint(VOCAB, (prompt,)) for prompt, _ in lengths]
    for step in range(max(response for _, response in lengths)):
        growing = [i for i, (_, response) in enumerate(lengths) if step < response]
        ends = torch.tensor([len(tokens[i]) for i in growing]).cumsum(0) - 1
        rows = model.head(model.states([tokens[i] for i in growing])[ends])
        drawn = torch.multinomial((rows / TEMPERATURE).softmax(-1), 1)
        for i, token in zip(growing, drawn, strict=True):
            tokens[i] = torch.cat([tokens[i], token])
    rewards = torch.stack(
        [(t[-r:] < VOCAB // 2).float().mean() for t, (_, r) in zip(tokens, lengths, strict=True)]
    )
    advantages = (rewards - rewards.mean()) / rewards.std()
    return [
        Sample(t, response, advantage)
        for t, (_, response), advantage in zip(tokens, lengths, advantages.tolist(), strict=True)
    ]


@dataclass(frozen=True)
class MicroBatch:
    """What the loss takes beside the logits, each [T]: one number per row of the packed logits."""

    samples: list[Tensor]
    packing: Packing
    target: Tensor
    advantage: Tensor
    weight: Tensor
    old: Tensor = field(default_factory=lambda: torch.empty(0))
    reference: Tensor = field(default_factory=lambda: torch.empty(0))


def micro_batches(batch: list[Sample]) -> list[MicroBatch]:
    """The batch in micro-batches whose loss fits into LOSS_MEMORY."""
    lengths = [len(sample.tokens) for sample in batch]
    max_tokens = max_tokens_for(LOSS_MEMORY, VOCAB, HIDDEN, torch.float32)
    trained_on = sum(sample.response for sample in batch)
    return [
        packed([batch[i] for i in indices], 1 / trained_on)
        for indices in partition_by_tokens(lengths, max_tokens)
    ]


def packed(samples: list[Sample], token_weight: float) -> MicroBatch:
    packing = Packing([len(s.tokens) for s in samples], [s.response for s in samples])
    tokens = [s.tokens for s in samples]

    def rows(values: list[float]) -> Tensor:
        per_sample = [torch.full((s.response,), v) for s, v in zip(samples, values, strict=True)]
        return join_responses(per_sample, packing)

    return MicroBatch(
        tokens,
        packing,
        shifted_targets(tokens, packing),
        rows([s.advantage for s in samples]),
        rows([token_weight] * len(samples)),
    )


# ---- training -----------------------------------------------------------------------------------------------------


@dataclass
class Curve:
    """One run: its loss at every step, the largest peak of a step."""

    loss: list[float] = field(default_factory=list)
    peak_mib: float = 0.0


def train(
    model: TinyGPT,
    reference: TinyGPT,
    samples: list[Sample],
    steps: int,
    compiled: Callable[[Callable[..., Tensor]], Callable[..., Tensor]],
) -> Curve:
    """Trains `model` on the samples, a batch of them after another; `compiled` is applied to what sees logits."""
    loss_fn, log_prob_fn = compiled(ppo_loss), compiled(log_probs_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    curve = Curve()
    for start in range(0, steps, STEPS_PER_BATCH):
        number = start // STEPS_PER_BATCH
        first = number * BATCH % len(samples)
        parts = with_log_probs(
            model, reference, micro_batches(samples[first : first + BATCH]), log_prob_fn
        )
        for _ in range(min(STEPS_PER_BATCH, steps - start)):
            warm = number > 0  # compiling is no part of a step
            with memory_probe("step", enabled=warm, device="cpu") as probe:
                curve.loss.append(step(model, optimizer, parts, loss_fn))
            if probe.record is not None:
                curve.peak_mib = max(curve.peak_mib, (probe.record.peak_allocated or 0) / 2**20)
    return curve


@torch.no_grad()
def with_log_probs(
    model: TinyGPT,
    reference: TinyGPT,
    parts: list[MicroBatch],
    log_prob_fn: Callable[..., Tensor],
) -> list[MicroBatch]:
    """The micro-batches with the log-probs of the policy as it is now, and of the reference."""

    def of(network: TinyGPT, part: MicroBatch) -> Tensor:
        return log_prob_fn(flatten_logits(network(part.samples), part.packing), part.target)

    return [replace(p, old=of(model, p), reference=of(reference, p)) for p in parts]


def step(
    model: TinyGPT,
    optimizer: torch.optim.Optimizer,
    parts: list[MicroBatch],
    loss_fn: Callable[..., Tensor],
) -> float:
    """One optimizer step over all micro-batches; the loss before it."""
    optimizer.zero_grad()
    total = 0.0
    for part in parts:
        rows = flatten_logits(model(part.samples), part.packing)
        loss = loss_fn(
            rows, part.target, part.old, part.reference, part.advantage, part.weight
        )  # fmt: skip
        del rows  # the graph holds what its backward needs
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


def runs(steps: int, inner: str) -> dict[str, Curve]:
    """The same training twice, from the same weights on the same samples."""

    def fused(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        options: dict[str, Any] = {"inner": inner, "strict": True}
        return torch.compile(function, backend="slime_fused", fullgraph=True, options=options)

    torch.manual_seed(0)
    initial = TinyGPT()
    samples = rollout(initial, seed=0)
    found = {}
    for name, compiled in ("eager", lambda function: function), ("slime_fused", fused):
        model, reference = TinyGPT(), TinyGPT()
        for network in model, reference:
            network.load_state_dict(initial.state_dict())
        found[name] = train(model, reference, samples, steps, compiled)
    return found


# ---- what came out ------------------------------------------------------------------------------------------------


def plot(curves: dict[str, Curve], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for (name, curve), style in zip(curves.items(), ("-", "o"), strict=True):
        left.plot(curve.loss, style, label=name)
    left.set(xlabel=f"optimizer step (a new batch every {STEPS_PER_BATCH})", ylabel="loss")
    left.legend()
    bars = right.bar(list(curves), [curve.peak_mib for curve in curves.values()])
    right.bar_label(bars, fmt="%.0f MiB")
    right.set(ylabel="peak of a step, MiB")
    right.margins(y=0.1)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> dict[str, Curve]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps")
    parser.add_argument("--inner", default="inductor", choices=["inductor", "aot_eager"])
    parser.add_argument("--plot", type=Path, help="write a picture to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the model is so small that threads would mostly wait for each other
    curves = runs(options.steps, options.inner)
    eager, fused = curves["eager"], curves["slime_fused"]
    print(f"{'step':>4} {'eager':>12} {'slime_fused':>12}")
    for number, losses in enumerate(zip(eager.loss, fused.loss, strict=True)):
        print(f"{number:>4} {losses[0]:>12.7f} {losses[1]:>12.7f}")
    for name, curve in curves.items():
        print(f"{name}: peak of a step {curve.peak_mib:.1f} MiB")
    print(reports()[-1])
    if options.plot is not None:
        plot(curves, options.plot)
    return curves


if __name__ == "__main__":
    main()
