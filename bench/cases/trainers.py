"""Training steps of real trainers over tiny models with random weights, with a compiled loss over the logits.

Entry point: `TRAINERS`: a description, and a function running a few steps. It raises ImportError if the package is not
installed. Nothing is downloaded. The vocabulary is large enough to be recognised, everything else as small as possible:
references to the logits during backward depend on the trainer's code alone.
"""

import functools
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from bench.cases.losses import world

VOCAB, TOKENS = 2048, 12
STEPS = 4  # reports look for the variable referencing the logits at calls 1, 2, 4, ...; figures are of the last one

compiled = functools.partial(torch.compile, backend="slime_fused", dynamic=False)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Both [B, T], of the next token."""
    return cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


# ---- a loop -------------------------------------------------------------------------------------------------------


class _Model(torch.nn.Module):
    """Returns logits in an object, like a model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, 8)
        self.head = torch.nn.Linear(8, VOCAB)

    def forward(self, tokens: Tensor) -> Namespace:
        return Namespace(logits=self.head(self.embedding(tokens)))


def loop(keep: bool) -> None:
    model, loss_fn = _Model(), compiled(mean_loss)
    for tokens in _batches():
        if keep:
            out = model(tokens)
            loss = loss_fn(out.logits, tokens)
        else:
            loss = loss_fn(model(tokens).logits, tokens)
        loss.backward()


def _batches() -> Iterator[Tensor]:
    draw = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        yield torch.randint(VOCAB, (2, TOKENS), generator=draw)


# ---- transformers -------------------------------------------------------------------------------------------------


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes, **heads, **tokens))


def trainer(where: str) -> None:
    """transformers' Trainer.

    Args:
        where: the compiled function: "compute_loss_func" (called by the Trainer), "loss_function" (called by the
            model), or "compute_loss" of a subclass, a usual place of custom losses.
    """
    from transformers import Trainer, TrainingArguments

    class Custom(Trainer):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
        ) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = loss_fn(outputs.logits, labels)
            return (loss, outputs) if return_outputs else loss

    model, loss_fn = _llama(), compiled(mean_loss)
    given: dict[str, Any] = {}
    if where == "loss_function":
        model.loss_function = compiled(model.loss_function)
    elif where == "compute_loss_func":
        given["compute_loss_func"] = lambda outputs, labels, **_: loss_fn(outputs.logits, labels)
    rows = [{"input_ids": row, "labels": row} for batch in _batches() for row in batch]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(**_arguments(folder))
        kind = Custom if where == "compute_loss" else Trainer
        kind(model=model, args=arguments, train_dataset=rows, **given).train()


def _arguments(folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder, "max_steps": STEPS, "per_device_train_batch_size": 2, "use_cpu": True, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no",
    }  # fmt: skip


# ---- TRL ----------------------------------------------------------------------------------------------------------


def sft() -> None:
    """TRL's SFTTrainer; it reads the logits for its metrics before it returns."""
    from trl import SFTConfig, SFTTrainer

    model = _llama()
    model.loss_function = compiled(model.loss_function)
    rows = [{"text": "w3 w4 w5 w6 w7"}] * (2 * STEPS)
    with tempfile.TemporaryDirectory() as folder:
        SFTTrainer(
            model=model,
            args=SFTConfig(**_arguments(folder), bf16=False),
            train_dataset=_dataset(rows),
            processing_class=_tokenizer(),
        ).train()


def grpo() -> None:
    """TRL's GRPOTrainer, calling its own functions on logits."""
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import grpo_trainer

    if not hasattr(grpo_trainer, "selective_log_softmax"):
        raise ImportError("this TRL's GRPO has no logits outside of the model: fused_lm_head")
    own = grpo_trainer.selective_log_softmax
    sizes = {"num_generations": 2, "max_completion_length": 6, "temperature": 0.9, "bf16": False}
    rows = [{"prompt": "w3 w4"}, {"prompt": "w5 w6"}]
    with (
        mock.patch.object(grpo_trainer, "selective_log_softmax", compiled(own)),
        tempfile.TemporaryDirectory() as folder,
    ):
        GRPOTrainer(
            model=_llama(),
            reward_funcs=lambda completions, **_: [float(len(each)) for each in completions],
            args=GRPOConfig(**_arguments(folder), **sizes),
            train_dataset=_dataset(rows),
            processing_class=_tokenizer(),
        ).train()


