"""kernels/embedding.py: gradients that go straight to main_grad, against F.embedding's."""

import pytest
import torch
import torch.nn.functional as F

import kernels.embedding as em
from kernels.embedding import embedding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
V, D = 13, 20


def exact(into, ids, rows):
    """into + the rows' sums, in float64, token by token."""
    out = into.double().clone()
    for i, row in zip(ids.tolist(), rows.double()):
        out[i] += row
    return out


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(em, "OCCURRENCES", 4)
    monkeypatch.setattr(em, "COLUMNS", 16)


@pytest.mark.triton
@pytest.mark.parametrize("wide, narrow", [
    (torch.float64, torch.float64), (torch.float32, torch.float32), (torch.float32, torch.bfloat16)
])  # fmt: skip
@pytest.mark.parametrize("words", [1, 2, V])
@pytest.mark.parametrize("n", [1, 4, 37])
def test_kernel_adds_every_occurrence(small_blocks, n, words, wide, narrow):
    """Runs that are shorter and longer than a block, exact multiples of it, and a ragged width."""
    ids = torch.randint(0, words, (n,), device=DEVICE)
    ids[-1] = V - 1
    rows = torch.randn(n, D, device=DEVICE, dtype=torch.float64).to(narrow)
    into = torch.randn(V, D, device=DEVICE, dtype=torch.float64).to(wide)
    expected, tolerance = exact(into, ids, rows), 1e-13 if wide == torch.float64 else 1e-5
    again = into.clone()
    em._add_rows(into, ids, rows)
    torch.testing.assert_close(into.double(), expected, rtol=tolerance, atol=tolerance)
    em._add_rows(again, ids.int(), rows.t().contiguous().t())  # strided rows, narrow ids
    assert torch.equal(into, again)


@pytest.mark.triton
def test_nothing_to_add():
    into = torch.ones(V, D, device=DEVICE)
    em.add_rows_(into, torch.zeros(0, dtype=torch.long, device=DEVICE), into[:0])
    em._add_rows(into, torch.zeros(0, dtype=torch.long, device=DEVICE), into[:0])
    assert (into == 1).all()


@pytest.mark.triton
def test_a_word_is_summed_before_it_is_added(small_blocks):
    """256 ones beside 2^24: one by one they would all be lost in fp32."""
    into = torch.full((2, 4), 2.0**24, device=DEVICE)
    em._add_rows(into, torch.ones(256, dtype=torch.long, device=DEVICE),
                 torch.ones(256, 4, device=DEVICE))  # fmt: skip
    assert (into[0] == 2**24).all() and (into[1] == 2**24 + 256).all()


@pytest.mark.triton
def test_occurrences_are_summed_in_order(small_blocks):
    """2^24 + 1 - 2^24 is 0 in fp32, and 1 from behind; three blocks of four occurrences."""
    rows = torch.zeros(12, 4, device=DEVICE)
    rows[0], rows[4], rows[8] = 2.0**24, 1.0, -(2.0**24)
    into = torch.zeros(2, 4, device=DEVICE)
    em._add_rows(into, torch.ones(12, dtype=torch.long, device=DEVICE), rows)
    assert not into.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradient_goes_to_main_grad_or_is_dense(dtype):
    tokens = torch.randint(0, V, (3, 5), device=DEVICE)
    weight = torch.randn(V, D, device=DEVICE).to(dtype).requires_grad_()
    dout = torch.randn(3, 5, D, device=DEVICE).to(dtype)
    expected = F.embedding(tokens, weight)
    (dense,) = torch.autograd.grad(expected, weight, dout)
    out = embedding(tokens, weight)
    assert torch.equal(out, expected)
    assert torch.equal(torch.autograd.grad(out, weight, dout)[0], dense)

    weight.main_grad = torch.ones(V, D, device=DEVICE,
                                  dtype=torch.promote_types(dtype, torch.float32))  # fmt: skip
    wanted = exact(weight.main_grad, tokens.flatten(), dout.flatten(0, 1))
    embedding(tokens, weight).backward(dout)
    assert weight.grad is None
    tolerance = 1e-13 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(weight.main_grad.double(), wanted, rtol=tolerance, atol=tolerance)


def test_expanded_gradient():
    """Of a sum, whose gradient is one number everywhere and has no strides."""
    weight = torch.randn(V, D, device=DEVICE, requires_grad=True)
    weight.main_grad = torch.zeros(V, D, device=DEVICE)
    embedding(torch.tensor([1, 1, 4], device=DEVICE), weight).sum().backward()
    assert weight.main_grad[:, 0].tolist() == [0, 2, 0, 0, 1] + [0] * 8


@pytest.mark.gpu
def test_gpu_real_sizes_twice_the_same():
    """Frequent words, as text has them; blocks of the real sizes."""
    n, words, width = 4096, 32000, 2048
    ids = (torch.rand(n, device="cuda") ** 6 * words).long()
    rows = torch.randn(n, width, device="cuda", dtype=torch.bfloat16)
    a, b = (torch.zeros(words, width, device="cuda") for _ in range(2))
    em.add_rows_(a, ids, rows)
    em.add_rows_(b, ids, rows)
    wanted = torch.zeros(words, width, device="cuda", dtype=torch.float64)
    wanted.index_add_(0, ids, rows.double())
    assert torch.equal(a, b)
    torch.testing.assert_close(a.double(), wanted, rtol=1e-5, atol=1e-4)
