"""AdamW and Muon over flat buffers, laid out for sharding over replicas (ZeRO-1).

The parameters that one replica group holds of one model chunk live in one flat buffer
(`Bucket.values`), their gradients in another (`Bucket.grads`, fp32 or wider). Parameters are views
of the first; `param.main_grad` is a view of the second. The flat buffer is cut into consecutive
ranges, one per owner (a rank of the replica group); a rank keeps master weights and moments of its
own range only. In a group of one that range is everything.

Gradients are not kept in `param.grad`: torch.compile refuses a bf16 parameter whose `.grad` is
fp32 (seen in torch 2.13). A hook adds autograd's gradient to `main_grad` and clears `.grad`; code
that computes a weight gradient itself (the experts' grouped GEMMs) writes to `main_grad` directly.

A step is: norm of all gradients -> skip if not finite -> update of the owned masters, clipped
-> parameters. The single host synchronisation stands between the norm and the update, so that the
host runs ahead while the update is busy.

AdamW: Loshchilov and Hutter, arXiv 1711.05101, as in torch.optim.AdamW. Muon: Keller Jordan,
https://kellerjordan.github.io/posts/muon, scaled as in Moonlight, arXiv 2502.16982.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

ALIGN = 128  # elements: 256 bytes in bf16, 512 in fp32
CHUNK = 1 << 24  # elements that an update handles at a time, which bounds its temporaries
MUON_MOMENTUM = 0.95


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


def split_matrices(name: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(count, rows, columns) of the equal matrices that a weight holds, one behind the other.

    A stack (E, D, F) holds E; a fused `gate_up` (E, 2F, D) or (2F, D) holds gate and up apart.
    """
    halves = 2 if "gate_up" in name else 1
    assert shape[-2] % halves == 0, f"{name} {shape} is not gate rows followed by up rows"
    return math.prod(shape[:-2]) * halves, shape[-2] // halves, shape[-1]


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
    differ in length**, a reduce-scatter over them has to pad; the longest is as short as matrix
    boundaries in this order allow. Ranges may be empty.
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
    return starts, _deal([*marks, end], owners)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _deal(marks: list[int], owners: int) -> list[int]:
    """owners + 1 ascending values of marks, first to last, with the smallest longest distance."""

    def fill(room: int) -> list[int]:
        bounds = [0]
        for _ in range(owners):
            bounds.append(marks[bisect_right(marks, bounds[-1] + room) - 1])
        return bounds

    low, high = 0, marks[-1]  # the shortest room with which the owners' ranges reach the end
    while low < high:
        room = (low + high) // 2
        low, high = (low, room) if fill(room)[-1] == marks[-1] else (room + 1, high)
    return fill(low)


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
    starts: list[int]
    bounds: list[int]
    owner: int
    decay_end: int
    values: Tensor
    grads: Tensor
    state: dict[str, Tensor] = field(default_factory=dict)

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

    def check_attached(self) -> None:
        """Gradients left in `.grad` and parameters moved elsewhere would be lost silently."""
        for (name, param), start in zip(self.named_params, self.starts, strict=True):
            assert param.grad is None, f"a gradient of {name} is in .grad: add it to .main_grad"
            there = self.values.data_ptr() + start * self.values.element_size()
            assert param.data_ptr() == there, f"{name} was moved out of its bucket"


