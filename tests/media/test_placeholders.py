"""Placeholder ids differ between pictures, pixels, settings and layouts, and are equal otherwise."""

import numpy as np
import pytest

from graftlm.contracts import PreparedMedia
from graftlm.media.placeholders import media_key, picture_digest, placeholder_ids
from graftlm.testing.tiny_media import random_picture

PREPARED = PreparedMedia("<image><image>", 2, {"pixels": np.zeros((1, 3, 4, 4), dtype=np.float32)})


def key(picture=None, settings=b"settings", prepared=PREPARED):
    content = picture_digest(random_picture(8, 6) if picture is None else picture)
    return media_key(content, settings, prepared)


def changed_pixel():
    picture = random_picture(8, 6).copy()
    picture[3, 5, 1] ^= 1
    return picture


@pytest.mark.parametrize(
    "other",
    [
        key(changed_pixel()),
        key(random_picture(8, 6).reshape(8, 6, 3)),  # the same bytes in another shape
        key(settings=b"other settings"),
        key(prepared=PreparedMedia("<image>\n<image>", 2, PREPARED.inputs)),
        key(prepared=PreparedMedia("<image><image>", 2, {"pixels": np.zeros((1, 3, 2, 8), dtype=np.float32)})),
    ],
)
def test_what_changes_the_features_changes_the_ids(other):
    assert key() == key()
    assert other != key()
    assert not set(placeholder_ids(other, 32).tolist()) & set(placeholder_ids(key(), 32).tolist())


def test_ids_are_negative_and_a_longer_picture_starts_like_a_shorter_one():
    ids = placeholder_ids(key(), 1001)
    assert ids.dtype == np.int32
    assert (ids < 0).all()
    assert len(set(ids.tolist())) > 995
    assert placeholder_ids(key(), 7).tolist() == ids[:7].tolist()


@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, marks=pytest.mark.full)])
def test_random_spans_do_not_collide(count):
    rng = np.random.default_rng(0)
    keys = rng.bytes(32 * count)
    spans = {placeholder_ids(keys[32 * i : 32 * i + 32], 4).tobytes() for i in range(count)}
    assert len(spans) == count
