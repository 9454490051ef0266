"""Dispatch planning and the experts against loops, at one process's sizes.

The Triton kernels run in Triton's interpreter (tests/grouped_cases.py, one process for all), are
compiled for Hopper and Blackwell without a GPU, and on a GPU run as they are.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.dispatch import collect, crossing, dispatch_plan, lay_out, spread
from kernels.experts import ClampedSwiGLU, accumulate, expert_mlp, expert_mlp_ref
from tests import grouped_cases

D, WIDTH = 24, 20


def make(ids, E, dtype=torch.float64, device="cpu", biased=False, D=D, width=WIDTH, seed=0):
    """Rows, slot weights, weights, biases (all leaves) for the choices `ids` (N, K)."""
    g = torch.Generator(device).manual_seed(seed)

    def leaf(*shape, scale=1.0, dtype=dtype):
        wide = torch.randn(*shape, generator=g, device=device, dtype=torch.float64)
        return (scale * wide).to(dtype).requires_grad_()

    N, K = ids.shape
    weights = leaf(N, K, dtype=torch.promote_types(dtype, torch.float32))
    mats = leaf(E, 2 * width, D, scale=D**-0.5), leaf(E, D, width, scale=width**-0.5)
    biases = (leaf(E, 2 * width), leaf(E, D)) if biased else None
    return leaf(N, D), weights, *mats, biases


def by_hand(ids, rows, weights, gate_up, down, biases, activation):
    """Token by token, expert by expert, in float64, straight from the formula."""
    out = torch.zeros_like(rows)
    for n, k in ((n, k) for n in range(len(ids)) for k in range(ids.shape[1])):
        e = ids[n, k]
        h = gate_up[e] @ rows[n] + (biases[0][e] if biases else 0)
        gate, up = h.chunk(2)
        if activation == "swiglu":
            a = gate / (1 + (-gate).exp()) * up
        else:
            limit = activation.limit
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            a = (up + 1) * gate / (1 + (-activation.alpha * gate).exp())
        y = down[e] @ a + (biases[1][e] if biases else 0)
        out = out.index_add(0, torch.tensor([n]), (weights[n, k] * y)[None])
    return out


CHOICES = {
    "mixed": torch.tensor([[3, 0], [0, 5], [5, 3], [1, 2], [3, 5], [2, 0], [0, 1]]),
    "one expert": torch.tensor([[4], [4], [4]]),
    "empty experts": torch.tensor([[1, 3], [3, 1], [1, 3], [3, 1], [1, 3]]),
    "one token": torch.tensor([[5, 2, 0]]),
    "all experts": torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(i))
                                for i in range(4)]),
}  # fmt: skip
VARIANTS = [("swiglu", False), ("swiglu", True), (ClampedSwiGLU(1.702, 0.5), True)]


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("activation,biased", VARIANTS)
@pytest.mark.parametrize("deferred", [False, True])
def test_equals_the_formula_with_every_gradient(choices, activation, biased, deferred):
    ids = CHOICES[choices]
    args = make(ids, 6, biased=biased)
    rows, weights, gate_up, down, biases = args
    leaves = [rows, weights, gate_up, down, *(biases or ())]
    want = by_hand(ids, *args, activation)
    dout = torch.randn(want.shape, dtype=torch.float64)
    want_grads = torch.autograd.grad(want, leaves, dout)
    plan = dispatch_plan(ids, 6)
    ref = expert_mlp_ref(rows, weights, gate_up, down, plan, activation=activation, biases=biases)
    torch.testing.assert_close(ref, want, rtol=1e-12, atol=1e-13)
    queue = []
    plan = dispatch_plan(ids, 6)
    out = expert_mlp(
        rows, weights, gate_up, down, plan,
        activation=activation, biases=biases, defer=queue.append if deferred else None,
    )  # fmt: skip
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-13)
    out.backward(dout)
    if deferred:
        assert gate_up.grad is None and down.grad is None and len(queue) == 1
        with torch.no_grad():
            queue[0]()
    for leaf, grad in zip(leaves, want_grads, strict=True):
        torch.testing.assert_close(leaf.grad, grad, rtol=1e-11, atol=1e-13)
    for e in set(range(6)) - set(ids.flatten().tolist()):
        assert not gate_up.grad[e].any() and not down.grad[e].any()  # zeros, not absent


def test_plan_sorts_stably_and_inverts():
    ids = torch.randint(0, 7, (50, 3))
    plan = dispatch_plan(ids, 9)
    flat = ids.flatten()
    want = sorted(range(150), key=lambda s: (flat[s].item(), s))
    assert plan.order_S.tolist() == want
    assert plan.rows_S.tolist() == [s // 3 for s in want]
    assert torch.equal(plan.experts_S.long(), flat[plan.order_S])
    assert torch.equal(plan.order_S[plan.positions_RK.flatten()], torch.arange(150))
    assert plan.offsets_E.tolist() == flat.bincount(minlength=9).cumsum(0).tolist()


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("ep", [1, 2, 3, 6])
@pytest.mark.parametrize("room", [None, 0, 3])
def test_crossing_to_ranks_and_back_equals_one_rank(choices, ep, room):
    """Each token once to a rank, local experts summed there: output and every gradient.

    With as many rows as travel, or the same room to every rank, `room` rows more than any needs.
    """
    ids, E = CHOICES[choices], 6
    tokens, weights, gate_up, down, _ = leaves = make(ids, E)
    want = expert_mlp_ref(tokens, weights, gate_up, down, dispatch_plan(ids, E))
    dout = torch.randn_like(want)
    want_grads = torch.autograd.grad(want, leaves[:4], dout)

    cross = crossing(ids, E, ep)
    rows, slots = cross.counts_P2.T.tolist()
    owners = ids // (E // ep)
    assert rows == [int((owners == p).any(1).sum()) for p in range(ep)]  # deduplicated
    assert slots == [int((owners == p).sum()) for p in range(ep)]
    if room is not None:
        rows, slots = [max(rows) + room] * ep, [max(slots) + 2 * room] * ep
    cross = lay_out(cross, rows)
    sent, local_ids, sent_weights = spread(tokens, ids, weights, cross, E // ep)
    back, start = [], 0
    for p, (n, s) in enumerate(zip(rows, slots)):
        at, mine = slice(start, start + n), slice(p * E // ep, (p + 1) * E // ep)
        plan = dispatch_plan(local_ids[at], E // ep, s)
        assert len(plan.order_S) == s
        back.append(expert_mlp(sent[at], sent_weights[at], gate_up[mine], down[mine], plan))
        start += n
    out = collect(torch.cat(back), cross)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-13)
    grads = torch.autograd.grad(out, leaves[:4], dout)
    for got, exact in zip(grads, want_grads):
        torch.testing.assert_close(got, exact, rtol=1e-11, atol=1e-13)


def test_too_little_room_leaves_out_and_writes_nowhere_else():
    """Such a step is done again; until then nothing may fall outside a buffer or be NaN."""
    ids, E, ep = CHOICES["mixed"], 6, 2
    tokens, weights, gate_up, down, _ = leaves = make(ids, E)
    cross = lay_out(crossing(ids, E, ep), [2, 2])
    sent, local_ids, sent_weights = spread(tokens, ids, weights, cross, E // ep)
    assert len(sent) == 4 and cross.at_NP.max() < 4 and cross.to_NP.sum(0).tolist() == [2, 2]
    back = []
    for p in range(ep):
        at, mine = slice(2 * p, 2 * p + 2), slice(p * E // ep, (p + 1) * E // ep)
        plan = dispatch_plan(local_ids[at], E // ep, 1)
        assert plan.offsets_E[-1] == 1 and len(plan.order_S) == 1
        back.append(expert_mlp(sent[at], sent_weights[at], gate_up[mine], down[mine], plan))
    out = collect(torch.cat(back), cross)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.sum(), leaves[:4]))


def test_a_rank_that_receives_nothing():
    ids = torch.zeros(0, 2, dtype=torch.int32)
    rows, weights, gate_up, down, _ = make(ids, 3)
    out = expert_mlp(rows, weights, gate_up, down, dispatch_plan(ids, 3, 0))
    out.sum().backward()
    assert out.shape == (0, D) and not gate_up.grad.any() and rows.grad.shape == (0, D)


def test_clamped_swiglu_values():
    """Case 15: gate = up = 10 → 55.9996, both −10 → 2.4e-6 in size; no gradient where clamped."""
    ids = torch.zeros(1, 1, dtype=torch.long)
    for value, want, grads in ((10.0, 55.9996, (0, 0)), (-10.0, 2.4348e-6, (None, 0))):
        rows = torch.ones(1, 1, dtype=torch.float64)
        gate_up = torch.full((1, 2, 1), value, dtype=torch.float64, requires_grad=True)
        down = torch.ones(1, 1, 1, dtype=torch.float64)
        plan = dispatch_plan(ids, 1)
        weights = torch.ones(1, 1, dtype=torch.float64)
        out = expert_mlp(rows, weights, gate_up, down, plan, activation=ClampedSwiGLU())
        assert out.item() == pytest.approx(want, rel=1e-4)
        out.backward()
        for got, zero in zip(gate_up.grad.flatten().tolist(), grads, strict=True):
            assert (got == 0) == (zero == 0)


@pytest.mark.parametrize("counts", [[0, 5, 0, 3], [0, 127, 129, 0]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_nobody_wrote_stay_out(counts, dtype):
    """Case 4: buffers of the same sizes are filled with NaN and freed first."""
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))[:, None]
    args = make(ids, 4, dtype)
    rows, weights, gate_up, down, _ = args
    poison = [torch.full((len(ids), n), float("nan"), dtype=dtype) for n in (D, WIDTH, 2 * WIDTH)]
    poison += [torch.full_like(w, float("nan")) for w in (gate_up, down)]
    del poison
    plan = dispatch_plan(ids, 4)
    out = expert_mlp(rows, weights, gate_up, down, plan)
    out.float().sum().backward()
    wide = [a.detach().double().requires_grad_() for a in args[:4]]
    plan = dispatch_plan(ids, 4)
    exact = expert_mlp_ref(*wide, plan)
    exact.sum().backward()
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for got, want in [(out, exact)] + [(a.grad, w.grad) for a, w in zip(args[:4], wide)]:
        assert got.isfinite().all()
        assert (got.double() - want).norm() <= tolerance * want.norm()


def test_wrong_shapes_are_named():
    ids = CHOICES["mixed"]
    rows, weights, gate_up, down, _ = make(ids, 6)
    plan = dispatch_plan(ids, 6)
    with pytest.raises(ValueError, match=r"must be \(R, D\), \(E, 2F, D\) and \(E, D, F\)"):
        expert_mlp(rows, weights, gate_up, down.transpose(1, 2), plan)
    with pytest.raises(ValueError, match="for 6 experts, the weights for 5"):
        expert_mlp(rows, weights, gate_up[:5], down[:5], plan)


def test_accumulate_prefers_main_grad():
    weight = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
    accumulate(weight, torch.ones(3, dtype=torch.bfloat16))
    accumulate(weight, torch.ones(3, dtype=torch.bfloat16))
    assert weight.grad.tolist() == [2, 2, 2]
    weight.grad, weight.main_grad = None, torch.full((3,), 1e3)
    accumulate(weight, torch.full((3,), 0.125, dtype=torch.bfloat16))
    assert weight.main_grad.tolist() == [1000.125] * 3 and weight.grad is None


# ------------------------------------------------------------------------------------------------
# Triton
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interpreted():
    """What each case said in the interpreter: None, or a traceback."""
    command = [sys.executable, "-m", "tests.grouped_cases"]
    root = Path(__file__).parent.parent
    ran = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", grouped_cases.CASES)
def test_kernels_in_the_interpreter(interpreted, case):
    assert interpreted[case] is None, interpreted[case]


def compiled(kernel, arch, types, warps, stages, **constants):
    """Triton's output for one kernel, made without a GPU; pointers are taken to be aligned."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature = {n: "constexpr" if n in constants else types[n] for n in kernel.arg_names}
    aligned = [["tt.divisibility", 16]]
    source = ASTSource(
        kernel, signature, {(kernel.arg_names.index(n),): v for n, v in constants.items()},
        {(i,): aligned for i, n in enumerate(kernel.arg_names) if signature[n].startswith("*")},
    )  # fmt: skip
    options = dict(num_warps=warps, num_stages=stages)
    return compile(source, target=GPUTarget("cuda", arch, 32), options=options)


