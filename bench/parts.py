"""Times of loss, embedding, AdamW, dispatch plan and router, for bench.kernels.

Each beside what it replaces: plain torch with what belongs around it, such as adding a weight's
gradient to the optimizer's fp32 buffer.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels.adamw as adamw_kernels
import kernels.cross_entropy as loss_kernels
import kernels.dispatch as dispatch
import kernels.embedding as embedding_kernels
from bench.measure import Meter, Width, Work, host_us
from kernels.router import router_logits, router_logits_ref

# ------------------------------------------------------------------------------------------------
# Loss
# ------------------------------------------------------------------------------------------------

LOSS_BLOCKS = (  # ROWS, LANES, WARPS, STAGES
    (2, 4096, 16, 1), (2, 4096, 16, 3), (2, 4096, 16, 4), (4, 2048, 8, 1), (4, 2048, 8, 3),
    (4, 4096, 16, 1), (4, 4096, 16, 3), (2, 8192, 32, 1), (2, 8192, 32, 3), (4, 1024, 4, 3),
)  # fmt: skip
LOSS_CHUNKS = (1024, 1366, 2048, 4096)  # rows


def loss_work(N: int, D: int, V: int) -> tuple[Work, Work]:
    """Of the forward alone; of forward and backward, where the weight's fp32 gradient is added to.

    The weight is counted once: the chunks of a backward could share it with the forward.
    """
    forward = Work(2 * N * D * V, 2 * D * V + 2 * N * D)
    return forward, Work(6 * N * D * V, (2 + 8) * D * V + 4 * N * D)


def loss_inputs(N: int, D: int, V: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, device=device, generator=gen)
    hidden = draw(N, D).bfloat16().requires_grad_()
    weight = (0.05 * draw(V, D)).bfloat16().requires_grad_()
    weight.main_grad = torch.zeros(V, D, device=device)
    targets = torch.randint(0, V, (N,), device=device, generator=gen)
    targets[::9] = -100
    return hidden, weight, targets


def eager_loss(hidden, weight, targets, grad):
    """matmul, F.cross_entropy, and the weight's gradient added in fp32."""
    total = F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")
    dhidden, dweight = torch.autograd.grad(total, [hidden, weight], grad)
    weight.main_grad.add_(dweight)
    return dhidden


def our_loss(hidden, weight, targets, grad):
    """As the scripts call it: the gradient is announced."""
    total = loss_kernels.linear_cross_entropy(hidden, weight, targets, grad=grad)
    return torch.autograd.grad(total, [hidden, weight], grad, allow_unused=True)


def loss(meter: Meter, name: str, width: Width, tokens: Sequence[int], configs: bool) -> None:
    """Head and loss, forward and backward, and forward alone (evaluation)."""
    D, V = width.D, width.V
    grad = torch.tensor(1 / 65536, device=meter.device)
    for N in tokens:
        of, shape = loss_inputs(N, D, V, meter.device), f"{name} {N}x{D}x{V}"
        forward_work, work = loss_work(N, D, V)
        both = [partial(f, *of, grad) for f in (our_loss, eager_loss)]
        note = f"weight gradient added {meter.extra_mib(both[0])}".rstrip()
        meter.compare("loss forward+backward", shape, *both, work, note)

        @torch.no_grad()
        def forward(function, of=of):
            return function(*of)

        eager = lambda h, w, t: F.cross_entropy(F.linear(h, w).float(), t, reduction="sum")
        alone = [partial(forward, f) for f in (loss_kernels.linear_cross_entropy, eager)]
        meter.compare("loss forward", shape, *alone, forward_work, note="evaluation")
        if not configs:
            continue
        names = ("ROWS", "LANES", "WARPS", "STAGES")
        cut = ("loss forward+backward", shape, loss_kernels)
        meter.variants(*cut, names, LOSS_BLOCKS, both[0], work)
        chunks = [(rows, 2 * rows * V) for rows in LOSS_CHUNKS]
        meter.variants(*cut, ("CHUNK_ROWS", "CHUNK_BYTES"), chunks, both[0], work)


# ------------------------------------------------------------------------------------------------
# Embedding
# ------------------------------------------------------------------------------------------------

EMBEDDING_BLOCKS = (
    (4, 1024, 4),
    (8, 512, 2),
    (8, 1024, 4),
    (16, 256, 1),
    (16, 512, 4),
    (8, 2048, 8),
)


