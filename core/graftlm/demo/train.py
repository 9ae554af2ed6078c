"""Trains the demo model: `python -m graftlm.demo.train --out DIR [--seed 0]`."""

import argparse
import math
import sys
import time
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from graftlm.demo.batches import Batch, batches
from graftlm.demo.checkpoint_io import save_checkpoint
from graftlm.demo.corpus import training_texts
from graftlm.demo.evaluate import evaluate
from graftlm.demo.model_card import ModelCard
from graftlm.demo.tokenizer import BOS, END, EOS, PAD, train_tokenizer


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """The settings that affect the result of the training."""

    seed: int = 0
    num_steps: int = 4200
    peak_lr: float = 3e-3
    warmup_steps: int = 100
    weight_decay: float = 0.05
    max_grad_norm: float = 1.0
    vocab_size: int = 2048
    tokenizer_texts: int = 10_000  # number of training texts from which the tokenizer learns its merges
    num_threads: int = 2


def build_tokenizer(settings: TrainSettings) -> PreTrainedTokenizerFast:
    """Train the tokenizer on the first training texts."""
    texts = islice(training_texts(settings.seed), settings.tokenizer_texts)
    pieces = (piece for text in texts for piece in ([text] if isinstance(text, str) else [m["content"] for m in text]))
    return train_tokenizer(pieces, settings.vocab_size, max_len=2048)


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return the untrained model with grouped-query attention, tied embeddings and about 2.4 million parameters."""
    bos, eos, pad, end = tokenizer.convert_tokens_to_ids([BOS, EOS, PAD, END])
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.06,  # near 1 / sqrt(hidden_size); with the usual 0.02, training starts more slowly
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=bos,
        eos_token_id=[end, eos],
        pad_token_id=pad,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=bos, eos_token_id=[end, eos], pad_token_id=pad)
    return model


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: TrainSettings) -> float:
    """Train the model in place.

    Returns: mean loss of the last 100 steps.
    """
    optimizer = torch.optim.AdamW(_parameter_groups(model, settings.weight_decay), betas=(0.9, 0.98))
    losses: list[float] = []
    started = time.monotonic()
    for step, batch in enumerate(islice(batches(tokenizer, settings.seed), settings.num_steps)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings)
        losses.append(_train_step(model, optimizer, batch, settings.max_grad_norm))
        if step % 100 == 99:
            print(f"step {step + 1}  loss {_tail_mean(losses):.4f}  {time.monotonic() - started:.0f} s", flush=True)
    return _tail_mean(losses)


def learning_rate(step: int, settings: TrainSettings) -> float:
    """Return the learning rate of a step. It rises linearly to its peak, then falls to 0 along a cosine."""
    if step < settings.warmup_steps:
        return settings.peak_lr * (step + 1) / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(1, settings.num_steps - settings.warmup_steps)
    return settings.peak_lr * 0.5 * (1 + math.cos(math.pi * progress))


def batch_loss(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Return the weighted mean cross-entropy, a scalar tensor. Logits are computed only for weights above 0."""
    weights = batch.weights[:, 1:]
    predicted = weights > 0
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=batch.input_ids[:, :-1]).last_hidden_state  # [B, T-1, hidden]
        logits = model.lm_head(hidden[predicted])  # [N, V]
    losses = F.cross_entropy(logits.float(), batch.input_ids[:, 1:][predicted], reduction="none")
    return (losses * weights[predicted]).sum() / weights.sum()


def _train_step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: Batch, max_grad_norm: float) -> float:
    loss = batch_loss(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _parameter_groups(model: LlamaForCausalLM, weight_decay: float) -> list[dict[str, object]]:
    """Return the optimizer's parameter groups. Weight decay applies to matrices only, not to the weights of norms."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def _tail_mean(losses: list[float]) -> float:
    tail = losses[-100:]
    return sum(tail) / len(tail)


def main() -> None:
    """Train, evaluate and save the demo model."""
    parser = argparse.ArgumentParser(description="Train graftlm's demo model on a CPU.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=TrainSettings().num_steps)
    arguments = parser.parse_args()
    run(TrainSettings(seed=arguments.seed, num_steps=arguments.steps), arguments.out)


def run(settings: TrainSettings, out: Path) -> None:
    """Train with the given settings, evaluate, and write the checkpoint with its model card."""
    print(*(f"{name} = {value}" for name, value in asdict(settings).items()), sep="\n", flush=True)
    torch.set_num_threads(settings.num_threads)
    torch.use_deterministic_algorithms(True)
    # Deterministic mode fills new tensors, which takes a tenth of the time; here every tensor is written before a read.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(settings.seed)
    wall, cpu = time.monotonic(), time.process_time()
    tokenizer = build_tokenizer(settings)
    model = build_model(tokenizer)
    loss = train(model, tokenizer, settings)
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    model.eval()
    save_checkpoint(model, tokenizer, out)
    report = evaluate(model, tokenizer, settings.seed)
    card = ModelCard(asdict(settings), model.num_parameters(), loss, wall, cpu, report)
    (out / "README.md").write_text(card.render(), encoding="utf-8")
    print(card.render(), file=sys.stdout)


if __name__ == "__main__":
    main()
