"""kernels/attention.py: the reference against first principles, then the library path.

The library path is tested on a CPU in two halves: its arithmetic and its layouts over stand-ins
with the libraries' contract, its calls against the real operators' schemas on the meta device.
"""

import math

import pytest
import torch
import torch.nn.functional as F

import kernels.attention as attention_module
from kernels.attention import _fused, add_sink, attention, attention_ref, sink_grad


def make(B, H, Hkv, T, Dqk, Dv, dtype=torch.float64, device="cpu", transposed=True):
    """q, k, v as transposed views of (B, T, H, D), and sinks; all of them leaves."""

    def one(heads, width):
        shape = (B, T, heads, width) if transposed else (B, heads, T, width)
        x = torch.randn(shape, dtype=torch.float64, device=device).to(dtype)
        return (x.transpose(1, 2) if transposed else x).requires_grad_()

    sink = torch.randn(H, dtype=torch.float64, device=device).to(dtype).requires_grad_()
    return one(H, Dqk), one(Hkv, Dqk), one(Hkv, Dv), sink


def by_loops(q, k, v, scale, window=None, sink=None, cu_seqlens=None):
    """out and lse, one query at a time, straight from the definition."""
    B, H, T, _ = q.shape
    group = H // k.shape[1]
    bounds = [0, B * T] if cu_seqlens is None else cu_seqlens.tolist()
    out, lse = q.new_zeros(B, H, T, v.shape[-1]), q.new_zeros(B, H, T)
    for b in range(B):
        for i in range(T):
            first = max([0] + [c - b * T for c in bounds if c <= b * T + i])
            if window is not None:
                first = max(first, i - window + 1)
            for h in range(H):
                scores = k[b, h // group, first : i + 1] @ q[b, h, i] * scale
                column = scores if sink is None else torch.cat([scores, sink[h : h + 1]])
                lse[b, h, i] = column.exp().sum().log()
                probs = column.softmax(0)[: len(scores)]
                out[b, h, i] = probs @ v[b, h // group, first : i + 1]
    return out, lse


def masked_scores(q, k, scale, window, cu_seqlens):
    """Scores (B, H, T, T) with -inf where a query does not look."""
    B, _, T, _ = q.shape
    at = torch.arange(T, device=q.device)
    visible = attention_module._visible(at, at, B, T, window, cu_seqlens)
    visible = visible if visible.dim() == 2 else visible[:, 0]
    return (q @ repeat(k, q).mT * scale).masked_fill(~visible, -math.inf)


def repeat(x, q):
    """Keys or values (B, Hkv, T, D) -> (B, H, T, D)."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def eager(q, k, v, *, scale, window=None, sink=None, cu_seqlens=None):
    """The usual unfused attention: intermediates in the inputs' dtype, the sink is a column."""
    B, H, T, _ = q.shape
    scores = masked_scores(q, k, scale, window, cu_seqlens)
    if sink is not None:
        scores = torch.cat([scores, sink.view(1, H, 1, 1).expand(B, H, T, 1)], -1)
    lse = scores.detach().float().logsumexp(-1)
    return scores.softmax(-1)[..., :T] @ repeat(v, q), lse


CU = [0, 3, 9, 9, 14, 18]  # B=2, T=9, one document empty
CASES = {
    "plain": (dict(B=2, H=2, Hkv=2, T=9, Dqk=4, Dv=4), dict()),
    "gqa": (dict(B=1, H=6, Hkv=2, T=7, Dqk=4, Dv=4), dict()),
    "mla": (dict(B=2, H=2, Hkv=2, T=5, Dqk=6, Dv=4), dict(sink=True)),
    "value wider": (dict(B=1, H=2, Hkv=1, T=5, Dqk=4, Dv=6), dict(window=2)),
    "window and sink": (dict(B=2, H=4, Hkv=2, T=9, Dqk=4, Dv=4), dict(window=3, sink=True)),
    "window beyond T": (dict(B=1, H=2, Hkv=1, T=5, Dqk=4, Dv=4), dict(window=64)),
    "documents": (dict(B=2, H=4, Hkv=2, T=9, Dqk=4, Dv=4), dict(cu_seqlens=CU)),
    "all": (dict(B=2, H=4, Hkv=2, T=9, Dqk=6, Dv=4), dict(window=4, sink=True, cu_seqlens=CU)),
    "one token": (dict(B=1, H=2, Hkv=1, T=1, Dqk=4, Dv=4), dict(sink=True)),
}


def build(case, transposed=True):
    """q, k, v and the keyword arguments of one of CASES (CPU) or GPU_CASES."""
    shapes, options = CASES[case] if case in CASES else GPU_CASES[case]
    on = dict() if case in CASES else dict(dtype=torch.bfloat16, device="cuda")
    q, k, v, sink = make(**shapes, **on, transposed=transposed)
    options = dict(options, scale=shapes["Dqk"] ** -0.5)
    options["sink"] = sink if options.get("sink") else None
    if "cu_seqlens" in options:
        options["cu_seqlens"] = torch.tensor(options["cu_seqlens"]).int().to(q.device)
    return q, k, v, options


# ------------------------------------------------------------------ the reference


@pytest.mark.parametrize("case", CASES)
def test_reference_is_the_definition(case):
    q, k, v, options = build(case)
    out, lse = attention(q, k, v, **options)
    expected, expected_lse = by_loops(q, k, v, **options)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse.detach(), rtol=1e-12, atol=1e-12)
    assert not lse.requires_grad


@pytest.mark.parametrize("case", ["gqa", "all", "one token"])
def test_gradcheck(case):
    q, k, v, options = build(case)
    sink = options.pop("sink")
    inputs = (q, k, v) if sink is None else (q, k, v, sink)

    def out(q, k, v, sink=None):
        return attention(q, k, v, sink=sink, **options)[0]

    assert torch.autograd.gradcheck(out, inputs, fast_mode=True)


@pytest.mark.parametrize("width_v", [8, 4])
def test_equals_torch(width_v):
    q, k, v, _ = make(2, 6, 3, 33, 8, width_v)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v, scale=0.3)[0], expected)