def embedding(meter: Meter, name: str, width: Width, tokens: Sequence[int], configs: bool) -> None:
    """Forward and backward, for words that are spread out, as in text, and all one."""
    D, V, device = width.D, width.V, meter.device
    weight = torch.randn(V, D, device=device).bfloat16().requires_grad_()
    weight.main_grad = torch.zeros(V, D, device=device)

    def torchs(ids, dout):
        (grad,) = torch.autograd.grad(F.embedding(ids, weight), [weight], dout)
        weight.main_grad.add_(grad)

    def ours(ids, dout):
        out = embedding_kernels.embedding(ids, weight)
        torch.autograd.grad(out, [weight], dout, allow_unused=True)

    for N in tokens:
        dout = torch.randn(N, D, device=device).bfloat16()
        drawn = torch.rand(N, device=device)
        for kind, where in dict(uniform=drawn, text=drawn**8, one=0 * drawn).items():
            ids = (where * V).long()
            words = len(ids.unique())  # read rows, write out; read dout, add to words' sums
            work = Work(nbytes=3 * 2 * N * D + (2 + 8) * words * D)
            both, shape = [partial(f, ids, dout) for f in (ours, torchs)], f"{name} {N}x{D} of {V}"
            note = f"{kind}: {words} words"
            meter.compare("embedding forward+backward", shape, *both, work, note)
            if configs:
                constants = ("OCCURRENCES", "COLUMNS", "WARPS")
                cut = ("embedding forward+backward", shape, embedding_kernels, constants)
                meter.variants(*cut, EMBEDDING_BLOCKS, both[0], work)


# ------------------------------------------------------------------------------------------------
# AdamW
# ------------------------------------------------------------------------------------------------

ELEMENTS = 10**9
ADAMW_BLOCKS = ((1024, 8), (512, 4), (256, 2), (1024, 4), (2048, 8), (2048, 16), (4096, 16))
NORM_BLOCKS = ((2048, 4096), (1056, 4096), (2112, 2048), (4096, 4096), (2048, 8192))
HYPER = dict(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, t=10, scale=0.5)


def torch_adamw(w, g, m, v, param, *, t, scale, **rates):
    """torch's fused kernel, or plain torch for bf16 moments; the copy; the fill."""
    if m.dtype == w.dtype:
        step, divisor = (torch.full((), x, device=w.device) for x in (float(t), 1 / scale))
        torch._fused_adamw_([w], [g], [m], [v], [], [step], **rates, amsgrad=False,
                            maximize=False, grad_scale=divisor)  # fmt: skip
    else:
        adamw_kernels.adamw_ref_(w, g, m, v, t=t, scale=scale, **rates)
    param.copy_(w)
    g.zero_()


def adamw(meter: Meter, name: str, width: Width, tokens: Sequence[int], configs: bool) -> None:
    """One update of 1e9 weights with the bf16 copy and the zeroed gradient; their norm.

    Neither the width nor the tokens matter.
    """
    n, device = ELEMENTS, meter.device
    g = torch.randn(n, device=device)
    norm, work = partial(adamw_kernels.sum_squares, g), Work(nbytes=g.nbytes)
    theirs = partial(torch.linalg.vector_norm, g)
    meter.compare("sum of squares", f"{n:.0e}", norm, theirs, work, note="torch: vector_norm")
    if configs:
        cut = ("sum of squares", f"{n:.0e}", adamw_kernels, ("PARTS", "PART_BLOCK"))
        meter.variants(*cut, NORM_BLOCKS, norm, work)
    w, v = torch.randn(n, device=device), torch.rand(n, device=device)
    param = torch.empty(n, device=device, dtype=torch.bfloat16)
    for moments in (torch.float32, torch.bfloat16):
        m = torch.zeros(n, device=device, dtype=moments)
        ours = partial(adamw_kernels.adamw_, w, g, m, v, param=param, zero_grad=True, **HYPER)
        theirs = partial(torch_adamw, w, g, m, v, param, **HYPER)
        # w, g, v read and written in fp32, m in its dtype, param written
        work, shape = Work(nbytes=n * (26 + 2 * m.element_size())), f"{n:.0e} {str(moments)[6:]}"
        meter.compare("AdamW, copy, zero", shape, ours, theirs, work)
        if configs:
            cut = ("AdamW, copy, zero", shape, adamw_kernels, ("BLOCK", "WARPS"))
            meter.variants(*cut, ADAMW_BLOCKS, ours, work)


