"""A short run of the random steps; `make random-steps` is a long run."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def random_steps():
    spec = importlib.util.spec_from_file_location("random_steps", Path(__file__).with_name("random_steps.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_round_of_every_kind_passes(random_steps):
    rounds = random_steps.Rounds(steps=150)
    results = [rounds.play(seed) for seed in range(8)]
    assert {kind for kind, _ in results} == {"pages", "windows", "tiers"}
    assert all(counts["steps"] > 20 for _, counts in results)


def test_a_leaked_page_fails_the_round_with_its_seed_and_configuration(random_steps, make_rig):
    class LeakyRig(make_rig):
        def step(self):
            if self.scheduler.counters.steps == 100 and self.scheduler.kv.pool.num_free:
                self.scheduler.kv.pool.allocate(1)
            super().step()

    seed = next(seed for seed in range(20) if random_steps.kind_of(seed) == "pages")
    with pytest.raises(AssertionError, match=rf"seed {seed}: pages \{{'page_size'.*"):
        random_steps.Rounds(300, LeakyRig).play(seed)