def _dataset(rows: list[dict[str, str]]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


def _tokenizer() -> Any:
    """One word, one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCAB)}}
    own = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


# ---- Megatron, slime ----------------------------------------------------------------------------------------------


class _OnCpu(TorchFunctionMode):
    """Megatron's schedule creates a counter on "cuda" by name."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _gpt(sequences: int) -> tuple[Any, dict[str, Tensor]]:
    """Megatron's GPTModel with empty layers (its attention needs CUDA), and its inputs."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    world()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    heads = {"num_attention_heads": 2, "pipeline_dtype": torch.float32}
    config = TransformerConfig(num_layers=1, hidden_size=16, use_cpu_initialization=True, **heads)
    model = GPTModel(
        config=config,
        transformer_layer_spec=ModuleSpec(
            TransformerLayer, submodules=TransformerLayerSubmodules()
        ),
        vocab_size=VOCAB,
        max_sequence_length=TOKENS,
    )
    tokens = next(_batches())[:sequences]
    position = torch.arange(TOKENS).expand_as(tokens)
    return model, {"input_ids": tokens, "position_ids": position}


def megatron(sequences: int) -> None:
    """Megatron's schedule without a pipeline: forward, loss and backward of some micro-batches."""
    loss_fn = compiled(mean_loss)

    def loss_func(labels: Tensor, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = loss_fn(logits, labels)
        return loss, {"loss": loss.detach()}

    _scheduled(sequences, lambda given: functools.partial(loss_func, given["input_ids"]))


def _scheduled(sequences: int, loss_func: Callable[[dict[str, Tensor]], Any]) -> None:
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    model, given = _gpt(sequences)

    def forward_step(batches: Any, model: Any) -> tuple[Tensor, Any]:
        output_tensor = model(**given, attention_mask=None)
        return output_tensor, loss_func(given)

    with _OnCpu():
        forward_backward_no_pipelining(
            forward_step_func=forward_step,
            data_iterator=None,
            model=model,
            num_microbatches=STEPS,
            seq_length=TOKENS,
            micro_batch_size=sequences,
            forward_only=False,
        )


def slime(recompute: bool) -> None:
    """slime's own loss_function under Megatron's schedule, from a checkout on PYTHONPATH.

    Args:
        recompute: its --recompute-loss-function, a checkpoint around the loss.
    """
    from slime.backends.megatron_utils import loss

    def loss_func(given: dict[str, Tensor]) -> Any:
        return functools.partial(loss.loss_function, _slime_args(recompute), batch, STEPS, 1)

    lengths = [TOKENS - 4]
    batch = {
        "unconcat_tokens": [next(_batches())[0]], "total_lengths": [TOKENS], "response_lengths": lengths,
        "loss_masks": [torch.ones(*lengths, dtype=torch.int)], "rollout_mask_sums": torch.tensor(lengths),
        "advantages": [torch.ones(*lengths)], "log_probs": [torch.full(lengths, -7.0)],
    }  # fmt: skip
    own = loss.calculate_log_probs_and_entropy
    with mock.patch.object(loss, "calculate_log_probs_and_entropy", compiled(own)):
        _scheduled(1, loss_func)


def _slime_args(recompute: bool) -> Namespace:
    switches = (
        "use_opsm",
        "use_rollout_logprobs",
        "use_tis",
        "use_kl_loss",
        "allgather_cp",
        "get_mismatch_metrics",
    )
    return Namespace(
        loss_type="policy_loss", recompute_loss_function=recompute, calculate_per_token_loss=False,
        rollout_temperature=1.0, rollout_top_p=1.0, log_probs_chunk_size=-1, entropy_coef=0.01, advantage_estimator="grpo",
        eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=None, qkv_format="thd", context_parallel_size=1,
        **dict.fromkeys(switches, False),
    )  # fmt: skip


TRAINERS: dict[str, Callable[[], None]] = {
    "a loop: `loss_fn(model(x).logits, ...)`": functools.partial(loop, keep=False),
    "a loop: `out = model(x)`, `loss_fn(out.logits, ...)`": functools.partial(loop, keep=True),
    "transformers Trainer, `compute_loss_func`": functools.partial(trainer, "compute_loss_func"),
    "transformers Trainer, the model's `loss_function`": functools.partial(
        trainer, "loss_function"
    ),
    "transformers Trainer, `compute_loss` of a subclass": functools.partial(
        trainer, "compute_loss"
    ),
    "TRL SFTTrainer, the model's `loss_function`": sft,
    "TRL GRPOTrainer, `selective_log_softmax`": grpo,
    "Megatron's schedule, one packed sequence": functools.partial(megatron, 1),
    "Megatron's schedule, two sequences": functools.partial(megatron, 2),
    "slime's loss_function": functools.partial(slime, recompute=False),
    "slime's loss_function, recomputed": functools.partial(slime, recompute=True),
}
"""A trainer and what is compiled in it -> a few steps of it."""