POINTERS = {
    "*i64": "rows_S order_S at_B", "*i32": "table_T2 count offsets_E first_B ends_E",
    "*fp32": "weights_RK dw_SC dw_EOI", "fp32": "alpha limit", "i32": "E",
    "*bf16": "x_RD bias_E2F h_S2F a_SF y_SO bias_EO dout_RD dh_S2F dy x",
}  # fmt: skip
TYPES = {name: kind for kind, names in POINTERS.items() for name in names.split()}
WIDTHS = [(2048, 768), (2880, 2880)]  # Qwen3, GPT-OSS


@pytest.mark.parametrize("arch,instruction", [(90, "wgmma.mma_async"), (100, "tcgen05.mma")])
@pytest.mark.parametrize("name", ["up", "down", "down_backward", "up_backward", "wgrad"])
@pytest.mark.parametrize("D,width", WIDTHS)
def test_compiles_to_tensor_core_code(arch, instruction, name, D, width):
    """The default cuts use the matrix units, and fit into shared memory and registers."""
    from kernels import grouped as g
    from kernels import grouped_wgrad as gw

    cut, block = g.cut_for(128, 32768, D, width), None
    config = gw.WGRAD if name == "wgrad" else getattr(cut, name)
    constants = dict(GROUP=config.group, FLATTEN=config.flatten, BK=config.depth)
    clamped = width == 2880
    if name == "wgrad":
        kernel, constants["X_GATHERED"] = gw._wgrad_kernel, not clamped  # both ways
        constants |= dict(O=D, I=width, BO=config.rows, BI=config.columns)
        columns = config.columns if clamped else config.rows
        types = {"x" if clamped else "dy": f"tensordesc<bf16[{config.depth}, {columns}]>"}
    else:
        constants |= dict(BM=cut.block, LEAST=cut.least, BN=config.columns)
        first = name in ("up", "down")
        block = (config.columns, config.depth) if first else (config.depth, config.columns)
        types = dict.fromkeys(
            ("gate_up", "w", "down"), f"tensordesc<bf16[1, {block[0]}, {block[1]}]>"
        )
        types["a_SI"] = f"tensordesc<bf16[{cut.block}, {config.depth}]>"
        types["a_few_SI"] = f"tensordesc<bf16[{cut.least}, {config.depth}]>"
    if name == "up":
        kernel = g._up_kernel
        constants |= dict(D=D, F=width, CLAMPED=clamped, BIASED=clamped)
        constants |= {} if clamped else dict(bias_E2F=None)
    elif name == "down_backward":
        kernel = g._down_backward_kernel
        constants |= dict(D=D, F=width, CLAMPED=clamped)
    elif name != "wgrad":
        kernel, biased = g._product_kernel, clamped and name == "down"
        I, O = (width, D) if name == "down" else (2 * width, D)
        constants |= dict(OUT_FIRST=name == "down", BIASED=biased, I=I, O=O)
        constants |= {} if biased else dict(weights_RK=None, bias_EO=None)
    made = compiled(kernel, arch, TYPES | types, config.warps, config.stages, **constants)
    assert instruction in made.asm["ptx"]
    gathers = name in ("up", "down_backward", "wgrad")  # rows that come while others are multiplied
    assert not gathers or "cp.async.cg.shared.global" in made.asm["ptx"]
    assert made.metadata.shared <= 227 * 1024


