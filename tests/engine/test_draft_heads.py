"""Draft heads: the output is that of plain decoding, and the drafts are those of a plain implementation of the head."""

import random

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import graftlm_speculation
from graftlm import Engine, SamplingParams
from graftlm.errors import ConfigError
from graftlm.testing.drafter import AllDrafts
from graftlm.testing.recorded_drafter import RecordedDrafters
from graftlm.testing.tiny_heads import write_tiny_eagle3
from graftlm.testing.tiny_models import write_tiny_checkpoint

VOCAB = 320


@pytest.fixture(autouse=True)
def every_draft_is_verified(monkeypatch):
    """Choose no lengths of drafts by measured times, so that no test depends on the speed of the machine."""
    budget = "graftlm.speculation.speculator.DraftBudget"
    monkeypatch.setattr(budget, lambda costs, max_drafts: AllDrafts(max_drafts))


def recorder():
    """Return a plugin that records the drafts of `eagle3`."""
    (provider,) = [one for one in graftlm_speculation.provide_drafters() if one.name == "eagle3"]
    return RecordedDrafters(provider)


def rms_norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def rotate(x, positions):
    """Rotate [T, H, D] by positions, with base 10,000."""
    half = x.shape[-1] // 2
    angles = positions[:, None].float() / 10_000 ** (torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class PlainHead:
    """An EAGLE-3 head in plain PyTorch, which computes every draft from all tokens."""

    def __init__(self, served, head, *, layers=(1, 1, 2), norms_residual=False):
        self.model = AutoModelForCausalLM.from_pretrained(served, dtype=torch.float32).eval()
        tensors = load_file(head / "model.safetensors")
        self.t = {name.replace("midlayer.", "").replace("layers.0.", ""): value for name, value in tensors.items()}
        self.layers, self.norms_residual = layers, norms_residual
        self.embedding = self.t.get("embed_tokens.weight", self.model.get_input_embeddings().weight)

    @torch.inference_mode()
    def draft(self, token_ids, num_drafts):
        states = self.model(torch.tensor([token_ids[:-1]]), output_hidden_states=True).hidden_states
        features = torch.cat([states[i][0] for i in self.layers], dim=-1) @ self.t["fc.weight"].T
        following, drafted = token_ids[1:], []
        for _ in range(num_drafts):
            out = self.layer(features, torch.tensor(following))
            logits = rms_norm(out[-1], self.t["norm.weight"]) @ self.t["lm_head.weight"].T
            index = int(logits.argmax())
            drafted.append(index + int(self.t["d2t"][index]) if "d2t" in self.t else index)
            features, following = torch.cat([features, out[-1:]]), [*following, drafted[-1]]
        return drafted

    def layer(self, features, token_ids):
        t, count = self.t, len(token_ids)
        normed = rms_norm(features, t["hidden_norm.weight"])
        x = torch.cat([rms_norm(self.embedding[token_ids], t["input_layernorm.weight"]), normed], dim=-1)
        q, k, v = ((x @ t[f"self_attn.{n}_proj.weight"].T).view(count, -1, 16) for n in "qkv")
        q, k = rotate(q, torch.arange(count)), rotate(k, torch.arange(count))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        mixed = F.scaled_dot_product_attention(*(z.transpose(0, 1) for z in (q, k, v)), is_causal=True)
        x = mixed.transpose(0, 1).reshape(count, -1) @ t["self_attn.o_proj.weight"].T
        x = x + (normed if self.norms_residual else features)
        y = rms_norm(x, t["post_attention_layernorm.weight"])
        gated = F.silu(y @ t["mlp.gate_proj.weight"].T) * (y @ t["mlp.up_proj.weight"].T)
        return x + gated @ t["mlp.down_proj.weight"].T


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("served"), "qwen3", num_layers=3)


