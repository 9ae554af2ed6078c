"""Trains an EAGLE-3 head for the demo model: `python -m graftlm.demo.train_draft --out DIR [--seed 0]`.

The head learns the demo model's predictions on training texts, and reads its own outputs for later tokens of a draft
(arXiv:2503.01840). The demo model does not change.
"""

import argparse
import json
import math
import time
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from graftlm.demo import demo_checkpoint
from graftlm.demo.batches import Batch, batches
from graftlm.demo.draft_head import HIDDEN_LAYERS, DraftHeadNet, HeadSizes, hidden_inputs


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """The settings that affect the result of the training."""

    seed: int = 1
    num_steps: int = 600
    num_drafts: int = 4  # drafted tokens of a chain in training
    later_weight: float = 0.8  # loss weight of a drafted token relative to the token before it
    peak_lr: float = 3e-3
    warmup_steps: int = 40
    weight_decay: float = 0.02
    draft_vocab_size: int = 1024
    intermediate_size: int = 256
    counted_batches: int = 300  # number of batches in which the tokens of the draft vocabulary are counted
    num_threads: int = 2


def draft_vocabulary(tokenizer: PreTrainedTokenizerFast, settings: DraftSettings) -> Tensor:
    """Return the most frequent tokens of answers in ascending order, int64 [draft vocabulary]."""
    counts: Counter[int] = Counter()
    for batch in islice(batches(tokenizer, settings.seed), settings.counted_batches):
        counts.update(batch.input_ids[batch.weights > 0].tolist())
    known = [token for token, _ in counts.most_common(settings.draft_vocab_size)]
    others = (token for token in range(len(tokenizer)) if token not in counts)
    known += islice(others, settings.draft_vocab_size - len(known))
    return torch.tensor(sorted(known))


def head_sizes(model: LlamaForCausalLM, settings: DraftSettings) -> HeadSizes:
    """Return the sizes of the head for the demo model."""
    config = model.config
    return HeadSizes(
        hidden_size=config.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        draft_vocab_size=settings.draft_vocab_size,
        rope_theta=config.rope_parameters["rope_theta"],
        eps=config.rms_norm_eps,
    )


def batch_loss(
    head: DraftHeadNet, model: LlamaForCausalLM, batch: Batch, targets: Tensor, settings: DraftSettings
) -> tuple[Tensor, list[float]]:
    """Return the loss, and the share of each drafted token's predictions that equal the demo model's.

    Args:
        targets: token of each entry of the draft vocabulary, int64 [draft vocabulary].
    """
    input_ids = batch.input_ids
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            inputs, final = hidden_inputs(model, input_ids[:, :-1])
            teacher = model.lm_head(final)[:, 1:].float()  # position p + 1 predicts the token at p + 2
            embedded = model.model.embed_tokens(input_ids[:, 1:-1])
            in_draft = torch.softmax(teacher[..., targets], dim=-1)
            best = teacher.argmax(-1)
            learned = (batch.weights[:, 2:] > 0) & torch.isin(best, targets)
        loss, accuracies = torch.zeros(()), []
        for step, logits in enumerate(head.steps(inputs[:, :-1], embedded, settings.num_drafts)):
            chosen = learned.clone()
            chosen[:, :step] = False
            log_probs = F.log_softmax(logits[chosen].float(), dim=-1)
            loss = loss - settings.later_weight**step * (in_draft[chosen] * log_probs).sum(-1).mean()
            accuracies.append((targets[log_probs.argmax(-1)] == best[chosen]).float().mean().item())
    return loss, accuracies


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, targets: Tensor, settings: DraftSettings
) -> DraftHeadNet:
    """Return a trained head."""
    head = DraftHeadNet(head_sizes(model, settings))
    optimizer = torch.optim.AdamW(head.parameters(), betas=(0.9, 0.95), weight_decay=settings.weight_decay)
    started = time.monotonic()
    for step, batch in enumerate(islice(batches(tokenizer, settings.seed), settings.num_steps)):
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(step, settings)
        loss, accuracies = batch_loss(head, model, batch, targets, settings)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 49:
            shares = " ".join(f"{share:.1%}" for share in accuracies)
            print(f"step {step + 1}  loss {loss.item():.3f}  {shares}  {time.monotonic() - started:.0f} s", flush=True)
    return head


def save_head(head: DraftHeadNet, model: LlamaForCausalLM, targets: Tensor, out: Path) -> None:
    """Write config.json and model.safetensors in the form of published heads; weights are bfloat16."""
    config, sizes = model.config, head.sizes
    out.mkdir(parents=True, exist_ok=True)
    entries = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": sizes.hidden_size,
        "target_hidden_size": config.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": sizes.eps,
        "rope_theta": sizes.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": sizes.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(HIDDEN_LAYERS),
        "torch_dtype": "bfloat16",
    }
    (out / "config.json").write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    tensors = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()}
    tensors["d2t"] = targets - torch.arange(len(targets))
    tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, targets, True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)


def _learning_rate(step: int, settings: DraftSettings) -> float:
    if step < settings.warmup_steps:
        return settings.peak_lr * (step + 1) / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(1, settings.num_steps - settings.warmup_steps)
    return settings.peak_lr * 0.5 * (1 + math.cos(math.pi * progress))


def main() -> None:
    """Train and save the head."""
    defaults = DraftSettings()
    parser = argparse.ArgumentParser(description="Train an EAGLE-3 head for graftlm's demo model on a CPU.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the head")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--steps", type=int, default=defaults.num_steps)
    parser.add_argument("--threads", type=int, default=defaults.num_threads)
    arguments = parser.parse_args()
    settings = DraftSettings(seed=arguments.seed, num_steps=arguments.steps, num_threads=arguments.threads)
    print(*(f"{name} = {value}" for name, value in asdict(settings).items()), sep="\n", flush=True)
    torch.set_num_threads(settings.num_threads)
    torch.manual_seed(settings.seed)
    wall, cpu = time.monotonic(), time.process_time()
    tokenizer = AutoTokenizer.from_pretrained(demo_checkpoint())
    model = LlamaForCausalLM.from_pretrained(demo_checkpoint(), dtype=torch.float32).eval().requires_grad_(False)
    targets = draft_vocabulary(tokenizer, settings)
    head = train(model, tokenizer, targets, settings)
    save_head(head, model, targets, arguments.out)
    num_bytes = (arguments.out / "model.safetensors").stat().st_size
    print(
        f"{sum(p.numel() for p in head.parameters()):,} parameters, {num_bytes:,} bytes, "
        f"{(time.monotonic() - wall) / 60:.1f} minutes ({(time.process_time() - cpu) / 60:.1f} of CPU time)"
    )


if __name__ == "__main__":
    main()
