"""The MTP layer of a DeepSeek V3 checkpoint drafts what Transformers drafts with `use_mtp`."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

import graftlm_speculation
from graftlm import Engine, SamplingParams
from graftlm.errors import ConfigError
from graftlm.testing.drafter import AllDrafts
from graftlm.testing.recorded_drafter import RecordedDrafters
from graftlm.testing.tiny_heads import add_tiny_mtp
from graftlm.testing.tiny_models import write_tiny_checkpoint

VOCAB = 320


@pytest.fixture(autouse=True)
def every_draft_is_verified(monkeypatch):
    """Choose no lengths of drafts by measured times, so that no test depends on the speed of the machine."""
    budget = "graftlm.speculation.speculator.DraftBudget"
    monkeypatch.setattr(budget, lambda costs, max_drafts: AllDrafts(max_drafts))


def recorder():
    """Return a plugin that records the drafts of `mtp`."""
    (provider,) = [one for one in graftlm_speculation.provide_drafters() if one.name == "mtp"]
    return RecordedDrafters(provider)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("served"), "deepseek_v3", num_layers=3, tokenizer=True)
    return add_tiny_mtp(folder)


class Transformers:
    """The drafts of Transformers' MTP model; for later tokens, its only layer reads its own output."""

    def __init__(self, folder):
        self.main = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        # Transformers finds the layer by its number in published checkpoints.
        self.main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3\."]
        self.mtp = MtpModel.from_pretrained(self.main).eval()

    @torch.inference_mode()
    def draft(self, token_ids, num_drafts):
        ids = torch.tensor([token_ids])
        states = self.main.model(ids[:, :-1]).last_hidden_state
        following = ids[:, 1:]
        (first,), _, _ = self.mtp(following, states, None, torch.arange(1, len(token_ids))[None], None)
        drafted = []
        for _ in range(num_drafts):
            positions = torch.arange(1, following.shape[1] + 1)[None]
            out = self.mtp.forward_layer(0, states, positions, None, input_ids=following)
            drafted.append(int(self.main.lm_head(out[0, -1]).argmax()))
            states = torch.cat([states, out[:, -1:]], dim=1)
            following = torch.cat([following, torch.tensor([[drafted[-1]]])], dim=1)
        assert int(first) == drafted[0]
        return drafted


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prefill_tokens", [7, 2048])
@pytest.mark.parametrize("graphs", ["auto", True])
@pytest.mark.covering(strength=1)
def test_drafts_are_those_of_transformers(served, page_size, overlap, prefill_tokens, graphs):
    reference, plugin = Transformers(served), recorder()
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
    with Engine({**config, "speculation": "recorded"}, plugins=[graftlm_speculation, plugin]) as engine:
        assert [output.token_ids for output in engine.generate(prompts, params)] == expected
        engine.generate([[*prompt, *out, 7] for prompt, out in zip(prompts, expected, strict=True)], params)
    seen = plugin.drafter.seen
    assert len(seen) > 20
    for text, drafted in seen[:8] + seen[-8:]:
        assert drafted == reference.draft(text, len(drafted)), f"after {len(text)} tokens"


def change(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


UNFIT = {
    "lacks 'model.layers.3.eh_proj.weight'": lambda tensors: tensors.pop("model.layers.3.eh_proj.weight"),
    "contains 'model.layers.3.gate.weight', which": lambda tensors: tensors.update(
        {"model.layers.3.gate.weight": torch.zeros(4)}
    ),
    r"'model.layers.3.enorm.weight' has shape \[63\]": lambda tensors: tensors.update(
        {"model.layers.3.enorm.weight": torch.zeros(63)}
    ),
    "lacks 'model.layers.3.enorm.weight'": lambda tensors: [
        tensors.pop(name) for name in list(tensors) if name.startswith("model.layers.3.")
    ],
}


@pytest.mark.parametrize("message", UNFIT)
def test_an_unfit_layer_is_refused_by_name(tmp_path, message):
    folder = add_tiny_mtp(write_tiny_checkpoint(tmp_path, "deepseek_v3", num_layers=3, tokenizer=True))
    change(folder, UNFIT[message])
    with pytest.raises(ConfigError, match=f"speculation.drafter: the draft head cannot be used: .*{message}"):
        Engine(model=str(folder), speculation="mtp")


def test_a_checkpoint_without_the_layer_is_refused(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "v3", "deepseek_v3", num_layers=3, tokenizer=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(ConfigError, match="has no num_nextn_predict_layers: there is no MTP layer"):
        Engine(model=str(folder), speculation="mtp")
    with pytest.raises(ConfigError, match="LlamaForCausalLM: this model has no draft head"):
        Engine(model="demo", speculation="mtp")