def build_buckets(
    named_params: list[tuple[str, Parameter]], *, optimizer: str, owners: int = 1, owner: int = 0,
    device: torch.device | str,
) -> list[Bucket]:  # fmt: skip
    """The buckets of one replica group and model chunk: one, or for Muon one per update rule.

    named_params: distinct parameters of one dtype, with values (not on meta); a tied weight is
    given once. Their values move into the bucket, on `device`, and `.main_grad` appears on each.
    owners: ranks in the replica group; owner: this rank's place in it.

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
    return [_fill(rule, items, owners, owner, device) for rule, items in split if items]


def _fill(rule: str, items: list, owners: int, owner: int, device: torch.device | str) -> Bucket:
    """Allocates the flat buffers and turns the parameters into views of them."""
    sizes = [p.numel() for _, p in items]
    counts = [split_matrices(n, p.shape)[0] for n, p in items] if rule == "muon" else None
    starts, bounds = layout(sizes, owners, counts)
    undecayed = [start for (n, p), start in zip(items, starts) if not decays(n, p.shape)]
    dtype = items[0][1].dtype
    values = torch.zeros(bounds[-1], dtype=dtype, device=device)
    wide = torch.promote_types(dtype, torch.float32)
    grads = torch.zeros(bounds[-1], dtype=wide, device=device)
    for (_, param), start, size in zip(items, starts, sizes):
        view = values[start : start + size].view(param.shape)
        view.copy_(param.detach())
        param.data = view
        param.main_grad = grads[start : start + size].view(param.shape)
        param.register_post_accumulate_grad_hook(_collect_grad)
    decay_end = min(undecayed, default=bounds[-1])
    return Bucket(rule, items, starts, bounds, owner, decay_end, values, grads)


def _collect_grad(param: Parameter) -> None:
    """Runs also when autograd got no gradient, because it is put aside for later."""
    if param.grad is not None:
        param.main_grad.add_(param.grad)
        param.grad = None


# Update rules


def adamw_(
    w: Tensor, g: Tensor, m: Tensor, v: Tensor, *, lr: float, beta1: float, beta2: float,
    eps: float, weight_decay: float, t: int, scale: float,
) -> None:  # fmt: skip
    """One AdamW update of w in place, update number t (from 1), with gradient g · scale.

    w, g, v: (n,) of one dtype, fp32 or float64; m: (n,) of that dtype or bf16. Equal to
    torch.optim.AdamW. The fused kernel leaves the scaled gradient in g.
    """
    if w.is_cuda and m.dtype == w.dtype:
        return fused_adamw_(w, g, m, v, lr, beta1, beta2, eps, weight_decay, t, scale)
    step_size, root = lr / (1 - beta1**t), math.sqrt(1 - beta2**t)
    for w_n, g_n, m_n, v_n in zip(*(x.split(CHUNK) for x in (w, g, m, v)), strict=True):
        g_n = g_n * scale
        first = m_n.to(w_n.dtype)  # m_n itself, unless that is bf16
        first.lerp_(g_n, 1 - beta1)
        m_n.copy_(first)
        v_n.mul_(beta2).addcmul_(g_n, g_n, value=1 - beta2)
        denom = v_n.sqrt().div_(root).add_(eps)
        w_n.mul_(1 - lr * weight_decay).addcdiv_(first, denom, value=-step_size)


def fused_adamw_(w, g, m, v, lr, beta1, beta2, eps, weight_decay, t, scale) -> None:
    """`adamw_` in one pass over memory, by torch's own kernel; m in w's dtype."""
    # Pieces keep every index inside 32 bits.
    pieces = [list(x.split(1 << 30)) for x in (w, g, m, v)]
    steps = [torch.full((), t, dtype=torch.float32, device=w.device) for _ in pieces[0]]
    # The kernel divides by grad_scale, and writes the gradient back only if there is one.
    divisor = None
    if scale != 1.0:
        divisor = torch.full((), 1.0 / scale, dtype=torch.float32, device=w.device)
    torch._fused_adamw_(
        *pieces, [], steps, lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps,
        amsgrad=False, maximize=False, grad_scale=divisor,
    )  # fmt: skip


def newton_schulz(x_NRC: Tensor) -> Tensor:
    """Nearly orthogonal matrices with the singular vectors of x; singular values about 0.7 to 1.2.

    x_NRC: N matrices of R rows and C columns; returns (N, R, C), bf16 on CUDA, else x's dtype.
    A zero matrix stays zero. Five iterations of the quintic in Keller Jordan's post.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x_NRC / torch.linalg.matrix_norm(x_NRC, keepdim=True).clamp_min(1e-12)
    x = x.bfloat16() if x.is_cuda else x
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # the Gram matrix of the shorter side is the cheaper one
    for _ in range(5):
        gram = x @ x.mT
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, poly, x, beta=a)
    return x.mT if tall else x


