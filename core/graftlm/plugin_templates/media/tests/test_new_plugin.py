"""Runs graftlm's conformance kit on `new-plugin`, and tests the plugin's own behaviour."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
from graftlm import Engine, SamplingParams
from graftlm.testing import MediaConformance

import graftlm_new_plugin
from graftlm_new_plugin.tiny_checkpoint import IMAGE_TOKEN, write_tiny_checkpoint

(PROVIDER,) = graftlm_new_plugin.provide_media()


@cache
def tiny_checkpoint() -> Path:
    """Write a small checkpoint of random weights, and return its folder."""
    return write_tiny_checkpoint(Path(mkdtemp(prefix="graftlm-new-plugin-")))


class TestContract(MediaConformance):
    def create(self, context):
        return PROVIDER.create(PROVIDER.options(), context)

    def checkpoint(self):
        return tiny_checkpoint()


def test_an_answer_depends_on_the_picture():
    black, red = (np.full((8, 8, 3), colour, dtype=np.uint8) for colour in ((0, 0, 0), (255, 0, 0)))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    model = {"path": str(tiny_checkpoint()), "dtype": "float32"}
    with Engine(model=model, memory={"kv_tokens": 256}, plugins=[graftlm_new_plugin]) as engine:
        texts = [engine.generate(f"{IMAGE_TOKEN} a", params, image_data=[one])[0] for one in (black, red, black)]
    assert texts[0].token_ids == texts[2].token_ids != texts[1].token_ids
