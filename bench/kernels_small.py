"""Times of loss, embedding's backward, AdamW and dispatch plan, against what they replace.

    python -m bench.kernels_small [loss] [embedding] [adamw] [plan]

Qwen3 sizes on one CUDA device, about a minute. `floor` is the bytes (or the products) that must be
moved (done) at the rates measured first; `x` is the time over it. A variant that fails is printed
and does not stop the others.
"""

import statistics
import sys
import time
import traceback
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F

import kernels.adamw as adamw
import kernels.cross_entropy as loss
import kernels.dispatch as dispatch
import kernels.embedding as embedding

D, V, TOKENS = 2048, 151936, 4096
BLOCKS = {  # of the loss kernel: rows, lanes, warps, stages
    "2x4096 w16 s3": (2, 4096, 16, 3), "2x4096 w16 s1": (2, 4096, 16, 1),
    "2x4096 w16 s4": (2, 4096, 16, 4), "4x2048 w8 s1": (4, 2048, 8, 1),
    "4x2048 w8 s3": (4, 2048, 8, 3), "4x4096 w16 s1": (4, 4096, 16, 1),
    "4x4096 w16 s3": (4, 4096, 16, 3), "2x8192 w32 s1": (2, 8192, 32, 1),
    "2x8192 w32 s3": (2, 8192, 32, 3), "4x1024 w4 s3": (4, 1024, 4, 3),
}  # fmt: skip
RATE = {}  # measured: bytes a second of a copy, floating-point operations a second of a product


def time_ms(call, repeats=7, warmup=2):
    """Median device time of `call` in milliseconds."""
    for _ in range(warmup):
        call()
    times = []
    for _ in range(repeats):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        call()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b))
    return statistics.median(times)


def extra_mib(call):
    """Peak memory of `call` beyond what is there before and, for its results, stays after."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def line(name, ms=None, floor_ms=None, note=""):
    shown = "" if ms is None else f"{ms:9.3f} ms"
    over = f"  floor {floor_ms:7.3f}  x{ms / floor_ms:5.2f}" if floor_ms else ""
    print(f"{name:<52}{shown}{over}  {note}", flush=True)


@contextmanager
def shielded(name):
    """Report an exception and go on."""
    try:
        yield
    except Exception as error:
        print(f"{name:<52}  FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
        traceback.print_exc()
        torch.cuda.empty_cache()


@contextmanager
def setting(module, **values):
    """Module constants changed for a while."""
    kept = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(module, name, value)


def bytes_ms(count):
    return count / RATE["copy"] * 1e3


def rates():
    a = torch.randn(2**30, device="cuda")
    b = torch.empty_like(a)
    RATE["copy"] = 8 * a.numel() / time_ms(lambda: b.copy_(a)) * 1e3
    RATE["fill"] = 4 * a.numel() / time_ms(b.zero_) * 1e3
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    RATE["product"] = 2 * 8192**3 / time_ms(lambda: x @ y) * 1e3
    line("copy, fill, bf16 product 8192^3", note=f"{RATE['copy'] / 1e12:.2f} TB/s, "
         f"{RATE['fill'] / 1e12:.2f} TB/s, {RATE['product'] / 1e12:.0f} TFLOP/s")  # fmt: skip


# ---- Loss


def loss_inputs(tokens):
    gen = torch.Generator("cuda").manual_seed(0)
    draw = partial(torch.randn, device="cuda", generator=gen)
    hidden = draw(tokens, D).bfloat16().requires_grad_()
    weight = (0.05 * draw(V, D)).bfloat16().requires_grad_()
    weight.main_grad = torch.zeros(V, D, device="cuda")
    targets = torch.randint(0, V, (tokens,), device="cuda", generator=gen)
    targets[::9] = -100
    return hidden, weight, targets


def eager(hidden, weight, targets, grad):
    """matmul + F.cross_entropy, and the optimizer's hook."""
    total = F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")
    total.backward(grad)
    if weight.grad is not None:
        weight.main_grad.add_(weight.grad)
        weight.grad = None
    return total


def with_function(function, announced, hidden, weight, targets, grad):
    total = function(hidden, weight, targets, **(dict(grad=grad) if announced else {}))
    total.backward(grad)
    return total


