"""A trainer, which is a process of its own, broadcasts weights to a real server by torch.distributed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx2
import psutil
import pytest
from safetensors.torch import load_file, save_file

from graftlm.demo import demo_checkpoint
from graftlm.testing.server_process import ServerProcess, wait_until

NORM = "model.norm.weight"
TIMEOUT_S = 5.0
LONG = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
FILE = str(demo_checkpoint() / "model.safetensors")


def serve(**config):
    server = {"open_admin": True, "trainer_timeout_s": TIMEOUT_S} | config.pop("server", {})
    config = {"model": "demo", "memory": {"kv_tokens": 8192}, "server": server} | config
    return ServerProcess(config, environment={"OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def server(weights_server):
    return weights_server


@pytest.fixture
def restored(server):
    """Return a client, and restore the weights after the test."""
    with httpx2.Client(base_url=server.url, timeout=120) as client:
        yield client
        restored = {"model_path": "demo", "weight_version": "default"}
        assert client.post("/update_weights_from_disk", json=restored).status_code == 200


@pytest.fixture
def client(restored, server):
    """Return a client of a server that is in no group."""
    yield restored
    assert receivers(server) == []


@pytest.fixture(scope="module")
def weights():
    return load_file(FILE)


class Trainer:
    """The process of rank 0, and its port."""

    def __init__(self, world_size=2):
        command = [sys.executable, str(Path(__file__).with_name("trainer.py")), str(world_size), "60"]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.world_size, self.port = world_size, int(self.process.stdout.readline())

    @property
    def group(self):
        place = {"master_address": "127.0.0.1", "master_port": self.port}
        return place | {"rank_offset": 1, "world_size": self.world_size, "backend": "gloo"}

    def send(self, names, file=FILE, dtype="float32", **how):
        """Broadcast tensors of a file as this dtype."""
        self.process.stdin.write(json.dumps({"names": names, "file": str(file), "dtype": dtype} | how) + "\n")
        self.process.stdin.flush()

    def wait(self, line):
        assert self.process.stdout.readline().strip() == line


@contextmanager
def joined(client, world_size=2):
    """Start a trainer, and let the server join its group."""
    trainer = Trainer(world_size)
    try:
        answer = client.post("/init_weights_update_group", json=trainer.group)
        assert answer.json()["success"], answer.text
        trainer.wait("joined")
        yield trainer
    finally:
        trainer.process.kill()
        trainer.process.communicate()
        client.post("/destroy_weights_update_group", json={})


def update(client, weights, names, dtype="float32", **fields):
    shapes = [list(weights[name].shape) for name in names]
    body = {"names": names, "dtypes": [dtype] * len(names), "shapes": shapes} | fields
    return client.post("/update_weights_from_distributed", json=body)


def ask(client, **sampling):
    sampling = {"temperature": 0, "max_new_tokens": 12} | sampling
    return client.post("/generate", json={"text": "The capital of France is", "sampling_params": sampling}).json()


def receivers(server):
    """Return the receivers' processes."""
    children = psutil.Process(server.process.pid).children()
    return [it for it in children if any(arg.startswith("receiver-") for arg in it.cmdline())]


def wait_for_receiving(server):
    """Wait until the first receiver has allocated memory for tensors."""
    wait_until(lambda: any("memfd:graftlm" in it.path for it in receivers(server)[0].memory_maps()))


def message(answer):
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


@pytest.mark.full
def test_a_trainer_updates_every_replica(tmp_path, weights):
    changed = {name: tensor * 0.5 if "layers.0" in name else tensor for name, tensor in weights.items()}
    save_file(changed, tmp_path / "changed.safetensors")
    names = list(weights)
    with serve(parallel={"data": 2}) as server, httpx2.Client(base_url=server.url, timeout=120) as client:
        before = ask(client)["output_ids"]
        with joined(client, world_size=3) as trainer:
            assert [it.cmdline()[-1] for it in receivers(server)] == ["receiver-0", "receiver-1"]
            for bucket in (names[::2], names[1::2]):
                trainer.send(bucket, tmp_path / "changed.safetensors")
                answer = update(client, weights, bucket, weight_version="step-1")
                assert answer.json() == {"success": True, "message": answer.json()["message"], "num_paused_requests": 0}
                trainer.wait("sent")
            both = [client.post("/get_weights_by_name", json={"name": name}).json() for name in (NORM, names[3])]
            expected = [changed[name][:100].float().tolist() for name in (NORM, names[3])]
            assert both == expected
            answers = [ask(client) for _ in range(4)]
            assert {answer["meta_info"]["weight_version"] for answer in answers} == {"step-1"}
            assert len({tuple(answer["output_ids"]) for answer in answers}) == 1
            assert answers[0]["output_ids"] != before
            assert answers[0]["meta_info"]["cached_tokens"] == 0
            trainer.send(names)
            assert update(client, weights, names, flush_cache=True).status_code == 200
            assert ask(client)["output_ids"] == before
        assert receivers(server) == []


