"""Where this process stands: its device, its place in the rank grid and the groups it belongs to.

    grid = arange(world).view(pp, dp, cp)                      one row of ranks a pipeline stage
    experts = arange(world).view(pp, dp * cp // ep, ep)        expert groups are consecutive ranks

The user gives pp, cp and ep; dp is what is left. Attention may use data or context parallelism
while the same ranks form expert groups. Dense parameters are replicated over a stage's dp * cp
ranks, an expert's over the dp * cp / ep ranks that hold it.
"""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.config import Run
from common.dualpipev import Action, schedule


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes, this rank's coordinates, its device and its process groups.

    A group of one rank is None. `stage`: the dp * cp replicas of this stage's dense parameters;
    `replicas`: the ranks that hold the same experts; `experts`, `counts`: the ranks that share a
    layer's experts, twice, so that the small exchange need not queue behind the large one;
    `ring`: the ranks that share a sequence; `down`, `up`: by the lower pipeline rank of each pair
    of neighbours, transfers to the higher rank and back.
    """

    rank: int
    world: int
    pp: int
    dp: int
    cp: int
    ep: int
    device: torch.device
    pp_rank: int = 0
    dp_rank: int = 0
    cp_rank: int = 0
    ep_rank: int = 0
    pipeline: tuple[int, ...] = (0,)  # the ranks of this rank's pipeline, in order
    stage: Any = None
    replicas: Any = None
    experts: Any = None
    counts: Any = None
    ring: Any = None
    down: dict[int, Any] = field(default_factory=dict)
    up: dict[int, Any] = field(default_factory=dict)

    def first_expert(self, experts: int) -> int:
        """Index of this rank's first of `experts`."""
        return self.ep_rank * experts // self.ep


def grid(world: int, pp: int, cp: int) -> Tensor:
    """Ranks by (pipeline, data, context) coordinate: (pp, dp, cp)."""
    return torch.arange(world).view(pp, -1, cp)


def expert_grid(world: int, pp: int, ep: int) -> Tensor:
    """Ranks by (pipeline, copy, expert rank): (pp, dp·cp/ep, ep)."""
    return torch.arange(world).view(pp, -1, ep)


def from_rank_0(value: Any) -> Any:
    """Rank 0's value, on every rank: ranks that looked at a file system may have seen two."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def spread_layers(layers: int, n_chunks: int, head: float = 0.0) -> list[range]:
    """Consecutive layers to chunks, so that every rank of the V has alike much to compute.

    Rank r has chunks r and -1 - r, so rank 0 has the head too; `head` is its share of the weights
    that multiply a token. As one large product it takes about half the time of layers with as many
    weights (H200, 4,096 tokens; in layers, counted so and measured: Qwen3 2.7 and 2.1, GPT-OSS 2.3
    and 2.4, DeepSeek-V2-Lite 1.3 and 1.0). A chunk has at least one layer.
    """
    assert layers >= n_chunks, (layers, n_chunks)
    if n_chunks < 4:
        cuts = [-(-i * layers // n_chunks) for i in range(n_chunks + 1)]
        return [range(*cuts[i : i + 2]) for i in range(n_chunks)]
    pp, worth = n_chunks // 2, layers * head / (1 - head) / 2
    first = max(int((layers + worth) / pp - worth + 0.5), 2)
    count, extra = divmod(layers - first, pp - 1)
    totals = [first] + [count + (rank < extra) for rank in range(pp - 1)]
    sizes = [n - n // 2 for n in totals] + [n // 2 for n in reversed(totals)]
    return [range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(n_chunks)]


def world_size() -> int:
    """Processes that torchrun started; 1 without it. Needs no process group."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def start(run: Run) -> Mesh:
    """Claim the device (CUDA where there is one), join the other processes and return the mesh.

    `run` has been checked against `world_size()`. Under torchrun a process group is made (NCCL on
    CUDA, else gloo), whose collectives fail after --timeout seconds.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once
        torch.utils.deterministic.fill_uninitialized_memory = False  # poisoning is for tests
    torch.use_deterministic_algorithms(run.deterministic)
    if world_size() > 1 and not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        # Where another rank is gone: end (3) without the abort that torchrun asks for (1), which
        # waits for ever for what a CUDA graph has recorded; after 4 times 2 s instead of 15.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"
        os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "2000")
        dist.init_process_group(backend, timeout=timedelta(seconds=run.timeout))
    return build(run, device)


def build(run: Run, device: torch.device) -> Mesh:
    """The mesh over the default process group, or of one process without it."""
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    pp, cp, ep = run.pp, run.cp, run.ep
    ranks, experts = grid(world, pp, cp), expert_grid(world, pp, ep)
    pp_rank, dp_rank, cp_rank = (ranks == rank).nonzero()[0].tolist()
    ep_rank = (experts == rank).nonzero()[0, 2].item()
    pipeline = tuple(ranks[:, dp_rank, cp_rank].tolist())

    def connect(made: Any, exchanges: bool = False) -> None:
        """NCCL connects, and allocates, at a group's first use.

        Neighbours in a pipeline first use theirs in different orders, and would wait for each other
        for ever; and later torch may have all the memory.
        """
        one = torch.zeros(dist.get_world_size(made), device=device)
        dist.all_reduce(one, group=made)
        if exchanges:
            dist.all_to_all_single(torch.empty_like(one), one, group=made)

    def group(table: Tensor, exchanges: bool = True) -> Any:
        """This rank's group among the table's rows; every rank makes all of them, in order."""
        mine = None
        for row in table.tolist():
            made = None
            if len(row) > 1:
                made = dist.new_group(row, timeout=timedelta(seconds=run.timeout))
            if rank in row and made is not None:
                connect(made, exchanges)
            mine = made if rank in row else mine
        return mine

    if world > 1:
        connect(None)
    pipelines = ranks.flatten(1).T  # (dp·cp, pp)
    pairs = [pipelines[:, i : i + 2] for i in range(pp - 1)]
    return Mesh(
        rank, world, pp, ranks.shape[1], cp, ep, device, pp_rank, dp_rank, cp_rank, ep_rank,
        pipeline,
        stage=group(ranks.flatten(1), exchanges=False),
        replicas=group(experts.transpose(1, 2).flatten(0, 1), exchanges=False),
        experts=group(experts.flatten(0, 1)),
        counts=group(experts.flatten(0, 1)),
        ring=group(ranks.flatten(0, 1)),
        down={i: group(pair) for i, pair in enumerate(pairs)},
        up={i: group(pair) for i, pair in enumerate(pairs)},
    )  # fmt: skip


def seeded(device: torch.device, *key: Any) -> torch.Generator:
    """A generator that depends on `key` alone: the step uses no global random state."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


