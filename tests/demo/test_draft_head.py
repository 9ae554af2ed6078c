"""The EAGLE-3 head of the demo model, and the network in which it is trained."""

from itertools import islice

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM

import graftlm_speculation
from graftlm import Engine, SamplingParams
from graftlm.demo import demo_checkpoint, demo_draft_head
from graftlm.demo.batches import batches
from graftlm.demo.corpus import held_out_questions
from graftlm.demo.draft_head import HIDDEN_LAYERS, DraftHeadNet, HeadSizes, hidden_inputs
from graftlm.demo.train_draft import DraftSettings, batch_loss, draft_vocabulary, head_sizes, save_head
from graftlm.testing.drafter import AllDrafts
from graftlm.testing.recorded_drafter import RecordedDrafters

SIZES = HeadSizes(16, 24, 4, 2, 8, 20, 10_000.0, 1e-6)


@pytest.fixture(scope="module")
def model():
    return LlamaForCausalLM.from_pretrained(demo_checkpoint(), dtype=torch.float32).eval()


@torch.inference_mode()
def test_a_step_of_the_training_computes_what_a_chain_of_drafts_computes():
    torch.manual_seed(0)
    net = DraftHeadNet(SIZES)
    inputs, embedded = torch.randn(1, 9, 3 * 16), torch.randn(1, 9, 16)
    steps = list(net.steps(inputs, embedded, 4))
    for num_drafted, logits in enumerate(steps):
        for end in range(num_drafted, 9):
            features = net.fc(inputs)[:, : end - num_drafted + 1]
            for _ in range(num_drafted):
                out = net.midlayer(features, embedded[:, : features.shape[1]], [])
                features = torch.cat([features, out[:, -1:]], dim=1)
            out = net.midlayer(features, embedded[:, : end + 1], [])
            expected = net.lm_head(net.norm(out))[0, -1]
            torch.testing.assert_close(logits[0, end], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_training_lowers_the_loss_and_its_result_can_be_loaded(model, tmp_path):
    settings = DraftSettings(counted_batches=2, draft_vocab_size=256, num_drafts=2)
    tokenizer = AutoTokenizer.from_pretrained(demo_checkpoint())
    targets = draft_vocabulary(tokenizer, settings)
    assert targets.tolist() == sorted(set(targets.tolist()))
    assert len(targets) == 256
    torch.manual_seed(0)
    head = DraftHeadNet(head_sizes(model, settings))
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    (batch,) = islice(batches(tokenizer, 0), 1)
    losses = []
    for _ in range(4):
        loss, accuracies = batch_loss(head, model, batch, targets, settings)
        assert len(accuracies) == 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    save_head(head, model, targets, tmp_path)
    speculation = {"drafter": {"name": "eagle3", "options": {"path": str(tmp_path)}}}
    with Engine(model="demo", speculation=speculation) as engine:
        assert engine.generate("1, 2, 3", SamplingParams(max_tokens=4))


@torch.inference_mode()
def test_the_captured_inputs_are_those_of_the_layers(model):
    ids = torch.tensor([[5, 6, 7, 8]])
    inputs, final = hidden_inputs(model, ids)
    states = model(ids, output_hidden_states=True).hidden_states
    first, second, last = inputs.chunk(3, dim=-1)
    assert HIDDEN_LAYERS == (1, 3, 5)
    torch.testing.assert_close(first, states[1])
    torch.testing.assert_close(second, states[3])
    torch.testing.assert_close(model.model.norm(last), final)


def test_the_bundled_head_is_small():
    file = demo_draft_head() / "model.safetensors"
    assert file.stat().st_size < 1_500_000
    assert len(load_file(file)["d2t"]) == 1024


@pytest.mark.full
def test_the_bundled_head_predicts_answers_to_held_out_questions(monkeypatch):
    budget = "graftlm.speculation.speculator.DraftBudget"  # not by measured times
    monkeypatch.setattr(budget, lambda costs, max_drafts: AllDrafts(max_drafts))
    (provider,) = [one for one in graftlm_speculation.provide_drafters() if one.name == "eagle3"]
    plugin, params = RecordedDrafters(provider), SamplingParams(temperature=0, max_tokens=60)
    chats = [[{"role": "user", "content": question.text}] for question in held_out_questions(17, 1)]
    speculation = {"drafter": {"name": "recorded", "options": {"path": "demo-eagle3", "max_drafts": 2}}}
    with Engine(model="demo", scheduling={"overlap": False}) as engine:
        expected = [output.token_ids for output in engine.generate(chats, params)]
    model = {"path": "demo", "dtype": "float32"}
    with Engine(model=model, scheduling={"overlap": False}, speculation=speculation, plugins=[plugin]) as engine:
        outputs = [engine.generate([chat], params)[0] for chat in chats]
    assert [output.token_ids for output in outputs] == expected
    texts = [(*output.prompt_token_ids, *output.token_ids) for output in outputs]
    known = {text[:end]: text[end] for text in texts for end in range(1, len(text))}
    right = [known[tuple(text)] == draft[0] for text, draft in plugin.drafter.seen if tuple(text) in known]
    assert len(right) > 20
    assert sum(right) / len(right) > 0.6
