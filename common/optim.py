"""AdamW and Muon over flat buffers, sharded over replicas (ZeRO-1, arXiv 1910.02054).

The parameters that one replica group holds of one model chunk live in one flat buffer
(`Bucket.values`), their gradients in another (`Bucket.grads`, fp32 or wider). Parameters are views
of the first; `param.main_grad` is a view of the second. The flat buffer is cut into consecutive
ranges, one per owner (a rank of the replica group); a rank keeps master weights and moments of its
own range only. A parameter has one replica group (a stage's dense ones the ranks of the stage, an
expert's the ranks that hold it), whose owned ranges are disjoint and complete: a sum over all
ranks' owned ranges counts every parameter of the model once.

Gradients are not kept in `param.grad`: torch.compile refuses a bf16 parameter whose `.grad` is
fp32 (seen in torch 2.13). A hook adds autograd's gradient to `main_grad` and clears `.grad`; code
that computes a weight gradient itself (the experts' grouped GEMMs) writes to `main_grad` directly.

A step is: gradients summed to their owners -> norm of all of them -> skip if not finite -> update
of the owned masters, clipped -> owned parameters to everyone. Collectives are launched bucket by
bucket and run beside each other and beside the updates. The single host synchronisation stands
between the norm and the update, so that the host runs ahead while the update is busy.

A step leaves the gradients zero: AdamW's kernel writes the zeros where it has just read, which
saves a pass over them. The arithmetic is in kernels/adamw.py and common/muon.py.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from common.muon import deal, muon_, split_matrices
from kernels.adamw import adamw_, sum_squares

ALIGN = 128  # elements: 256 bytes in bf16, 512 in fp32
CHUNK = 1 << 24  # elements that Muon handles at a time, which bounds its temporaries

# torch 2.13 renamed both and warns of the old names, 2.11 knows only those.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# Which parameters get what


def decays(name: str, shape: tuple[int, ...]) -> bool:
    """Whether weight decay applies to the parameter: to matrices only, wherever they stand.

    Embedding, head and router are matrices and decay. Norms, biases and sinks do not, also when
    the biases of a layer's experts are stacked to two dimensions.
    """
    *modules, leaf = name.split(".")
    vector = leaf.endswith(("bias", "sinks")) or any("norm" in part for part in (*modules, leaf))
    return len(shape) >= 2 and not vector


def uses_muon(name: str, shape: tuple[int, ...]) -> bool:
    """Whether Muon updates the parameter: hidden matrices and expert stacks, nothing else.

    Not the router (`mlp.gate`, `mlp.router`), the embedding or the head: their rows are looked up
    or compared, which is no map between hidden spaces (Keller Jordan's post, section 'Usage').
    """
    apart = {"gate", "router", "embed_tokens", "lm_head"}
    return decays(name, shape) and apart.isdisjoint(name.split("."))


# Layout: integers only


def layout(
    sizes: list[int], owners: int, matrices: list[int] | None = None
) -> tuple[list[int], list[int]]:
    """(starts, bounds): where each tensor begins in the flat buffer, and where each owner's range.

    sizes: elements of each tensor, in buffer order. starts are multiples of ALIGN. Owner r holds
    the elements [bounds[r], bounds[r + 1]); bounds[owners] is the length of the buffer.

    matrices None: elements are dealt evenly. All ranges have the same length, a multiple of ALIGN,
    and a tensor may straddle owners.
    matrices[i], the number of equal matrices in tensor i: every matrix lies whole in one range. A
    stack must stay contiguous for the model, so there is no room to pad inside it and the **ranges
    may differ in length** or be empty; the longest is as short as matrix boundaries in this order
    allow.
    """
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end = _round_up(end + size, ALIGN)
    if matrices is None:
        length = _round_up(end, owners * ALIGN) // owners
        return starts, [length * r for r in range(owners + 1)]
    marks = [
        start + size // count * i
        for start, size, count in zip(starts, sizes, matrices, strict=True)
        for i in range(count)
    ]
    return starts, deal([*marks, end], owners)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


# Buckets


@dataclass
class Bucket:
    """Flat buffers of the parameters that one rule updates in one replica group and model chunk.

    values: (bounds[-1],) in the parameters' dtype. grads: the same length, fp32, or float64 for
    float64 parameters. Gaps between tensors stay zero. Elements before decay_end are decayed.
    state: owned slices by kind, each (own.stop - own.start,); see Optimizer.
    """

    rule: str  # "adamw" or "muon"
    named_params: list[tuple[str, Parameter]]  # in buffer order
    group: dist.ProcessGroup | None  # the replicas; None where this rank is the only one
    owner: int  # this rank's place in the group
    first_expert: int  # index in the whole model of the first expert that stacks here hold
    starts: list[int]
    bounds: list[int]
    decay_end: int
    values: Tensor
    grads: Tensor
    state: dict[str, Tensor] = field(default_factory=dict)
    pending: list[dist.Work] = field(default_factory=list)  # collectives to wait for
    reduced: bool = False

    @property
    def rounds(self) -> bool:
        """Parameters are rounded masters, else they are the masters themselves."""
        return self.values.dtype != self.grads.dtype

    @property
    def own(self) -> slice:
        """The range of the flat buffers that this rank updates."""
        return slice(self.bounds[self.owner], self.bounds[self.owner + 1])

    def owned(self) -> Iterator[tuple[str, Parameter, int, int, int]]:
        """(name, param, start, lo, hi) of every tensor with elements in the owned range.

        [lo, hi) are its owned elements, start its first element, all in the flat buffer.
        """
        own = self.own
        for (name, param), start in zip(self.named_params, self.starts, strict=True):
            lo, hi = max(start, own.start), min(start + param.numel(), own.stop)
            if lo < hi:
                yield name, param, start, lo, hi

    def reduce(self) -> None:
        """Starts the sum of the gradients over the group; `wait` completes it in grads[own].

        Other ranges then hold anything. Once between two steps, when all of the bucket's gradients
        have been computed (on CUDA: launched on the current stream or waited for by it).
        """
        assert not self.reduced, "a bucket was reduced twice in a step"
        self.reduced = True
        if self.group is not None:
            grads, how = self.grads, dict(group=self.group, async_op=True)
            if self._even():
                self.pending += [reduce_scatter(grads[self.own], grads, **how)]
            else:
                parts = self._parts(grads)
                self.pending += [dist.reduce(part, group_dst=r, **how) for r, part in parts]

    def round_masters(self) -> None:
        """Owned masters to the owned parameters."""
        if self.rounds:
            self.values[self.own].copy_(self.state["master"])

    def publish(self) -> None:
        """Starts the way of the owned parameters to the group; `wait` completes it."""
        if self.group is not None:
            values, how = self.values, dict(group=self.group, async_op=True)
            if self._even():
                self.pending += [all_gather(values, values[self.own], **how)]
            else:
                parts = self._parts(values)
                self.pending += [dist.broadcast(part, group_src=r, **how) for r, part in parts]

    def wait(self) -> None:
        """For what was started; on CUDA the current stream waits, not the host."""
        while self.pending:
            self.pending.pop(0).wait()

    def _even(self) -> bool:
        """AdamW's ranges are equal, and Muon's where experts of one size divide evenly.

        Equal ranges take one collective. Others take one an owner, of its own range: that needs no
        padding and no staging. All are in place, as NCCL and gloo allow.
        """
        return len({hi - lo for lo, hi in pairwise(self.bounds)}) == 1

    def _parts(self, flat: Tensor) -> list[tuple[int, Tensor]]:
        """(owner, its range of flat) of every owner that has something."""
        return [(r, x) for r, x in enumerate(flat.tensor_split(self.bounds[1:-1])) if len(x)]

    def check_attached(self) -> None:
        """Gradients left in `.grad` and parameters moved elsewhere would be lost silently."""
        for (name, param), start in zip(self.named_params, self.starts, strict=True):
            assert param.grad is None, f"a gradient of {name} is in .grad: add it to .main_grad"
            there = self.values.data_ptr() + start * self.values.element_size()
            assert param.data_ptr() == there, f"{name} was moved out of its bucket"


def build_buckets(
    named_params: list[tuple[str, Parameter]], *, optimizer: str, device: torch.device | str,
    group: dist.ProcessGroup | None = None, first_expert: int = 0,
) -> list[Bucket]:  # fmt: skip
    """The buckets of one replica group and model chunk: one, or for Muon one per update rule.

    named_params: distinct parameters of one dtype, with values (not on meta); a tied weight is
    given once. Their values move into the bucket, on `device`, and `.main_grad` appears on each.
    group: the ranks that hold these same parameters, equal at the start; None: only this rank.
    first_expert: index of the first expert in the stacks (".experts." in the name), where they are
    a part of the model's experts; checkpoints count elements from expert 0.

    Raises ValueError for an unknown optimizer.
    """
    if optimizer not in ("adamw", "muon"):
        raise ValueError(f"optimizer = {optimizer!r} is unknown; use 'adamw' or 'muon'")
    assert len({id(p) for _, p in named_params}) == len(named_params), "a parameter is given twice"
    assert len({p.dtype for _, p in named_params}) <= 1, "parameters of several dtypes"
    muon, rest = [], []
    for name, param in named_params:
        to_muon = optimizer == "muon" and uses_muon(name, param.shape)
        (muon if to_muon else rest).append((name, param))
    # Equal matrices side by side, large ones first: they are dealt with the least imbalance.
    muon.sort(key=lambda item: math.prod(split_matrices(item[0], item[1].shape)[1:]), reverse=True)
    rest.sort(key=lambda item: not decays(item[0], item[1].shape))
    split = (("muon", muon), ("adamw", rest))
    return [_fill(rule, named, group, first_expert, device) for rule, named in split if named]


def _fill(rule: str, named: list, group, first_expert: int, device) -> Bucket:
    """Allocates the flat buffers and turns the parameters into views of them."""
    owners, owner = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    sizes = [p.numel() for _, p in named]
    counts = [split_matrices(n, p.shape)[0] for n, p in named] if rule == "muon" else None
    starts, bounds = layout(sizes, owners, counts)
    undecayed = [start for (n, p), start in zip(named, starts) if not decays(n, p.shape)]
    end, dtype = min(undecayed, default=bounds[-1]), named[0][1].dtype
    values = torch.zeros(bounds[-1], dtype=dtype, device=device)
    grads = torch.zeros_like(values, dtype=torch.promote_types(dtype, torch.float32))
    for (_, param), start, size in zip(named, starts, sizes):
        view = values[start : start + size].view(param.shape)
        view.copy_(param.detach())
        param.data = view
        param.main_grad = grads[start : start + size].view(param.shape)
        param.register_post_accumulate_grad_hook(_collect_grad)
    return Bucket(rule, named, group, owner, first_expert, starts, bounds, end, values, grads)


def _collect_grad(param: Parameter) -> None:
    """Runs also when autograd got no gradient, because it is put aside for later."""
    if param.grad is not None:
        param.main_grad.add_(param.grad)
        param.grad = None


# The optimizer


class Optimizer:
    """Updates the buckets of a rank; `t` counts the updates made, `skipped` the steps refused.

    Each bucket's state holds, for the owned range: "master" (the weights in fp32; for fp32 and
    float64 parameters the flat buffer itself), and for AdamW "exp_avg" and "exp_avg_sq", for Muon
    "momentum". moments: "fp32" or "bf16", the dtype of exp_avg and momentum ("fp32": float64 for
    float64 parameters). exp_avg_sq never is bf16: with beta2 near 1 it would not move.

    clip: largest norm of all gradients together, 0 for none. weight_decay is decoupled: a decayed
    weight shrinks by lr · weight_decay a step. FP8 copies of weights are stale after a step and
    after refresh_params. Raises ValueError for unknown moments.
    """

    def __init__(
        self, buckets: list[Bucket], *, beta1: float, beta2: float, eps: float,
        weight_decay: float, clip: float, moments: str = "fp32",
    ):  # fmt: skip
        if moments not in ("fp32", "bf16"):
            raise ValueError(f"moments = {moments!r} is unknown; use 'fp32' or 'bf16'")
        self.buckets, self.clip, self.weight_decay = buckets, clip, weight_decay
        self.adam = dict(beta1=beta1, beta2=beta2, eps=eps)
        self.t = self.skipped = 0
        for b in buckets:
            own, wide = b.values[b.own], b.grads.dtype
            first = torch.zeros_like(own, dtype=torch.bfloat16 if moments == "bf16" else wide)
            # .to copies bf16 parameters and returns fp32 ones as they are: views, no second copy.
            b.state["master"] = own.to(wide)
            if b.rule == "muon":
                b.state["momentum"] = first
            else:
                b.state |= {"exp_avg": first, "exp_avg_sq": torch.zeros_like(own, dtype=wide)}

    def zero_grad(self) -> None:
        """Zeroes gradients that no step has used: a step leaves zeros itself."""
        for b in self.buckets:
            b.wait()  # for a reduction that no step followed
            b.reduced = False
            b.grads.zero_()

    @torch.no_grad()
    def step(self, lr: float) -> tuple[float, bool]:
        """Updates the weights from `main_grad`; returns (gradient norm before clipping, skipped).

        All ranks call it and get the same result. Buckets that were not reduced yet are. If the
        norm is not finite no weight or state changes. Gradients are zero afterwards.
        """
        for b in self.buckets:
            b.check_attached()
            if not b.reduced:
                b.reduce()
        for b in self.buckets:
            b.wait()
            b.reduced = False
        norm = self._grad_norm()
        if not math.isfinite(norm):
            self.skipped += 1
            self.zero_grad()
            return norm, True
        self.t += 1
        scale = min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0
        for b in self.buckets:
            (self._step_muon if b.rule == "muon" else self._step_adamw)(b, lr, scale)
            b.publish()
        for b in self.buckets:
            b.wait()
        return norm, False

    def _grad_norm(self) -> float:
        """Norm over all ranks' owned ranges, which hold every parameter once; gaps are zero.

        The same on every rank. Waits for the device.
        """
        square = torch.stack([sum_squares(b.grads[b.own]) for b in self.buckets]).sum()
        if dist.is_initialized():
            dist.all_reduce(square)
        return math.sqrt(square.item())

    def _step_adamw(self, b: Bucket, lr: float, scale: float) -> None:
        own, options = b.own, self.adam | dict(lr=lr, t=self.t, scale=scale, zero_grad=True)
        middle = min(max(b.decay_end, own.start), own.stop)
        for lo, hi, decay in ((own.start, middle, self.weight_decay), (middle, own.stop, 0.0)):
            if lo < hi:
                part = slice(lo - own.start, hi - own.start)
                w, m, v = (b.state[kind][part] for kind in ("master", "exp_avg", "exp_avg_sq"))
                param = b.values[lo:hi] if b.rounds else None
                adamw_(w, b.grads[lo:hi], m, v, weight_decay=decay, param=param, **options)
        b.grads[: own.start].zero_()  # what other owners have used
        b.grads[own.stop :].zero_()

    def _step_muon(self, b: Bucket, lr: float, scale: float) -> None:
        for name, param, _, lo, hi in b.owned():
            _, rows, cols = split_matrices(name, param.shape)
            batch = max(1, CHUNK // (rows * cols)) * rows * cols
            part = slice(lo - b.own.start, hi - b.own.start)
            flats = (b.state["master"][part], b.grads[lo:hi], b.state["momentum"][part])
            for pieces in zip(*(x.split(batch) for x in flats), strict=True):
                w, g, m = (x.view(-1, rows, cols) for x in pieces)
                muon_(w, g, m, lr=lr, weight_decay=self.weight_decay, scale=scale)
        b.round_masters()
        b.grads.zero_()

    @torch.no_grad()
    def refresh_params(self) -> None:
        """Masters to all ranks' parameters, after masters were loaded; all ranks call it."""
        for b in self.buckets:
            b.round_masters()
            b.publish()
        for b in self.buckets:
            b.wait()

    def slices(self) -> Iterator[tuple[str, str, int, Tensor]]:
        """The owned state, for checkpoints: (parameter's name, kind, start, tensor).

        kind: "master", "exp_avg", "exp_avg_sq" or "momentum". tensor: (n,), elements start to
        start + n of the flattened parameter, all experts counted; a view, written to when loading
        (then call refresh_params). The union over all ranks covers every parameter once.
        """
        for b in self.buckets:
            for kind, flat in b.state.items():
                for name, param, start, lo, hi in b.owned():
                    skipped = b.first_expert * param[0].numel() if ".experts." in name else 0
                    part = flat[lo - b.own.start : hi - b.own.start]
                    yield name, kind, skipped + lo - start, part