def test_window_counts_the_token_itself():
    q, k, v, _ = make(1, 2, 1, 9, 4, 4)
    i = 7
    before = attention(q, k, v, scale=0.5, window=4)[0][:, :, i]
    for back, changes in [(3, True), (4, False)]:
        k2, v2 = k.detach().clone(), v.detach().clone()
        k2[:, :, i - back] += 1
        v2[:, :, i - back] += 1
        after = attention(q, k2, v2, scale=0.5, window=4)[0][:, :, i]
        assert torch.equal(before, after) != changes


def test_sink_of_minus_infinity_is_no_sink():
    q, k, v, sink = make(1, 2, 1, 6, 4, 4)
    no_sink = torch.full_like(sink, -math.inf, requires_grad=True)
    plain = attention(q, k, v, scale=0.5)
    silent = attention(q, k, v, scale=0.5, sink=no_sink)
    torch.testing.assert_close(silent, plain, rtol=0, atol=0)
    grads = torch.autograd.grad(silent[0].sum(), [q, k, v, no_sink])
    torch.testing.assert_close(grads[:3], torch.autograd.grad(plain[0].sum(), [q, k, v]))
    assert torch.equal(grads[3], torch.zeros_like(sink))


def test_sink_gradient_is_that_of_an_extra_column():
    q, k, v, sink = make(2, 4, 2, 8, 4, 4)
    dout = torch.randn(2, 4, 8, 4, dtype=torch.float64)
    (grad,) = torch.autograd.grad(attention(q, k, v, scale=0.5, sink=sink)[0], sink, dout)
    (expected,) = torch.autograd.grad(eager(q, k, v, scale=0.5, sink=sink)[0], sink, dout)
    torch.testing.assert_close(grad, expected)


