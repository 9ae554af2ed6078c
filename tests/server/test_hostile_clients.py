"""A short run of the attacks; `make hostile` runs them for longer."""

import importlib.util
import resource
from pathlib import Path

import pytest

from graftlm.testing.server_process import ServerProcess


def load_attacks():
    spec = importlib.util.spec_from_file_location("hostile_clients", Path(__file__).with_name("hostile_clients.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


attacks = load_attacks()

#: An attack ends when the server has closed its connections: after 2 s, or much later on a busy machine.
MOST_SECONDS = 60.0


@pytest.fixture(scope="module")
def victim():
    """A server that starts with a low file limit and with timeouts of one second."""
    settings = attacks.CONFIG["server"] | {"header_timeout_s": 1.0, "stall_timeout_s": 1.0}
    with attacks.file_limit(256):
        server = ServerProcess(attacks.CONFIG | {"server": settings}, environment={"OMP_NUM_THREADS": "1"})
    with server:
        yield server


@pytest.mark.parametrize("attack", attacks.ATTACKS, ids=lambda attack: attack.__name__)
def test_an_attack_uses_little_memory_and_delays_no_normal_request(request, victim, attack):
    # The middleware refuses foreign Hosts for all routes; the quick set tries some of them.
    paths = 0 if request.config.getoption("--full") else 12
    # This server grows by 3 MiB. A server without `max_header_bytes` grows by 32 to 73 MiB.
    limits = attacks.Limits(MOST_SECONDS, connections=600, probes=100, max_bytes=96 * 2**20, paths=paths)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with attacks.file_limit(hard):
        (outcome,) = attacks.run(victim, [attack], limits)
    assert (outcome.num_lost, outcome.num_wrong) == (0, 0), outcome
    assert outcome.rss_growth_mib < 24, outcome
    assert outcome.num_left_open == 0, outcome


def test_a_server_without_file_descriptors_for_connections_recovers(victim):
    """The call to accept then fails with EMFILE. The server must neither retry in a busy loop nor exit.

    It uses 1 % of a core. A busy loop uses all CPU time that it can get, which is less on a loaded machine.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    before = resource.prlimit(victim.process.pid, resource.RLIMIT_NOFILE)
    with attacks.file_limit(hard):
        resource.prlimit(victim.process.pid, resource.RLIMIT_NOFILE, (attacks.num_files(victim) + 8, before[1]))
        try:
            cpu_share = attacks.starve(victim, num_connections=100, seconds=2.0)
        finally:
            resource.prlimit(victim.process.pid, resource.RLIMIT_NOFILE, before)
        assert cpu_share < 0.25
        (outcome,) = attacks.run(victim, [attacks.slow_headers], attacks.Limits(MOST_SECONDS, connections=20))
    assert outcome.num_lost == 0, outcome