def bench_loss():
    grad = torch.tensor(1 / 65536, device="cuda")
    cases = {
        "matmul + F.cross_entropy": eager,
        "new": partial(with_function, loss.linear_cross_entropy, False),
        "new, announced": partial(with_function, loss.linear_cross_entropy, True),
    }
    for tokens in (TOKENS, 4 * TOKENS):
        hidden, weight, targets = loss_inputs(tokens)
        floor = 6 * tokens * D * V / RATE["product"] * 1e3
        floor += bytes_ms(8 * D * V)  # the fp32 gradient, read and written once
        for name, case in cases.items():
            with shielded(name):
                call = partial(case, hidden, weight, targets, grad)
                ms, mib = time_ms(call, 5), extra_mib(call)
                line(f"loss, {tokens} tokens: {name}", ms, floor, f"extra {mib:,.0f} MiB")
            hidden.grad = None
        for rows in (1024, 1366, 4096):
            with shielded("rows"), setting(loss, CHUNK_ROWS=rows, CHUNK_BYTES=2 * rows * V):
                call = partial(cases["new, announced"], hidden, weight, targets, grad)
                ms, mib = time_ms(call, 5), extra_mib(call)
                line(f"loss, {tokens} tokens: {rows} rows", ms, floor, f"extra {mib:,.0f} MiB")
        with shielded("evaluation"), torch.no_grad():
            args = hidden, weight, targets
            ms = time_ms(partial(loss.linear_cross_entropy, *args))
            line("  forward alone", ms, floor / 3)


def loss_errors():
    """Relative errors against fp32 arithmetic on the same bf16 inputs, at the real widths."""
    hidden, weight, targets = loss_inputs(512)
    grad = torch.tensor(1 / 512, device="cuda")
    wide = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    exact = loss.linear_cross_entropy_ref(*wide, targets)
    exact = [exact.detach(), *torch.autograd.grad(exact * grad, wide)]
    for name, case in (
        ("eager", eager),
        ("new, announced", partial(with_function, loss.linear_cross_entropy, True)),
    ):
        hidden.grad = None
        weight.main_grad.zero_()
        got = case(hidden, weight, targets, grad).detach(), hidden.grad, weight.main_grad
        errors = [((g - e).norm() / e.norm()).item() for g, e in zip(got, exact, strict=True)]
        line(
            f"loss errors: {name}",
            note="loss {:.1e}, dhidden {:.1e}, dweight {:.1e}".format(*errors),
        )


def bench_loss_parts():
    """One chunk of 2,048 tokens: its products, and the kernel in every shape."""
    rows, flops = 2048, 2 * 2048 * D * V / RATE["product"] * 1e3
    hidden, weight, targets = loss_inputs(rows)
    hidden, kept, weight = hidden.detach(), weight.main_grad, weight.detach()
    logits, wide = (
        torch.empty(rows, V, dtype=torch.bfloat16, device="cuda"),
        dict(out_dtype=torch.float32),
    )
    for name, call in {
        "logits, bf16": lambda: torch.mm(hidden, weight.t(), out=logits),
        "logits, fp32": lambda: torch.mm(hidden, weight.t(), **wide),
        "dhidden": lambda: logits @ weight,
        "dweight, added in fp32": lambda: torch.addmm(kept, logits.t(), hidden, out=kept, **wide),
    }.items():
        with shielded(name):
            line(f"  product of 2048 rows: {name}", time_ms(call), flops)
    losses, grad = torch.empty(rows, device="cuda"), torch.tensor(1e-5, device="cuda")
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.randn(rows, V, device="cuda").to(dtype)
        floor = bytes_ms(2 * logits.nbytes)
        for name, shape in BLOCKS.items():
            names = dict(zip(("ROWS", "LANES", "WARPS", "STAGES"), shape, strict=True))
            with shielded(name), setting(loss, **names):
                call = partial(loss._softmax, logits, targets, losses, grad, -100, 0.0)
                forward = partial(loss._softmax, logits, targets, losses, None, -100, 0.0)
                ms, alone = time_ms(call), time_ms(forward)
                line(f"  kernel {str(dtype)[6:]} {name}", ms, floor, f"loss alone {alone:.3f} ms")


# ---- Embedding


