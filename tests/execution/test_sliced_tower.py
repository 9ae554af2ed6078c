"""A tower runs in slices that end between its stages, and never beside its caller."""

import threading

import pytest
import torch
from torch import nn

from graftlm.contracts import MediaTower
from graftlm.execution.media_features import MediaFeatures
from graftlm.execution.sliced_tower import SlicedTower
from graftlm.media import MediaItem
from graftlm.plan import FeatureSpan, MediaWork

CPU = torch.device("cpu")


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Layer(nn.Module):
    def __init__(self, clock, seconds):
        super().__init__()
        self.clock, self.seconds, self.threads = clock, seconds, []

    def forward(self, x):
        self.clock.now += self.seconds
        self.threads.append(threading.active_count())
        if x.isnan().any():
            raise RuntimeError("not a number")
        return x + 1


class Layers(MediaTower):
    def __init__(self, clock, num_layers=6, seconds=1.0):
        self.layers = [Layer(clock, seconds) for _ in range(num_layers)]

    @property
    def width(self):
        return 2

    @property
    def stages(self):
        return self.layers

    def features(self, inputs):
        x = inputs["x"]
        for layer in self.layers:
            x = layer(x)
        return x


def item(key, value, num_features=3):
    return MediaItem(key, num_features, {"x": torch.full((num_features, 2), value).numpy()})


def test_a_slice_ends_before_the_stage_that_would_exceed_it():
    clock = Clock()
    tower = SlicedTower(Layers(clock), clock)
    tower.begin({"x": torch.zeros(3, 2)})
    times = []
    while (result := tower.advance(2.5)) is None:
        times.append(clock.now)
    assert times == [2.0, 4.0]
    assert clock.now == 6.0
    assert result.tolist() == [[6.0, 6.0]] * 3
    assert not tower.is_computing
    tower.close()


def test_a_slice_computes_at_least_one_stage():
    clock = Clock()
    tower = SlicedTower(Layers(clock, 3), clock)
    tower.begin({"x": torch.zeros(1, 2)})
    assert [tower.advance(0.0) is None for _ in range(3)] == [True, True, False]
    tower.close()


def test_a_cancelled_picture_leaves_the_tower_usable():
    clock = Clock()
    tower = SlicedTower(Layers(clock), clock)
    tower.begin({"x": torch.zeros(1, 2)})
    assert tower.advance(1.0) is None
    tower.cancel()
    tower.begin({"x": torch.ones(1, 2)})
    assert tower.advance(100.0).tolist() == [[7.0, 7.0]]
    tower.begin({"x": torch.zeros(1, 2)})
    tower.advance(1.0)
    tower.close()  # while a picture is partly computed
    assert "graftlm-tower" not in [thread.name for thread in threading.enumerate()]


def test_features_are_stored_until_dropped_and_errors_are_reported():
    clock = Clock()
    features = MediaFeatures(Layers(clock, 2), CPU, clock)
    work = MediaWork((), (item(b"a", 0.0), item(b"bad", float("nan")), item(b"b", 5.0)), max_s=100.0)
    result = features.work(work)
    assert (result.ready, list(result.errors)) == ((b"a", b"b"), [b"bad"])
    assert "not a number" in result.errors[b"bad"]
    spans = [FeatureSpan(b"b", 1, torch.tensor([4, 5]).numpy()), FeatureSpan(b"a", 0, torch.tensor([7]).numpy())]
    rows, idx = features.rows(spans)
    assert (rows[:, 0].tolist(), idx.tolist()) == ([7.0, 7.0, 2.0], [4, 5, 7])
    features.work(MediaWork((b"a",), (), 0.0))
    with pytest.raises(Exception, match="not in memory"):
        features.rows(spans[1:])
    features.close()


def test_a_dropped_picture_is_not_computed_further():
    clock = Clock()
    features = MediaFeatures(Layers(clock, 4), CPU, clock)
    assert features.work(MediaWork((), (item(b"a", 0.0), item(b"b", 1.0)), 1.5)).ready == ()
    result = features.work(MediaWork((b"a",), (), 100.0))
    assert result.ready == (b"b",)
    assert features.work(MediaWork((), (), 100.0)).ready == ()
    features.close()


def test_another_number_of_rows_is_an_error():
    clock = Clock()
    features = MediaFeatures(Layers(clock, 1), CPU, clock)
    wrong = MediaItem(b"a", 4, item(b"a", 0.0).inputs)
    assert "expected 4" in features.work(MediaWork((), (wrong,), 9.0)).errors[b"a"]
    features.close()