class Room:
    """What is reserved for exchanges, so that the host need not wait for the number of their rows.

    rows: to each rank, and slots: at each rank, both for every exchange of a step; None in the
    first step, which waits for its numbers. Afterwards it is --room times the most that this step
    needed anywhere, but no more than can come: all tokens (of `choices` experts each). It stays so
    for as long as it may, as what was recorded (common/graph.py) holds for one size: a step that
    needs more is done again, waiting, and sets it anew; one for which less than half would do sets
    it anew for the next. With --room 0 all wait.
    """

    def __init__(self, run: Run, mesh: Mesh, choices: int):
        tokens = run.micro_batch * run.seq_len // mesh.cp
        self.factor, self.most = run.room, (tokens, mesh.ep * tokens * choices)
        self.rows = self.slots = None
        self.need = torch.zeros(2, dtype=torch.int64, device=mesh.device)  # rows and slots

    def note(self, sent_P2: Tensor, received_P2: Tensor) -> tuple[int, int] | None:
        """What an exchange needs (rows and slots to each rank; from each), noted on the device.

        Returns the rows and slots reserved for it, if any are.
        """
        here = torch.stack([sent_P2[:, 0].max(), received_P2[:, 1].sum()])
        torch.maximum(self.need, here, out=self.need)
        return None if self.rows is None else (self.rows, self.slots)

    def settle(self) -> bool:
        """After the last backward: whether all had room, on every rank. The host waits once."""
        dist.all_reduce(self.need, dist.ReduceOp.MAX)
        rows, slots = self.need.tolist()
        self.need.zero_()
        if self.rows is not None and (rows > self.rows or slots > self.slots):
            self.rows = self.slots = None
            return False
        wanted = (-(-int(n * self.factor) // 64) * 64 for n in (rows, slots))
        rows, slots = map(min, wanted, self.most)
        if self.factor and (self.rows is None or 2 * rows < self.rows or 2 * slots < self.slots):
            self.rows, self.slots = rows, slots
        return True


def place(pp: int, rank: int, chunk: int) -> int:
    """Number among the model's 2·pp chunks of a rank's chunk 0 or 1: the V goes down and up."""
    return rank if chunk == 0 else 2 * pp - 1 - rank


def crossing_of(pp: int, rank: int, action: Action, train: bool = True) -> tuple[list, list]:
    """What an action makes, and what it needs of other chunks: ("f" or "b", place of its maker, m).

    Activations come from the chunk before, gradients (when training) from the one behind.
    """
    makes, needs = [], []
    for kind, what, step in (("f", action.f, -1), ("b", train and action.b, 1)):
        if what:
            here, m = place(pp, rank, what[0]), what[1]
            makes.append((kind, here, m))
            needs += [(kind, here + step, m)] if 0 <= here + step < 2 * pp else []
    return makes, needs


@dataclass(frozen=True)
class Span:
    """An action on a rank, from `start` to `end` in units of cost."""

    rank: int
    action: Action
    start: float
    end: float


def simulate(
    pp: int, micro_batches: int, cost: Callable[[Action], float], train: bool = True
) -> list[Span]:
    """When each rank runs its actions, in their order and as early as it can.

    `cost`: what an action takes; transfers take no time. Raises ValueError if the ranks wait for
    each other for ever.
    """
    queues = [deque(schedule(pp, rank, micro_batches)) for rank in range(pp)]
    free, done, spans = [0.0] * pp, {}, []
    while any(queues):
        before = len(spans)
        for rank, queue in enumerate(queues):
            while queue:
                makes, needs = crossing_of(pp, rank, queue[0], train)
                if not all(key in done for key in needs):
                    break
                action = queue.popleft()
                start = max([free[rank], *(done[key] for key in needs)])
                free[rank] = end = start + cost(action)
                spans.append(Span(rank, action, start, end))
                done |= dict.fromkeys(makes, end)
        if len(spans) == before:
            raise ValueError(f"pp {pp}, {micro_batches} micro-batches: deadlock")
    return spans


@cache
def timetable(pp: int, micro_batches: int, train: bool) -> dict[tuple[str, int, int], float]:
    """What all ranks make, as `crossing_of` names it, each rank's in order: in which round.

    In a round every rank takes its next action, if what that needs was made in earlier ones.
    """
    spans = simulate(pp, micro_batches, lambda action: 1, train)
    made = [(crossing_of(pp, span.rank, span.action, train)[0], span.start) for span in spans]
    return {key: start for makes, start in made for key in makes}


class Pipe:
    """The way of (B, T, D) tensors, alike in shape and dtype, between a pipeline's ranks.

    `down[i]` and `up[i]` are groups of the pipeline's ranks i and i + 1 (`ranks`: their global
    numbers). Each carries one direction only, so that sends and receives never queue behind each
    other. Before an action all receives are posted whose tensors are made in earlier rounds of the
    timetable, in the sender's order, and none of later rounds. On a GPU a posted receive is a
    kernel that waits for the sender, and what waits for the whole device (a kernel that is loaded
    or tuned, memory that is given back) waits with it: for earlier rounds only, so no two ranks
    wait for each other. At the turn of the V both chunks are on one rank, and a tensor is only
    handed over.
    """

    AHEAD = 4  # sends under way before the next waits for the oldest

    def __init__(self, rank: int, ranks: Sequence[int], down: dict, up: dict, like: Tensor):
        self.rank, self.pp, self.like = rank, len(ranks), like
        before, after = ranks[rank - 1], ranks[(rank + 1) % len(ranks)]
        self.to = {True: (after, down.get(rank)), False: (before, up.get(rank - 1))}
        self.source = {True: (before, down.get(rank - 1)), False: (after, up.get(rank))}

    def start(self, micro_batches: int, train: bool) -> None:
        """Begin a run: nothing is left of the last one."""
        self.rounds = timetable(self.pp, micro_batches, train)
        self.coming: dict[bool, deque[tuple]] = {}
        self.posted: dict[tuple, tuple[Any, Tensor]] = {}
        self.handed: dict[tuple, Tensor] = {}
        self.sending: deque[tuple[Any, Tensor]] = deque()
        for down, (_, group) in self.source.items():
            if group is not None:
                sender = self.rank + (-1 if down else 1)
                first, second = (place(self.pp, sender, chunk) for chunk in (0, 1))
                kinds = {("f", first), ("b", second)} if down else {("f", second), ("b", first)}
                self.coming[down] = deque(key for key in self.rounds if key[:2] in kinds)

    @staticmethod
    def _launch(op: Callable, tensor: Tensor, peer: int, group: Any) -> Any:
        # Batched, NCCL uses the group's own communicator; alone it would make one a pair, at a
        # moment when the other side may not be there to join.
        return dist.batch_isend_irecv([dist.P2POp(op, tensor, peer, group)])[0]

    def receive(self, kind: str, chunk: int, m: int) -> Tensor:
        """The activation or gradient of micro-batch m that this rank's chunk waits for."""
        down = (kind == "f") == (chunk == 0)
        if self.source[down][1] is None:
            return self.handed.pop((kind, chunk, m))
        here = place(self.pp, self.rank, chunk)
        now = self.rounds[kind, here, m]
        for way, keys in self.coming.items():
            while keys and self.rounds[keys[0]] < now:
                buffer = torch.empty_like(self.like)
                work = self._launch(dist.irecv, buffer, *self.source[way])
                self.posted[keys.popleft()] = work, buffer
        work, buffer = self.posted.pop((kind, here - 1 if kind == "f" else here + 1, m))
        work.wait()
        return buffer

    def send(self, kind: str, chunk: int, m: int, tensor: Tensor) -> None:
        """Pass on what this rank's chunk computed of micro-batch m."""
        peer, group = self.to[(kind == "f") == (chunk == 0)]
        if group is None:
            self.handed[kind, 1 - chunk, m] = tensor
            return
        tensor = tensor.contiguous()
        self.sending.append((self._launch(dist.isend, tensor, peer, group), tensor))
        if len(self.sending) > self.AHEAD:
            self.sending.popleft()[0].wait()

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        while self.sending:
            self.sending.popleft()[0].wait()
        assert not self.posted and not self.handed, (self.posted.keys(), self.handed.keys())