def bench_embedding():
    weight = torch.randn(V, D, device="cuda").bfloat16().requires_grad_()
    main_grad = torch.zeros(V, D, device="cuda")
    dout = torch.randn(TOKENS, D, device="cuda").bfloat16()
    texts = {
        "uniform": torch.rand(TOKENS, device="cuda"),
        "like text": torch.rand(TOKENS, device="cuda") ** 8,
        "one word": torch.zeros(TOKENS, device="cuda"),
    }

    def old(tokens):
        F.embedding(tokens, weight).backward(dout)
        main_grad.add_(weight.grad)
        weight.grad = None

    def new(tokens):
        weight.main_grad = main_grad
        embedding.embedding(tokens, weight).backward(dout)
        del weight.main_grad

    for name, uniform in texts.items():
        tokens = (uniform * V).long()
        words = len(tokens.unique())
        floor = bytes_ms(2 * dout.nbytes + TOKENS * D * 2 + words * D * 8)
        with shielded(name):
            line(f"embedding, {name}: old", time_ms(partial(old, tokens)), floor, f"{words} words")
        with shielded(name):
            main_grad.zero_()
            new(tokens)
            wanted = torch.zeros_like(main_grad).index_add_(0, tokens, dout.float())
            error = (main_grad - wanted).abs().max().item()
            line(
                f"embedding, {name}: new",
                time_ms(partial(new, tokens)),
                floor,
                f"error {error:.1e}",
            )
        with shielded(name):
            line("  sorting alone", time_ms(partial(tokens.sort, stable=True)))
        for J, C, warps in ((4, 1024, 4), (8, 512, 2), (16, 256, 1), (16, 512, 4), (8, 2048, 8)):
            with shielded(name), setting(embedding, OCCURRENCES=J, COLUMNS=C, WARPS=warps):
                ms = time_ms(partial(embedding.add_rows_, main_grad, tokens, dout))
                line(f"  sort and add, {J} x {C}, {warps} warps", ms)


# ---- AdamW


def old_adamw(w, g, m, v, param, lr, beta1, beta2, eps, weight_decay, t, scale):
    """What common/optim.py did: torch's fused kernel, or plain torch; the copy; the fill."""
    if m.dtype == w.dtype:
        step, divisor = (torch.full((), x, device="cuda") for x in (float(t), 1 / scale))
        torch._fused_adamw_(
            [w], [g], [m], [v], [], [step], lr=lr, beta1=beta1, beta2=beta2, eps=eps,
            weight_decay=weight_decay, amsgrad=False, maximize=False, grad_scale=divisor,
        )  # fmt: skip
    else:
        adamw.adamw_ref_(w, g, m, v, lr=lr, beta1=beta1, beta2=beta2, eps=eps,
                         weight_decay=weight_decay, t=t, scale=scale)  # fmt: skip
    param.copy_(w)
    g.zero_()


def bench_adamw():
    n = 10**9
    hyper = dict(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, t=10, scale=0.5)
    for moments in (torch.float32, torch.bfloat16):
        w, g, v = (
            torch.randn(n, device="cuda"),
            torch.randn(n, device="cuda"),
            torch.rand(n, device="cuda"),
        )
        m, param = (
            torch.zeros(n, device="cuda", dtype=moments),
            torch.empty(n, device="cuda", dtype=torch.bfloat16),
        )
        kind, floor = str(moments)[6:], bytes_ms(n * (26 + 2 * m.element_size()))
        with shielded("old"):
            ms = time_ms(partial(old_adamw, w, g, m, v, param, **hyper), 3, 1)
            line(f"AdamW, 1e9, {kind}: old, copy, fill", ms, floor)
        for block, warps in (
            (1024, 8),
            (512, 4),
            (256, 2),
            (1024, 4),
            (2048, 8),
            (2048, 16),
            (4096, 16),
        ):
            with shielded("new"), setting(adamw, BLOCK=block, WARPS=warps):
                call = partial(adamw.adamw_, w, g, m, v, param=param, zero_grad=True, **hyper)
                ms = time_ms(call, 5)
                line(f"AdamW, 1e9, {kind}: new, {block} x {warps} warps", ms, floor)
        with shielded("error"):
            adamw_error(moments, hyper)
        if moments == torch.float32:
            bench_norm(torch.randn(n, device="cuda"))
        del w, g, m, v, param