def test_documents_are_isolated():
    q, k, v, options = build("documents")
    changed = [x.detach().clone() for x in (q, k, v)]
    for x in changed:
        x[0, :, :3] += 1  # the first document
    before, after = attention(q, k, v, **options)[0], attention(*changed, **options)[0]
    assert torch.equal(before[0, :, 3:], after[0, :, 3:]) and torch.equal(before[1], after[1])
    assert not torch.equal(before[0, :, :3], after[0, :, :3])
    alone = attention(q[:1, :, 3:9], k[:1, :, 3:9], v[:1, :, 3:9], scale=0.5)[0]
    torch.testing.assert_close(before[:1, :, 3:9], alone)


def test_dtypes():
    for dtype, lse_dtype in [(torch.bfloat16, torch.float32), (torch.float32, torch.float32),
                             (torch.float64, torch.float64)]:  # fmt: skip
        q, k, v, sink = make(1, 2, 1, 5, 4, 4, dtype=dtype)
        out, lse = attention(q, k, v, scale=0.5, sink=sink)
        assert out.dtype == dtype and lse.dtype == lse_dtype
        out.sum().backward()
        assert sink.grad.dtype == dtype
        wide, _ = attention(q.double(), k.double(), v.double(), scale=0.5, sink=sink.double())
        torch.testing.assert_close(out, wide.to(dtype))


@pytest.mark.parametrize(
    "change, word",
    [
        (dict(q=torch.zeros(3, 2, 4)), "dimensions"),
        (dict(k=torch.zeros(1, 3, 5, 4), v=torch.zeros(1, 3, 5, 4)), "dividing 4"),
        (dict(v=torch.zeros(1, 2, 6, 4)), "v"),
        (dict(k=torch.zeros(1, 2, 5, 4, dtype=torch.bfloat16)), "dtype"),
        (dict(window=0), "window 0"),
        (dict(sink=torch.zeros(2)), "sink"),
        (dict(cu_seqlens=torch.tensor([0, 5])), "int32"),
    ],
)
def test_mistakes_are_named(change, word):
    good = dict(q=torch.zeros(1, 4, 5, 4), k=torch.zeros(1, 2, 5, 4), v=torch.zeros(1, 2, 5, 4))
    with pytest.raises(ValueError, match=word):
        attention(**{**good, **change}, scale=1.0)


# ------------------------------------------------------------------ the library path, on a CPU


def test_sink_algebra():
    """out', lse' and dsink from plain attention's results equal autograd through the sink."""
    q, k, v, sink = make(2, 4, 2, 7, 4, 6)
    dout = torch.randn(2, 4, 7, 6, dtype=torch.float64)
    with_sink, lse_sink = attention_ref(q, k, v, scale=0.5, sink=sink)
    out, lse = add_sink(*attention_ref(q, k, v, scale=0.5), sink)
    torch.testing.assert_close(out, with_sink)
    torch.testing.assert_close(lse.detach(), lse_sink)
    (expected,) = torch.autograd.grad(with_sink, sink, dout)
    torch.testing.assert_close(sink_grad(dout, out, lse, sink), expected)


