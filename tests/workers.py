"""Processes that the distributed tests share: started once, they run one function after another."""

import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

MAX_WORLD = 4
TIMEOUT = timedelta(seconds=60)


def _serve(rank, path, pipe):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=MAX_WORLD, timeout=TIMEOUT
    )
    groups = {world: dist.new_group(range(world)) for world in range(1, MAX_WORLD + 1)}
    while (task := pipe.recv()) is not None:
        function, world, arguments = task
        torch.manual_seed(20170123)
        try:
            result = function(groups[world], rank, *arguments)
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        else:
            pipe.send((True, result))
    dist.destroy_process_group()


class Workers:
    """`run` calls a function of a test module in the first `world` of the processes at once."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(MAX_WORLD):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, os.path.join(self.folder.name, "store"), there)
            )
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, world, function, *arguments):
        """function(group, rank, *arguments) in each process; the results by rank.

        Tensors travel by value, as numpy arrays would: no process has to outlive its results.
        """
        for pipe in self.pipes[:world]:
            pipe.send((function, world, arguments))
        answers = []
        for rank, pipe in enumerate(self.pipes[:world]):
            if not pipe.poll(2 * TIMEOUT.total_seconds()):
                raise TimeoutError(f"rank {rank} of {world} does not answer")
            answers.append(pipe.recv())
        for rank, (succeeded, result) in enumerate(answers):
            if not succeeded:
                raise AssertionError(f"rank {rank} of {world}:\n{result}")
        return [result for _, result in answers]

    def close(self):
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send(None)
            process.join(10)
            if process.is_alive():
                process.kill()
        self.folder.cleanup()
