"""kernels/adamw.py: the kernels (interpreted on a CPU, compiled on a GPU) against plain torch."""

import math

import pytest
import torch

import kernels.adamw as adamw
from kernels.adamw import adamw_ref_, sum_squares

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HYPER = dict(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


def state(n, moments=torch.float32, seed=0):
    """w, g, m, v and a bf16 parameter of garbage."""
    gen = torch.Generator().manual_seed(seed)
    w, g, m, v = (torch.randn(n, generator=gen) for _ in range(4))
    param = torch.full((n,), math.nan, dtype=torch.bfloat16)
    return [x.to(DEVICE) for x in (w, g, m.mul(0.1).to(moments), v.square() * 1e-3, param)]


def run(function, tensors, **options):
    *four, param = (x.clone() for x in tensors)
    function(*four, param=param, **(HYPER | options))
    return [*four, param]


@pytest.mark.triton
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 7, 1024, 5000])
def test_kernel_equals_reference(n, moments):
    tensors = state(n, moments)
    for t, scale, zero in ((1, 0.25, True), (1000, 1.0, False)):
        expected = run(adamw_ref_, tensors, t=t, scale=scale, zero_grad=zero)
        got = run(adamw._adamw, tensors, t=t, scale=scale, zero_grad=zero)
        for name, x, y in zip("wgmvp", got, expected, strict=True):
            narrow = x.dtype == torch.bfloat16  # one ulp, where the unrounded ones differ a little
            limit = dict(rtol=2**-7, atol=0) if narrow else dict(rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(x, y, **limit, msg=lambda s, name=name: f"{name}: {s}")
            assert not narrow or (x != y).float().mean() < 1e-2 or n < 100
        assert torch.equal(got[1], torch.zeros_like(tensors[1]) if zero else tensors[1])
        assert torch.equal(got[4], got[0].bfloat16())


@pytest.mark.triton
def test_fp32_parameters_and_untouched_neighbours():
    """A range inside larger buffers, no parameter beside the masters, an odd first element."""
    n = 300
    tensors = [x[:n] for x in state(n)[:4]]
    inside = [torch.full((n + 9,), 7.0, device=DEVICE) for _ in tensors]
    for wide, x in zip(inside, tensors, strict=True):
        wide[5 : 5 + n] = x
    adamw._adamw(*(x[5 : 5 + n] for x in inside), **HYPER, t=3, scale=1.0)
    adamw_ref_(*tensors, **HYPER, t=3, scale=1.0)
    for wide, x in zip(inside, tensors, strict=True):
        torch.testing.assert_close(wide[5 : 5 + n], x, rtol=1e-5, atol=1e-6)
        assert (wide[:5] == 7).all() and (wide[5 + n :] == 7).all()


@pytest.mark.triton
def test_tiny_gradients_still_move_nothing_to_nan():
    """v of 1e-40 is a denormal; v of 0 divides by eps alone."""
    w, g, m, v, param = state(64)
    g.fill_(1e-19)
    m.zero_()
    v.zero_()
    expected = run(adamw_ref_, [w, g, m, v, param], t=1, scale=1.0)
    got = run(adamw._adamw, [w, g, m, v, param], t=1, scale=1.0)
    torch.testing.assert_close(got[0], expected[0], rtol=1e-6, atol=0)


def test_reference_in_pieces(monkeypatch):
    """float64, against torch.optim.AdamW; the last piece is shorter."""
    monkeypatch.setattr(adamw, "CHUNK", 100)
    w, g = (torch.randn(250, dtype=torch.float64) for _ in range(2))
    p = torch.nn.Parameter(w.clone())
    oracle = torch.optim.AdamW([p], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    copy = torch.empty(250, dtype=torch.bfloat16)
    for t in (1, 2, 3):
        p.grad = 0.5 * g
        oracle.step()
        adamw.adamw_(w, g, m, v, **HYPER, t=t, scale=0.5, param=copy)
    torch.testing.assert_close(w, p.detach(), rtol=1e-13, atol=1e-13)
    assert torch.equal(copy, w.bfloat16())
    adamw.adamw_(w, g, m, v, **HYPER, t=4, scale=0.5, zero_grad=True)
    assert not g.any()


@pytest.fixture
def several_turns(monkeypatch):
    """Of a program of the sum."""
    monkeypatch.setattr(adamw, "PARTS", 3)
    monkeypatch.setattr(adamw, "PART_BLOCK", 512)


@pytest.mark.triton
@pytest.mark.parametrize("n", [0, 1, 5000, 20000])
def test_sum_of_squares(several_turns, n):
    x = torch.randn(n, device=DEVICE)
    got = adamw._sum_squares(x)
    assert got.dtype == torch.float64 and got.shape == ()
    torch.testing.assert_close(got, x.double().square().sum(), rtol=1e-6, atol=0)
    torch.testing.assert_close(sum_squares(x.double()), x.double().square().sum())
    assert torch.equal(got, adamw._sum_squares(x))


@pytest.mark.triton
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_sum_of_squares_shows_what_is_not_finite(several_turns, bad):
    x = torch.randn(3000, device=DEVICE)
    x[2999] = bad
    assert not adamw._sum_squares(x).isfinite()


@pytest.mark.gpu
def test_gpu_beyond_32_bit_offsets():
    """2^31 elements and a few: the last ones are updated as a short range would be."""
    n, tail = 2**31 + 384, 1000
    tensors = state(tail)
    long = [torch.zeros(n, dtype=x.dtype, device="cuda") for x in tensors]
    for wide, x in zip(long, tensors, strict=True):
        wide[-tail:] = x
    torch.testing.assert_close(sum_squares(long[1]), sum_squares(tensors[1]), rtol=1e-6, atol=0)
    options = HYPER | dict(t=2, scale=0.5, zero_grad=True)
    adamw.adamw_(*long[:4], param=long[4], **options)
    adamw.adamw_(*tensors[:4], param=tensors[4], **options)
    for wide, x in zip(long, tensors, strict=True):
        assert torch.equal(wide[-tail:], x) and not wide[: n - tail].any()