class Libraries:
    """Stand-ins for torch's four attention operators, in float64, with their contract.

    Backward uses only P = exp(scores - lse) and D = rowsum(dout * out), as the libraries do.
    Results are as laid out as theirs: lse (B, H, T, 1), or (H, B * T) for packed documents.
    Queries and keys may differ in number; causal, the last query stands at the last key.
    """

    def __init__(self):
        self.calls = []

    def scores(self, q, k, scale, causal, window, cu_q, cu_k):
        """Scores (B, H, Tq, Tk), -inf where a query does not look."""
        places = []
        for x, cu in ((q, cu_q), (k, cu_k)):
            B, T = x.shape[0], x.shape[2]
            cu = torch.arange(B + 1) * T if cu is None else cu.long()
            token = torch.arange(B * T)
            document = torch.searchsorted(cu, token, right=True)
            places.append((document.view(B, T), (cu[document] - token).view(B, T)))
        (document_q, left_q), (document_k, left_k) = places
        visible = document_q[:, :, None] == document_k[:, None, :]
        age = left_k[:, None, :] - left_q[:, :, None]
        visible &= (age >= 0) | (not causal)
        visible &= age < (window or math.inf)
        return (q @ repeat(k, q).mT * scale).masked_fill(~visible[:, None], -math.inf)

    def forward(self, q, k, v, *how):
        scores = self.scores(q, k, *how)
        lse = scores.logsumexp(-1)
        lse = lse.masked_fill(lse == -math.inf, math.inf)  # of nothing, as flash attention has it
        return (scores - lse.unsqueeze(-1)).exp() @ repeat(v, q), lse

    def backward(self, dout, q, k, v, out, lse, *how):
        probs = (self.scores(q, k, *how) - lse.unsqueeze(-1)).exp()
        dscores = probs * (dout @ repeat(v, q).mT - (dout * out).sum(-1, keepdim=True)) * how[0]
        per_head = (dscores.mT @ q, probs.mT @ dout)
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in per_head)
        return dscores @ repeat(k, q), dk, dv

    # The operators, with torch's positional arguments.

    def cudnn(self, q, k, v, bias, with_lse, dropout, causal, debug, *, scale):
        assert bias is None and with_lse and dropout == 0 and not debug
        assert not causal or q.shape[2] == k.shape[2]  # cuDNN aligns to the first key
        self.calls.append("cudnn")
        out, lse = self.forward(q, k, v, scale, causal, None, None, None)
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        return out, lse.unsqueeze(-1), None, None, 0, 0, torch.zeros(()), torch.zeros(()), None

    def cudnn_backward(self, dout, q, k, v, out, lse, seed, offset, bias, cu_q, cu_k, max_q,
                       max_k, dropout, causal, *, scale):  # fmt: skip
        assert lse.shape == (*q.shape[:3], 1) and lse.is_contiguous()
        assert max_q == q.shape[2] and max_k == k.shape[2] and dropout == 0
        assert dout.stride(-1) == 1 and 0 not in dout.stride()
        lse = lse.squeeze(-1)
        return self.backward(dout, q, k, v, out, lse, scale, causal, None, None, None)

    @staticmethod
    def unpack(x, T, cu):
        """(B, T, H, D) or (B * T, H, D) -> (B, H, T, D)."""
        return (x if cu is None else x.unflatten(0, (-1, T))).transpose(1, 2)

    @staticmethod
    def pack(x, cu):
        x = x.transpose(1, 2).contiguous()
        return x if cu is None else x.flatten(0, 1)

    def flash_options(self, widths, cu_q, cu_k, max_q, max_k, dropout, causal, left, right):
        """The checks of both passes; the arguments of `scores` after the scale."""
        assert len(set(widths)) == 1 and dropout == 0 and right == (0 if causal else -1)
        if cu_q is not None:
            assert cu_q.dtype == cu_k.dtype == torch.int32 and len(cu_q) == len(cu_k)
            for cu, most in ((cu_q, max_q), (cu_k, max_k)):
                assert cu.is_contiguous() and 0 <= cu.diff().min() and cu.diff().max() <= most
        return causal, None if left < 0 else left + 1, cu_q, cu_k

    def flash(self, q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale,
              window_size_left, window_size_right):  # fmt: skip
        sides = window_size_left, window_size_right
        widths = [x.shape[-1] for x in (q, k, v)]
        how = self.flash_options(widths, cu_q, cu_k, max_q, max_k, dropout, causal, *sides)
        self.calls.append("flash")
        q, k, v = self.unpack(q, max_q, cu_q), *(self.unpack(x, max_k, cu_k) for x in (k, v))
        out, lse = self.forward(q, k, v, scale, *how)
        if cu_q is not None:
            lse = lse.transpose(0, 1).flatten(1).contiguous()
        return self.pack(out, cu_q), lse, torch.zeros(2), torch.zeros(()), None

    def flash_backward(self, dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal,
                       seed, offset, *, scale, window_size_left, window_size_right):  # fmt: skip
        assert lse.is_contiguous()
        sides = window_size_left, window_size_right
        widths = [x.shape[-1] for x in (dout, q, k, v, out)]
        how = self.flash_options(widths, cu_q, cu_k, max_q, max_k, dropout, causal, *sides)
        dout, q, out = (self.unpack(x, max_q, cu_q) for x in (dout, q, out))
        k, v = (self.unpack(x, max_k, cu_k) for x in (k, v))
        if cu_q is not None:
            lse = lse.unflatten(1, (-1, max_q)).transpose(0, 1)
        grads = self.backward(dout, q, k, v, out, lse, scale, *how)
        return tuple(self.pack(x, cu_q) for x in grads)

    def replace(self, patch):
        """Put the stand-ins in torch's place; `patch` is a pytest.MonkeyPatch."""
        ops = torch.ops.aten
        patch.setattr(ops, "_scaled_dot_product_cudnn_attention", self.cudnn)
        patch.setattr(ops, "_scaled_dot_product_cudnn_attention_backward", self.cudnn_backward)
        patch.setattr(ops, "_flash_attention_forward", self.flash)
        patch.setattr(ops, "_flash_attention_backward", self.flash_backward)


