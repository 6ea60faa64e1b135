"""Worker processes that the distributed tests share.

They start once and run functions in sequence.
"""

import functools
import inspect
import itertools
import multiprocessing
import multiprocessing.connection
import sys
import tempfile
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

MAX_WORLD = 4
TIMEOUT = timedelta(seconds=60)
ANSWER_SECONDS = 120
# The workers are forked from a process that has imported these, which takes seconds.
IMPORTED = ["moe_ext.distributed", "pytest", "torch.distributed.checkpoint", "torch._dynamo"]
# What the ranks import too if tests of transformers are collected.
TRANSFORMERS = ["moe_ext.integrations.transformers", "transformers.trainer", "peft"]


def on_ranks(world):
    """Makes a test of a function that each of `world` ranks calls.

    The function takes the process group and the rank. pytest gives the other arguments.
    """

    def decorate(function):
        fixtures = list(inspect.signature(function).parameters.values())[2:]

        @functools.wraps(function)
        def test(workers, **arguments):
            workers.run(world, test, *(arguments[p.name] for p in fixtures))

        fixture = inspect.Parameter("workers", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([fixture, *fixtures])
        return test

    return decorate


def forkserver(*more):
    """Returns the context of processes that have imported the layer already, and more modules."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED, *more])
    return context


def _serve(rank, folder, pipe):
    torch.set_num_threads(1)
    while (task := pipe.recv()) is not None:
        number, function, world, arguments = task
        torch.manual_seed(20170123)
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/{number}",
                rank=rank,
                world_size=world,
                timeout=TIMEOUT,
            )
            result = inspect.unwrap(function)(dist.group.WORLD, rank, *arguments)
            # A rank that closes its connections fails others that still connect (a defect of gloo).
            dist.barrier()
            dist.destroy_process_group()
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        else:
            pipe.send((True, result))


class Workers:
    """A pool of processes; `run` calls a function of a test module in the first `world` of them."""

    def __init__(self):
        self._pipes, self._processes = [], []
        self._tasks = itertools.count()

    def _start(self):
        self._folder = tempfile.TemporaryDirectory()
        context = forkserver(*(TRANSFORMERS if "transformers" in sys.modules else []))
        for rank in range(MAX_WORLD):
            connection, worker_end = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self._folder.name, worker_end))
            process.start()
            worker_end.close()
            self._pipes.append(connection)
            self._processes.append(process)

    def run(self, world, function, *arguments, seconds=ANSWER_SECONDS):
        """Calls function(group, rank, *arguments) on each rank; returns the results by rank.

        It fails if no rank answers for this number of seconds.
        If one rank fails, the pool is terminated, because the other ranks may wait for it. The
        next run starts new processes.
        """
        if not self._processes:
            self._start()
        pipes = self._pipes[:world]
        number = next(self._tasks)
        for pipe in pipes:
            pipe.send((number, function, world, arguments))
        results = [None] * world
        missing = set(pipes)
        while missing:
            ready = multiprocessing.connection.wait(missing, seconds)
            failure = "" if ready else "no answer"
            for pipe in ready:
                rank = pipes.index(pipe)
                try:
                    succeeded, result = pipe.recv()
                except EOFError:
                    succeeded, result = False, "the process ended"
                results[rank] = result
                missing.remove(pipe)
                if not succeeded:
                    failure += f"rank {rank} of {world}: {result}"
            if failure:
                self.close()
                raise AssertionError(failure)
        return results

    def close(self):
        """Kills the processes; the next run starts new ones."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        if self._processes:
            self._folder.cleanup()
        self._pipes, self._processes = [], []