def muon_(
    w_NRC: Tensor, g_NRC: Tensor, m_NRC: Tensor, *, lr: float, weight_decay: float, scale: float
) -> None:
    """One Muon update (Nesterov) of N matrices in place, with gradient g · scale.

    m_NRC: momentum, in w's dtype or bf16. The update is scaled to AdamW's typical size, 0.2 an
    element, so that learning rate and decay carry over (arXiv 2502.16982, equation 4).
    """
    g = g_NRC * scale
    momentum = g.add(m_NRC, alpha=MUON_MOMENTUM)
    m_NRC.copy_(momentum)
    update = newton_schulz(g.add_(momentum, alpha=MUON_MOMENTUM))
    size = 0.2 * math.sqrt(max(w_NRC.shape[-2:]))
    w_NRC.mul_(1 - lr * weight_decay).add_(update, alpha=-lr * size)


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
        """Zeroes the gradients in place."""
        for b in self.buckets:
            b.grads.zero_()

    @torch.no_grad()
    def step(self, lr: float) -> tuple[float, bool]:
        """Updates the weights from `main_grad`; returns (gradient norm before clipping, skipped).

        If the norm is not finite nothing but `skipped` changes. Does not zero the gradients, but
        may leave them clipped.
        """
        for b in self.buckets:
            b.check_attached()
        norm = self._grad_norm()
        if not math.isfinite(norm):
            self.skipped += 1
            return norm, True
        self.t += 1
        scale = min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0
        for b in self.buckets:
            (self._step_muon if b.rule == "muon" else self._step_adamw)(b, lr, scale)
        self.refresh_params()
        return norm, False

    def _grad_norm(self) -> float:
        """Norm over the owned ranges: every parameter once, gaps are zero. Waits for the device."""
        norms = [torch.linalg.vector_norm(b.grads[b.own]).double() for b in self.buckets]
        return math.sqrt(torch.stack(norms).square().sum().item())

    def _step_adamw(self, b: Bucket, lr: float, scale: float) -> None:
        own = b.own
        middle = min(max(b.decay_end, own.start), own.stop)
        for lo, hi, decay in ((own.start, middle, self.weight_decay), (middle, own.stop, 0.0)):
            if lo < hi:
                part = slice(lo - own.start, hi - own.start)
                w, m, v = (b.state[kind][part] for kind in ("master", "exp_avg", "exp_avg_sq"))
                g = b.grads[lo:hi]
                adamw_(w, g, m, v, lr=lr, weight_decay=decay, t=self.t, scale=scale, **self.adam)

    def _step_muon(self, b: Bucket, lr: float, scale: float) -> None:
        for name, param, _, lo, hi in b.owned():
            _, rows, cols = split_matrices(name, param.shape)
            batch = max(1, CHUNK // (rows * cols)) * rows * cols
            part = slice(lo - b.own.start, hi - b.own.start)
            flats = (b.state["master"][part], b.grads[lo:hi], b.state["momentum"][part])
            for pieces in zip(*(x.split(batch) for x in flats), strict=True):
                w, g, m = (x.view(-1, rows, cols) for x in pieces)
                muon_(w, g, m, lr=lr, weight_decay=self.weight_decay, scale=scale)

    @torch.no_grad()
    def init_masters(self) -> None:
        """Parameters to masters: after weights were initialised or loaded without a trainer/."""
        for b in self.buckets:
            b.state["master"].copy_(b.values[b.own])

    @torch.no_grad()
    def refresh_params(self) -> None:
        """Masters to parameters: after an update or after masters were loaded."""
        for b in self.buckets:
            if b.values.dtype != b.grads.dtype:  # else the master is the parameter
                b.values[b.own].copy_(b.state["master"])

    def slices(self) -> Iterator[tuple[str, str, int, Tensor]]:
        """The owned state, for checkpoints: (parameter's name, kind, start, tensor).

        kind: "master", "exp_avg", "exp_avg_sq" or "momentum". tensor: (n,), elements start to
        start + n of the flattened parameter; a view, written to when loading (then call
        refresh_params). The union over a replica group's ranks covers every parameter once.
        """
        for b in self.buckets:
            for kind, flat in b.state.items():
                for name, _, start, lo, hi in b.owned():
                    yield name, kind, lo - start, flat[lo - b.own.start : hi - b.own.start]