@pytest.fixture
def libraries(monkeypatch):
    stand_ins = Libraries()
    stand_ins.replace(monkeypatch)
    return stand_ins


def outputs_and_grads(function, q, k, v, options):
    """out, lse, and the gradients of q, k, v (and the sink) for a fixed random dout."""
    out, lse = function(q, k, v, **options)
    generator = torch.Generator(out.device).manual_seed(1)
    dout = torch.randn(out.shape, generator=generator, device=out.device).bfloat16()
    inputs = [q, k, v] + ([] if options["sink"] is None else [options["sink"]])
    return [out.detach(), lse, *torch.autograd.grad(out, inputs, dout.to(out.dtype))]


@pytest.mark.parametrize("case", [case for case in CASES if case != "one token"])
def test_library_path_over_stand_ins(libraries, monkeypatch, case):
    monkeypatch.setattr(attention_module, "_can_fuse", lambda q, k, v: True)
    q, k, v, options = build(case)
    got = outputs_and_grads(attention, q, k, v, options)
    expected = outputs_and_grads(attention_ref, q, k, v, options)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    plain = case in ("plain", "gqa", "mla", "window beyond T")
    assert libraries.calls == ["cudnn" if plain else "flash"]


def test_libraries_get_aligned_tensors(libraries):
    """Broadcast, misaligned or last-strided inputs and gradients are copied, others are not."""
    width = 8
    good = torch.zeros(2, 3, 4, 3 * width)[..., width : 2 * width].transpose(1, 2)
    assert attention_module._aligned(good) is good
    for bad in (
        torch.zeros(1, 1, 1, width).expand(2, 3, 4, width),
        torch.zeros(2, 3, 4, width + 1)[..., :width],
        torch.zeros(2, 3, 4, width + 8)[..., 1 : width + 1],
        torch.zeros(2, 3, width, 4).mT,
    ):
        assert attention_module._aligned(bad).is_contiguous()

    q, k, v, _ = make(1, 2, 1, 6, width, width)
    _fused(q, k, v, scale=0.5)[0].sum().backward()  # hands on an expanded scalar; see Libraries


@pytest.mark.parametrize("window, documents, width_v", [(None, 0, 64), (16, 0, 64), (None, 1, 32)])
def test_library_path_compiles_whole_against_the_real_operators(
    monkeypatch, window, documents, width_v
):
    """No graph break, and every call fits the installed torch's schema and shapes (meta device)."""
    torch._dynamo.reset()
    monkeypatch.setattr(attention_module, "_can_fuse", lambda q, k, v: True)
    q, k, v, sink = make(2, 8, 2, 40, 64, width_v, dtype=torch.bfloat16, device="meta")
    cu = torch.empty(5, dtype=torch.int32, device="meta") if documents else None
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    out, lse = compiled(q, k, v, scale=0.1, window=window, sink=sink, cu_seqlens=cu)
    assert out.shape == (2, 8, 40, width_v) and out.dtype == torch.bfloat16
    assert lse.shape == (2, 8, 40) and lse.dtype == torch.float32 and not lse.requires_grad
    assert out.transpose(1, 2).stride(-1) == 1 and out.stride(1) < out.stride(2)  # like q
    out.sum().backward()
    for x in (q, k, v, sink):
        assert x.grad.shape == x.shape and x.grad.dtype == x.dtype