# ------------------------------------------------------------------------------------------------
# Dispatch plan
# ------------------------------------------------------------------------------------------------

PLAN_CUTS = (  # PROGRAMS, TILE, LONGEST, WARPS
    (64, 16384, 128, 8), (128, 16384, 128, 16), (128, 16384, 128, 8), (128, 8192, 64, 8),
    (128, 8192, 128, 4), (256, 16384, 128, 8), (256, 8192, 64, 4), (256, 8192, 64, 8),
    (256, 4096, 32, 4),
)  # fmt: skip
RANKS = 8


def there_and_back(crossing, choices, ids, weights, E, rows_P):
    """The sending side without the tokens, and its weights' gradient."""
    cross = dispatch.lay_out(crossing(ids, E, RANKS), rows_P)
    out = choices(ids, weights, cross, E // RANKS)[1]
    torch.autograd.grad(out, weights, out.detach())


def fused_choices(ids, weights, cross, n_local):
    from kernels import plan

    way = cross.token_R, cross.rank_R, cross.at_NP
    return plan.SpreadChoices.apply(ids, weights, *way, n_local)


def plan(meter: Meter, name: str, width: Width, tokens: Sequence[int], configs: bool) -> None:
    """The receiving side, and the sending side to 8 ranks; the floor counts what they return."""
    from kernels import plan as plan_kernels

    E, K, device = width.E, width.K, meter.device
    for N in tokens:
        shape = f"{name} {N}x{K} of {E}"
        ids = torch.rand(N, E, device=device).topk(K).indices
        weights = torch.rand(N, K, device=device, requires_grad=True)
        planned = (dispatch.dispatch_plan, dispatch.dispatch_plan_ref)
        ours, theirs = (partial(f, ids, E) for f in planned)
        work = Work(nbytes=N * K * (8 + 28))  # ids; order, rows and positions int64, experts int32
        meter.compare("plan", shape, ours, theirs, work, note=f"host {host_us(ours):.0f} us")
        if configs:
            names = ("PROGRAMS", "TILE", "LONGEST", "WARPS")
            meter.variants("plan", shape, plan_kernels, names, PLAN_CUTS, ours, work)
        if E % RANKS:
            continue
        rows_P = dispatch.crossing_ref(ids, E, RANKS).counts_P2[:, 0].tolist()
        rows = sum(rows_P)
        # the rows' token, rank, ids and weights; at_NP; ids, and gradients there and back
        work = Work(nbytes=rows * (16 + 8 * K) + 8 * N * RANKS + N * K * (8 + 4 + 4) + 4 * rows * K)
        of = (ids, weights, E, rows_P)
        ours = partial(there_and_back, dispatch.crossing, fused_choices, *of)
        theirs = partial(there_and_back, dispatch.crossing_ref, dispatch.spread_choices_ref, *of)
        shape = f"{shape} to {RANKS}"
        meter.compare("crossing, choices, gradient", shape, ours, theirs, work)


# ------------------------------------------------------------------------------------------------
# Router
# ------------------------------------------------------------------------------------------------


def router_work(N: int, D: int, E: int) -> tuple[Work, Work]:
    """Of the forward and of the backward: bf16 tokens and weights, fp32 logits and gradient."""
    forward = Work(2 * N * D * E, 2 * N * D + 2 * E * D + 4 * N * E)
    return forward, Work(4 * N * D * E, 2 * 2 * N * D + 2 * 2 * E * D + 4 * N * E)


def router(meter: Meter, name: str, width: Width, tokens: Sequence[int], configs: bool) -> None:
    """Scores in fp32, forward and backward, beside the product of fp32 copies."""
    E, D, device = width.E, width.D, meter.device
    for N in tokens:
        x = torch.randn(N, D, device=device).bfloat16().requires_grad_()
        weight = (0.02 * torch.randn(E, D, device=device)).bfloat16().requires_grad_()
        dout = torch.randn(N, E, device=device)

        def calls(function, x=x, weight=weight, dout=dout):
            forward = torch.no_grad()(lambda: function(x, weight))
            return forward, lambda: torch.autograd.grad(function(x, weight), [x, weight], dout)

        both = calls(router_logits), calls(router_logits_ref)
        meter.passes("router", f"{name} {N}x{D}x{E}", *both, router_work(N, D, E),
                     "torch: fp32 copies")  # fmt: skip
