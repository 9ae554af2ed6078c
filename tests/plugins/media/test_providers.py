"""The built-in media processors keep the contract, on small checkpoints of each class."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest

from graftlm.testing import MediaConformance, run_conformance
from graftlm.testing.tiny_media import write_media_checkpoint
from graftlm_media import provide_media
from graftlm_media.qwen import rope_positions


@cache
def checkpoint_of(kind):
    return write_media_checkpoint(Path(mkdtemp(prefix="graftlm-media-")), kind)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("transformers", "llava"),
        ("qwen_vl", "qwen2_vl"),
        pytest.param("transformers", "llava_next", marks=pytest.mark.full),
        pytest.param("transformers", "idefics3", marks=pytest.mark.full),
        pytest.param("transformers", "smolvlm", marks=pytest.mark.full),
        pytest.param("qwen_vl", "qwen2_5_vl", marks=pytest.mark.full),
    ],
)
def test_contract(name, kind):
    provider = next(one for one in provide_media() if one.name == name)

    class Kit(MediaConformance):
        def create(self, context):
            return provider.create(provider.options(), context)

        def checkpoint(self):
            return checkpoint_of(kind)

    results = run_conformance(Kit)
    assert len(results) > 10
    assert [(result.name, result.error) for result in results if result.error] == []


def test_features_form_a_grid_and_text_continues_after_its_longest_side():
    is_feature = np.array([0, 0, *[1] * 6, 0, *[1] * 2, 0], dtype=bool)
    assert rope_positions(is_feature, [(1, 2, 3), (1, 2, 1)]).tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 8],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 6, 8],
    ]
    assert rope_positions(np.zeros(3, dtype=bool), []).tolist() == [[0, 1, 2]] * 3
    both = np.ones(4, dtype=bool)  # two pictures without text between them
    assert rope_positions(both, [(1, 1, 2), (1, 2, 1)]).tolist() == [[0, 0, 2, 2], [0, 0, 2, 3], [0, 1, 2, 2]]