# ------------------------------------------------------------------ the library path, on a GPU


def error(got, exact):
    return ((got.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


GPU_CASES = {
    "qwen3": (dict(B=2, H=32, Hkv=4, T=512, Dqk=128, Dv=128), dict()),
    "deepseek": (dict(B=2, H=16, Hkv=16, T=512, Dqk=192, Dv=128), dict()),
    "gpt-oss": (dict(B=2, H=64, Hkv=8, T=512, Dqk=64, Dv=64), dict(sink=True)),
    "gpt-oss window": (dict(B=2, H=64, Hkv=8, T=512, Dqk=64, Dv=64), dict(window=128, sink=True)),
    "odd length": (dict(B=1, H=8, Hkv=2, T=333, Dqk=128, Dv=128), dict(sink=True)),
    "odd length window": (dict(B=1, H=8, Hkv=2, T=333, Dqk=64, Dv=64), dict(window=100)),
    "4 documents": (
        dict(B=2, H=32, Hkv=4, T=300, Dqk=128, Dv=128),
        dict(cu_seqlens=[0, 77, 300, 431, 600]),
    ),
    "4 documents, all": (
        dict(B=2, H=8, Hkv=8, T=300, Dqk=192, Dv=128),
        dict(cu_seqlens=[0, 77, 77, 300, 600], window=50, sink=True),
    ),
    "two tokens": (dict(B=1, H=4, Hkv=4, T=2, Dqk=64, Dv=64), dict(sink=True)),
    "wide head": (dict(B=1, H=4, Hkv=2, T=200, Dqk=256, Dv=256), dict()),
}


def assert_no_worse_than_eager(function, q, k, v, options):
    """err(kernel, exact) <= 2 * err(eager bf16, exact) + floor: out, lse, every gradient."""
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    sink = options["sink"]
    wide_sink = None if sink is None else sink.detach().double().requires_grad_()
    exact = outputs_and_grads(attention_ref, *wide, dict(options, sink=wide_sink))
    got = outputs_and_grads(function, q, k, v, options)
    yardstick = outputs_and_grads(eager, q, k, v, options)
    for name, g, y, e in zip(["out", "lse", "dq", "dk", "dv", "dsink"], got, yardstick, exact):
        assert error(g, e) <= 2 * error(y, e) + 1e-3, f"{name}: {error(g, e)} vs {error(y, e)}"


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES)
def test_gpu(case):
    q, k, v, options = build(case)
    assert attention_module._can_fuse(q, k, v)
    assert_no_worse_than_eager(attention, q, k, v, options)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["qwen3", "gpt-oss window", "4 documents"])
def test_gpu_layouts(case):
    """(B, H, T, D) in memory, slices of one fused projection, and misaligned storage."""
    assert_no_worse_than_eager(attention, *build(case, transposed=False))
    q, k, v, options = build(case)
    for pad, start in [(64, 64), (64, 3), (1, 0)]:
        sliced = []
        for x in (q, k, v):
            B, H, T, D = x.shape
            buffer = x.new_full((B, T, H, D + pad), float("nan"))
            buffer[..., start : start + D] = x.detach().transpose(1, 2)
            sliced.append(buffer[..., start : start + D].transpose(1, 2).requires_grad_())
        assert_no_worse_than_eager(attention, *sliced, options)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", ["qwen3", "deepseek", "gpt-oss", "gpt-oss window", "4 documents, all"]
)
def test_gpu_compiled(case):
    torch._dynamo.reset()
    q, k, v, options = build(case)
    compiled = torch.compile(attention, fullgraph=True)
    assert_no_worse_than_eager(compiled, q, k, v, options)