FORMS = {
    "plain": ({}, {}),
    "speculators": ({"form": "speculators"}, {"norms_residual": True}),
    "own embedding": ({"embedding": True, "hidden_size": 48}, {}),
    "whole vocabulary, default layers": (
        {"draft_vocab_size": VOCAB, "hidden_layers": None},
        {"layers": (2, 1, 0)},
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prefill_tokens", [7, 2048])
@pytest.mark.parametrize("graphs", ["auto", True])
@pytest.mark.covering(strength=1)
def test_drafts_are_those_of_a_plain_implementation(tmp_path, served, form, page_size, overlap, prefill_tokens, graphs):
    written, computed = FORMS[form]
    head = write_tiny_eagle3(tmp_path / "head", **written)
    plain, plugin = PlainHead(served, head, **computed), recorder()
    prompts = [random.Random(n).choices(range(VOCAB), k=n) for n in (3, 20, 33)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    config = {
        "model": str(served),
        "cache": {"page_size": page_size},
        "scheduling": {"overlap": overlap, "prefill_tokens_per_step": prefill_tokens},
        "execution": {"graphs": graphs},
        "debug": True,
    }
    with Engine(config) as engine:
        expected = [output.token_ids for output in engine.generate(prompts, params)]
    speculation = {"drafter": {"name": "recorded", "options": {"path": str(head), "max_drafts": 4}}}
    with Engine({**config, "speculation": speculation}, plugins=[graftlm_speculation, plugin]) as engine:
        assert [output.token_ids for output in engine.generate(prompts, params)] == expected
        longer = [[*prompt, *out, 7] for prompt, out in zip(prompts, expected, strict=True)]
        engine.generate(longer, params)  # most of each prompt is in the cache
    seen = plugin.drafter.seen
    assert len(seen) > 20
    for text, drafted in seen[:8] + seen[-8:]:
        assert drafted == plain.draft(text, len(drafted)), f"after {len(text)} tokens"


KINDS_OF_MEMORY = {
    "sliding windows with their own memory": (
        "gemma3_text",
        {"cache": {"name": "swa_radix", "page_size": 4}, "memory": {"kv_tokens": 400, "window_tokens": 200}},
    ),
    "host memory": (
        "qwen3",
        {
            "cache": {"name": "hicache", "page_size": 4, "options": {"host_tokens": 2048, "block_tokens": 8}},
            "memory": {"kv_tokens": 96},
            "scheduling": {"max_running_requests": 1},
        },
    ),
    "retractions": ("qwen3", {"cache": {"page_size": 1}, "memory": {"kv_tokens": 100}}),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS_OF_MEMORY)
def test_keys_of_the_head_are_in_the_pages_of_every_cache(tmp_path, kind):
    family, sections = KINDS_OF_MEMORY[kind]
    served = write_tiny_checkpoint(tmp_path / "served", family, num_layers=3, tokenizer=True)
    head = write_tiny_eagle3(tmp_path / "head", embedding=True)
    plain, plugin = PlainHead(served, head), recorder()
    prompts = [random.Random(n).choices(range(VOCAB), k=n) for n in (30, 35, 40)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    scheduling = {"overlap": False, **sections.get("scheduling", {})}
    config = {"model": str(served), "debug": True, **sections, "scheduling": scheduling}
    with Engine(config) as engine:
        expected = [output.token_ids for output in engine.generate(prompts, params)]
    speculation = {"drafter": {"name": "recorded", "options": {"path": str(head), "max_drafts": 4}}}
    with Engine({**config, "speculation": speculation}, plugins=[graftlm_speculation, plugin]) as engine:
        assert [output.token_ids for output in engine.generate(prompts, params)] == expected
        num_seen = len(plugin.drafter.seen)
        longer = [[*prompt, *out, 7] for prompt, out in zip(prompts, expected, strict=True)]
        outputs = engine.generate(longer, params)
        assert sum(output.usage.cached_tokens for output in outputs) > 20
        assert sum(output.usage.cached_host_tokens for output in outputs) > (20 if kind == "host memory" else -1)
    seen = plugin.drafter.seen
    assert 20 < num_seen < len(seen) - 20
    for text, drafted in seen[:6] + seen[num_seen : num_seen + 6] + seen[-4:]:
        assert drafted == plain.draft(text, len(drafted)), f"after {len(text)} tokens"


@pytest.mark.full
def test_the_head_reads_the_hidden_states_of_the_adapted_model(tmp_path, adapters):
    head = write_tiny_eagle3(tmp_path / "head")
    config = {
        "model": str(adapters.base),
        "lora": {"adapters": {"a": str(adapters.folders["attention"])}, "max_rank": 8},
        "memory": {"kv_tokens": 2048},
        "scheduling": {"overlap": False},
        "debug": True,
    }
    speculation = {"drafter": {"name": "recorded", "options": {"path": str(head)}}}
    params, outputs, seen = SamplingParams(temperature=0, max_tokens=20), [], []
    for drafter in (None, speculation):
        plugin = recorder()
        with Engine({**config, "speculation": drafter}, plugins=[graftlm_speculation, plugin]) as engine:
            found = engine.generate([[5, 6, 7]] * 2, params, adapter=["a", None])
        outputs.append([output.token_ids for output in found])
        seen = [] if plugin.drafter is None else plugin.drafter.seen
    assert outputs[0] == outputs[1]
    first = [drafted for text, drafted in seen if len(text) == 4]
    assert len(first) == 2
    assert first[0] != first[1]


def without(name):
    def change(folder):
        tensors = load_file(folder / "model.safetensors")
        del tensors[name]
        save_file(tensors, folder / "model.safetensors")

    return change


def replaced(name, tensor, old=None):
    def change(folder):
        tensors = load_file(folder / "model.safetensors")
        tensors.pop(old or name)
        save_file({**tensors, name: tensor}, folder / "model.safetensors")

    return change


UNFIT = {
    "lacks 'fc.weight'": ({}, without("fc.weight")),
    "lacks 'midlayer.hidden_norm.weight'": ({}, without("midlayer.hidden_norm.weight")),
    "lacks 'd2t'": ({}, without("d2t")),
    "contains 'midlayer.norm2.weight', which": (
        {},
        replaced("midlayer.norm2.weight", torch.zeros(64), old="midlayer.hidden_norm.weight"),
    ),
    r"'lm_head.weight' has shape \[99, 64\], but config.json requires \[100, 64\]": (
        {},
        replaced("lm_head.weight", torch.zeros(99, 64)),
    ),
    r"'d2t' is torch.int64 \[7\], expected integers \[100\]": ({}, replaced("d2t", torch.zeros(7, dtype=torch.int64))),
    "'d2t' has token ids outside the served vocabulary of 320": (
        {},
        replaced("d2t", torch.full((100,), 300, dtype=torch.int64)),
    ),
    "'t2d' marks other tokens": ({}, replaced("t2d", torch.zeros(320, dtype=torch.bool))),
    "lacks 'embed_tokens.weight'": ({"hidden_size": 48}, lambda folder: None),
    "hidden_size 32, but the served model has 64": ({"served_size": 32}, lambda folder: None),
    "vocabulary of 300 tokens, but the served model has 320": ({"vocab_size": 300}, lambda folder: None),
    r"inputs of layers \[1, 9\], but the served model has 3 layers": ({"hidden_layers": (1, 9)}, lambda folder: None),
    "has num_hidden_layers 2; only": ({"config": {"num_hidden_layers": 2}}, lambda folder: None),
    "has norm_before_fc true; only": ({"config": {"norm_before_fc": True}}, lambda folder: None),
    r"architectures \['LlamaForCausalLM'\]": ({"config": {"architectures": ["LlamaForCausalLM"]}}, lambda folder: None),
}


@pytest.mark.parametrize("message", UNFIT)
def test_an_unfit_head_is_refused_by_name(tmp_path, served, message):
    written, change = UNFIT[message]
    head = write_tiny_eagle3(tmp_path / "head", **written)
    change(head)
    with pytest.raises(ConfigError, match=f"drafter.options.path: the draft head cannot be used: .*{message}"):
        Engine(model=str(served), speculation={"drafter": {"name": "eagle3", "options": {"path": str(head)}}})
