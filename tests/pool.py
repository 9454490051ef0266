"""Run a function on several ranks: `run(2, function, *args)` → what each rank returned.

Workers are started once and live as long as the tests: a job costs milliseconds, not the seconds
that torch takes to import. A job that fails costs its workers; the next one gets new ones.
"""

import os
import pickle
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing import connection, get_context

import torch
import torch.distributed as dist

_START = get_context("forkserver")  # a plain fork would inherit the locks of torch's threads
_START.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])
_JOB_S, _COLLECTIVE_S = 120, 60  # limits of a whole job and of one collective
_workers = []  # (process, pipe to it), by rank


def run(world, function, *args, backend="gloo"):
    """Call function(rank, world, *args) on `world` ranks; their results, by rank.

    `function` is defined at a module's top level; a default process group of `backend` exists
    while it runs ("nccl": on GPUs in turn, the current device; where there are fewer GPUs than
    ranks, some share one). Arguments and results are pickled, tensors by value.
    The first exception of any rank is raised here, with its rank and traceback as a note;
    RuntimeError for a rank that dies, TimeoutError for a job that hangs.
    """
    while len(_workers) < world:
        ours, theirs = _START.Pipe()
        process = _START.Process(target=_work, args=(theirs,), daemon=True)
        process.start()
        theirs.close()  # so that a dead worker is an end of file
        _workers.append((process, ours))
    pipes = {pipe: rank for rank, (_, pipe) in enumerate(_workers[:world])}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for pipe, rank in pipes.items():
                pipe.send_bytes(pickle.dumps((function, rank, world, args, backend, folder)))
            return _collect(pipes, world)
    except BaseException:  # also the test's own timeout: the other ranks may wait for ever
        stop()
        raise


def stop():
    """Kill all workers."""
    for process, pipe in _workers:
        process.kill()
        process.join()
        pipe.close()
    _workers.clear()


def _collect(pipes, world):
    results, deadline = [None] * world, time.monotonic() + _JOB_S
    while pipes:
        ready = connection.wait(list(pipes), deadline - time.monotonic())
        if not ready:
            raise TimeoutError(f"no answer from ranks {sorted(pipes.values())} in {_JOB_S} s")
        for pipe in ready:
            rank = pipes.pop(pipe)
            try:
                error, results[rank] = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                raise RuntimeError(f"rank {rank} of {world} died") from None
            if error is not None:
                error.add_note(f"on rank {rank} of {world}:\n{results[rank]}")
                raise error
    return results


def _work(pipe):
    """A worker's life: jobs, until one fails or the tests end."""
    torch.set_num_threads(1)
    while True:
        try:
            answer = pickle.dumps((None, _job(*pickle.loads(pipe.recv_bytes()))))
        except BaseException as error:
            text = traceback.format_exc()
            try:
                pickle.loads(answer := pickle.dumps((error, text)))
            except Exception:  # an exception that cannot travel
                answer = pickle.dumps((RuntimeError(repr(error)), text))
        pipe.send_bytes(answer)  # once the tests have ended this ends the worker too


def gpu_of(rank):
    """The GPU of this process, which is that rank: in turn, so that ranks may share one.

    NCCL refuses one GPU to two ranks of a host: so they are said to be of two.
    """
    host, device = divmod(rank, torch.cuda.device_count())
    os.environ["NCCL_HOSTID"] = str(host)
    return device


def _job(function, rank, world, args, backend, folder):
    torch.manual_seed(0)
    if backend == "nccl":
        torch.cuda.set_device(gpu_of(rank))
    limit, store = timedelta(seconds=_COLLECTIVE_S), dist.FileStore(f"{folder}/store", world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    result = function(rank, world, *args)
    dist.barrier()  # nobody leaves while another still receives
    dist.destroy_process_group()
    return result