@pytest.mark.full
def test_requests_run_while_tensors_are_received(client, server, weights):
    with joined(client) as trainer, ThreadPoolExecutor(1) as threads:
        updating = threads.submit(update, client, weights, [NORM])
        wait_for_receiving(server)
        assert len(ask(client, **LONG)["output_ids"]) == 400
        assert not updating.done()
        trainer.send([NORM])
        assert updating.result().status_code == 200


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"dies": True}, "'model.layers.0.input_layernorm.weight' did not arrive: "),
        ({}, "'model.layers.0.input_layernorm.weight' did not arrive: .*[Tt]imed out"),
        ({"dtype": "bfloat16"}, "'model.norm.weight' did not arrive completely"),
        ({"times": 1000}, "the process ended .killed by SIGABRT.; this happens if a tensor was broadcast with another"),
    ],
    ids=["dies", "stops", "sends-less", "sends-more"],
)
def test_without_all_tensors_the_old_weights_go_on_serving(client, server, weights, how, expected):
    before = ask(client)["output_ids"]
    names = [NORM, "model.layers.0.input_layernorm.weight"]
    with joined(client) as trainer:
        trainer.send([NORM], **how)
        start_s = time.monotonic()
        text = message(update(client, weights, names, weight_version="lost"))
        assert time.monotonic() - start_s < TIMEOUT_S + 10
        assert text.startswith("the weights were not changed, and the group is destroyed: receiver-0: ")
        assert re.search(expected, text)
        assert receivers(server) == []
        assert "there is no group 'weight_update_group'" in message(update(client, weights, names))
    answer = ask(client)
    assert (answer["output_ids"], answer["meta_info"]["weight_version"]) == (before, "default")
    assert client.get("/health").json()["status"] == "ok"


@pytest.mark.full
def test_a_trainer_that_never_comes_is_an_error_within_the_time_limit(client, server):
    trainer = Trainer(world_size=3)  # the third rank is missing
    try:
        start_s = time.monotonic()
        refused = client.post("/init_weights_update_group", json=trainer.group)
        assert f"could not join the group at 127.0.0.1:{trainer.port} within 5 s" in message(refused)
    finally:
        trainer.process.kill()
        trainer.process.communicate()
    refused = client.post("/init_weights_update_group", json=trainer.group)  # nobody listens at the port
    assert "could not join the group" in message(refused)
    assert time.monotonic() - start_s < 2 * TIMEOUT_S + 20
    assert receivers(server) == []
    assert ask(client)["output_ids"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"backend": "nccl"}, "the backend nccl needs a CUDA device"),
        ({"backend": "mpi"}, "backend"),
        ({"master_address": "192.0.2.1"}, "groups at '192.0.2.1' are not allowed; list the address in server.trainer_"),
        ({"rank_offset": 0}, "the ranks 0 to 0 of the 1 replicas must be above 0 and below the world size 2"),
        ({"rank_offset": 2}, "the ranks 2 to 2 of the 1 replicas"),
    ],
)
def test_a_group_that_cannot_be_joined_is_refused(client, fields, expected):
    group = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    assert expected in message(client.post("/init_weights_update_group", json=group | fields))


