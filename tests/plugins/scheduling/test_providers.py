import pytest

import graftlm_scheduling
from graftlm.contracts import API_VERSION, SchedulingContext

PROVIDERS = {provider.name: provider for provider in graftlm_scheduling.provide_scheduling_policies()}


@pytest.mark.parametrize(
    ("name", "class_name"),
    [
        ("lpm", "LongestPrefixMatch"),
        ("dfs_weight", "DepthFirstByWeight"),
        ("fcfs", "FirstComeFirstServed"),
        ("lof", "LongestOutputFirst"),
        ("priority", "PreemptivePriority"),
        ("random", "RandomOrder"),
    ],
)
def test_a_provider_creates_its_policy(name, class_name):
    provider = PROVIDERS[name]
    policy = provider.create(provider.options(), SchedulingContext())
    assert type(policy).__name__ == class_name
    assert provider.api_version == API_VERSION


def test_auto_selects_lpm():
    assert max(PROVIDERS.values(), key=lambda provider: provider.rank).name == "lpm"