def adamw_error(moments, hyper):
    a = [torch.randn(10**6, device="cuda") for _ in range(3)]
    a = [a[0], a[1], (0.1 * a[2]).to(moments), a[2].square()]
    b = [x.clone() for x in a]
    adamw.adamw_(*a, **hyper)
    adamw.adamw_ref_(*b, **hyper)
    errors = [(x.float() - y.float()).abs().max().item() for x, y in zip(a, b, strict=True)]
    line(
        "  largest differences to the reference: w g m v", note=" ".join(f"{e:.1e}" for e in errors)
    )


def bench_norm(g):
    floor = bytes_ms(g.nbytes)
    line("norm of 1e9: torch", time_ms(lambda: torch.linalg.vector_norm(g)), floor)
    for (
        parts,
        block,
    ) in ((2048, 4096), (1056, 4096), (2112, 2048), (4096, 4096), (2048, 8192)):
        with shielded("norm"), setting(adamw, PARTS=parts, PART_BLOCK=block):
            line(
                f"norm of 1e9: {parts} programs of {block}",
                time_ms(lambda: adamw.sum_squares(g)),
                floor,
            )
    error = adamw.sum_squares(g).item() / g.double().square().sum().item() - 1
    line("zero_grad of 1e9", time_ms(g.zero_), note=f"relative error of the sum {error:.1e}")


# ---- Dispatch plan


def graph_us(call, calls=20):
    """Device microseconds of `call`: the host's launches are recorded, not timed."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return time_ms(graph.replay) / calls * 1e3


def host_us(call, calls=50):
    """Microseconds that the host needs to launch `call`."""
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    taken = time.perf_counter() - began
    torch.cuda.synchronize()
    return taken / calls * 1e6


PLAN_CUTS = (  # PROGRAMS, TILE, LONGEST, WARPS
    (64, 16384, 128, 8), (128, 16384, 128, 16), (128, 8192, 64, 8), (128, 8192, 128, 4),
    (256, 16384, 128, 8), (256, 8192, 64, 4), (256, 8192, 64, 8), (256, 4096, 32, 4),
)  # fmt: skip


def there_and_back(crossing, choices, ids, weights, E, rows, ep=8):
    """The sending side without the tokens, and its weights' gradient."""
    cross = dispatch.lay_out(crossing(ids, E, ep), rows)
    out = choices(ids, weights, cross, E // ep)[1]
    torch.autograd.grad(out, weights, out.detach())


def bench_plan():
    from kernels import plan

    def fused(ids, weights, cross, n_local):
        way = cross.token_R, cross.rank_R, cross.at_NP
        return plan.SpreadChoices.apply(ids, weights, *way, n_local)

    for tokens, K, E in ((4096, 8, 128), (16384, 8, 128), (4096, 4, 32), (4096, 8, 512)):
        ids = torch.rand(tokens, E, device="cuda").topk(K).indices
        weights = torch.rand(tokens, K, device="cuda", requires_grad=True)
        rows = int(dispatch.crossing_ref(ids, E, 8).counts_P2[:, 0].sum())
        of = (ids, weights, E, rows)
        calls = {
            "plan, torch": partial(dispatch.dispatch_plan_ref, ids, E),
            "plan": partial(dispatch.dispatch_plan, ids, E),
            "to 8, torch": partial(
                there_and_back, dispatch.crossing_ref, dispatch.spread_choices_ref, *of
            ),
            "to 8": partial(there_and_back, dispatch.crossing, fused, *of),
        }
        for name, call in calls.items():
            with shielded(name):
                note = f"device {graph_us(call):7.1f} us, host {host_us(call):7.1f} us"
                line(f"{tokens} tokens, {K} of {E}: {name}", note=note)
        for cut in PLAN_CUTS:
            values = dict(zip(("PROGRAMS", "TILE", "LONGEST", "WARPS"), cut, strict=True))
            with shielded("cut"), setting(plan, **values):
                line(f"  plan, cut {cut}", note=f"device {graph_us(calls['plan']):7.1f} us")


def main():
    parts = dict(
        loss=(bench_loss_parts, bench_loss, loss_errors), embedding=(bench_embedding,),
        adamw=(bench_adamw,), plan=(bench_plan,),
    )  # fmt: skip
    rates()
    for name in sys.argv[1:] or parts:
        for part in parts[name]:
            with shielded(part.__name__):
                part()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