class TestOneGroup:
    """Updates by one trainer, in one group."""

    @pytest.fixture(scope="class")
    @classmethod
    def trainer(cls, server):
        with httpx2.Client(base_url=server.url, timeout=120) as client:
            with joined(client) as trainer:
                yield trainer
            assert receivers(server) == []

    @pytest.fixture
    def client(self, restored, trainer):
        return restored

    def test_the_weights_are_replaced_and_no_cached_prefix_is_used(self, client, trainer, weights, tmp_path):
        changed = {name: tensor * 0.5 if "layers.0" in name else tensor for name, tensor in weights.items()}
        save_file(changed, tmp_path / "changed.safetensors")
        before = ask(client)["output_ids"]
        names = list(weights)
        for bucket in (names[::2], names[1::2]):
            trainer.send(bucket, tmp_path / "changed.safetensors")
            answer = update(client, weights, bucket, weight_version="step-1")
            assert answer.json() == {"success": True, "message": answer.json()["message"], "num_paused_requests": 0}
            trainer.wait("sent")
        shown = [client.post("/get_weights_by_name", json={"name": name}).json() for name in (NORM, names[3])]
        assert shown == [changed[name][:100].float().tolist() for name in (NORM, names[3])]
        answer = ask(client)
        assert answer["meta_info"]["weight_version"] == "step-1"
        assert answer["output_ids"] != before
        assert answer["meta_info"]["cached_tokens"] == 0
        trainer.send(names)
        assert update(client, weights, names, flush_cache=True).status_code == 200
        trainer.wait("sent")
        assert ask(client)["output_ids"] == before

    def test_tensors_arrive_in_the_dtype_in_which_they_are_sent(self, client, trainer, weights):
        trainer.send([NORM], dtype="bfloat16")
        assert update(client, weights, [NORM], dtype="torch.bfloat16").status_code == 200
        trainer.wait("sent")
        shown = client.post("/get_weights_by_name", json={"name": NORM}).json()
        assert shown == weights[NORM][:100].bfloat16().float().tolist()

    def test_tensors_that_do_not_fit_are_refused_and_the_group_stays_usable(self, client, trainer, weights):
        before = ask(client)["output_ids"]
        trainer.send([NORM])
        body = {"names": ["nonsense"], "dtypes": ["float32"], "shapes": [list(weights[NORM].shape)]}
        refused = client.post("/update_weights_from_distributed", json=body)
        assert "'nonsense', which this model does not use" in message(refused)
        assert client.post("/sleep", params={"level": 1}).status_code == 200
        trainer.send([NORM])
        assert "the memory of the weights is released" in message(update(client, weights, [NORM]))
        assert client.post("/wake_up").status_code == 200
        trainer.send([NORM])
        assert update(client, weights, [NORM]).status_code == 200
        for _ in range(3):
            trainer.wait("sent")
        assert ask(client)["output_ids"] == before

    def test_after_level_2_a_trainer_sends_all_weights(self, client, trainer, weights):
        before = ask(client)["output_ids"]
        names = list(weights)
        assert client.post("/sleep", params={"level": 2}).status_code == 200
        assert client.post("/wake_up", params={"tags": "weights"}).status_code == 200
        for bucket in (names[::2], names[1::2]):
            assert client.get("/health").status_code == 503
            trainer.send(bucket)
            answer = update(client, weights, bucket)
            assert answer.status_code == 200, answer.text
            trainer.wait("sent")
        assert client.post("/wake_up").status_code == 200
        assert ask(client)["output_ids"] == before

    def test_a_group_has_a_name_that_only_one_group_has(self, client, trainer, weights):
        assert "there is no group 'other'" in message(update(client, weights, [NORM], group_name="other"))
        destroyed = client.post("/destroy_weights_update_group", json={"group_name": "other"})
        assert "there is no group" in message(destroyed)
        empty = {"names": [], "dtypes": [], "shapes": []}
        again = client.post("/init_weights_update_group", json=trainer.group)
        assert "the group 'weight_update_group' exists; destroy it first" in message(again)
        assert "no weights are given" in message(client.post("/update_weights_from_distributed", json=empty))
        refused = client.post("/update_weights_from_distributed", json=empty | {"names": [NORM]})
        assert "must have the same length, got 1, 0 and 0" in message(refused)


@pytest.mark.full
def test_a_group_can_be_destroyed_while_tensors_are_awaited(client, server, weights):
    with joined(client), ThreadPoolExecutor(1) as threads:
        updating = threads.submit(update, client, weights, [NORM])
        wait_for_receiving(server)
        assert client.post("/destroy_weights_update_group", json={}).status_code == 200
        assert "the group was destroyed" in message(updating.result())


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_receivers_end_with_the_server(number):
    with serve() as server, httpx2.Client(base_url=server.url, timeout=60) as client:
        trainer = Trainer()
        try:
            assert client.post("/init_weights_update_group", json=trainer.group).status_code == 200
            (receiver,) = receivers(server)
            server.process.send_signal(number)
            server.process.wait(30)
            receiver.wait(10)
        finally:
            trainer.process.kill()
            trainer.process.communicate()
