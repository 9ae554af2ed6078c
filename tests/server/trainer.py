"""Rank 0 of a group, as the trainers of SGLang's users are; `python trainer.py WORLD_SIZE TIMEOUT_S`.

It prints the port of its TCP store and joins the group. Then it reads commands from standard input, one JSON object per
line, and prints a line after each.
"""

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d as c10d

GROUP = "weight_update_group"


def main():
    world_size, timeout = int(sys.argv[1]), timedelta(seconds=float(sys.argv[2]))
    store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False, timeout=timeout)
    print(store.port, flush=True)
    group, _ = c10d._new_process_group_helper(
        world_size, 0, [], c10d.Backend("gloo"), c10d.PrefixStore(GROUP, store), group_name=GROUP, timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    print("joined", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        tensors = load_file(command["file"])
        for name in command["names"]:
            tensor = tensors[name].to(getattr(torch, command["dtype"]))
            if "times" in command:
                tensor = tensor.repeat(command["times"])
            dist.broadcast(tensor, 0, group=group)
        if command.get("dies"):
            os._exit(1)
        print("sent", flush=True)


main()