@pytest.mark.gpu
@pytest.mark.parametrize("activation,biased", VARIANTS)
@pytest.mark.parametrize("tokens", [1, 100, 1024])
def test_gpu_within_twice_the_eager_error(activation, biased, tokens):
    """bf16 on the GPU against float64, next to the same formula in eager bf16."""
    E, K, hidden, width = 16, 4, 256, 192
    ids = torch.rand(tokens, E, device="cuda").topk(K).indices
    ids[ids == 3] = 2  # an expert without rows (and rows that choose one expert twice)
    args = make(ids, E, torch.bfloat16, "cuda", biased, hidden, width)
    dout = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)

    def run(function, dtype):
        leaves = [
            a.detach().to(torch.promote_types(a.dtype, dtype)).requires_grad_()
            for a in (*args[:4], *(args[4] or ()))
        ]
        plan = dispatch_plan(ids, E)
        biases = tuple(leaves[4:]) or None
        out = function(*leaves[:4], plan, activation=activation, biases=biases)
        out.backward(dout.to(out.dtype))
        return [out.detach(), *(a.grad for a in leaves)]

    torch.empty(2**26, device="cuda").fill_(float("nan"))  # the allocator hands this out again
    got, again = run(expert_mlp, torch.bfloat16), run(expert_mlp, torch.bfloat16)
    eager, exact = run(expert_mlp_ref, torch.bfloat16), run(expert_mlp_ref, torch.float64)
    for g, a, e, x in zip(got, again, eager, exact, strict=True):
        assert torch.equal(g, a)  # no atomics: the same bits
        assert (g.double() - x).norm() <= 2 * (e.double() - x).norm() + 1e-4 * x.norm()
