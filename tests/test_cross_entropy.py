"""kernels/cross_entropy.py against full logits, in every dtype and for every chunking."""

import pytest
import torch
import torch.nn.functional as F

import kernels.cross_entropy as ce
from kernels.cross_entropy import linear_cross_entropy, linear_cross_entropy_ref

N, D, V = 37, 12, 29


def make(n=N, dtype=torch.float32, ignored=5, d=D, vocab=V, device="cpu"):
    """hidden, weight (leaves) and targets, of which `ignored` spread ones are -100."""
    generator = torch.Generator(device).manual_seed(3)
    options = dict(generator=generator, device=device, dtype=torch.float64)
    hidden = torch.randn(n, d, **options).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, d, **options) * 0.5).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (n,), generator=generator, device=device)
    targets[:: max(1, n // max(1, ignored))][:ignored] = -100
    return hidden, weight, targets


def run(function, hidden, weight, targets, factor=1.0, **options):
    """Loss and the gradients of hidden and weight."""
    loss = function(hidden, weight, targets, **options)
    return loss.detach(), *torch.autograd.grad(loss * factor, [hidden, weight])


@pytest.fixture
def chunks_of(monkeypatch):
    """Sets the chunk size so that `rows` rows of fp32 logits fit."""
    return lambda rows, itemsize=4: monkeypatch.setattr(ce, "CHUNK_BYTES", rows * V * itemsize)


@pytest.mark.parametrize("z_loss", [0.0, 0.03])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 5, 36, 37, 1000])
def test_equals_full_logits(chunks_of, rows, dtype, z_loss):
    chunks_of(rows, dtype.itemsize)
    inputs = make(dtype=dtype)
    got = run(linear_cross_entropy, *inputs, factor=0.25, z_loss=z_loss)
    expected = run(linear_cross_entropy_ref, *inputs, factor=0.25, z_loss=z_loss)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    assert got[0].dtype == dtype and got[0].shape == ()


def test_reference_is_the_definition():
    hidden, weight, targets = make(dtype=torch.float64)
    total = 0.0
    for h, t in zip(hidden, targets):
        if t != -100:
            logits = weight @ h
            lse = logits.exp().sum().log()
            total = total + lse - logits[t] + 0.03 * lse**2
    got = linear_cross_entropy_ref(hidden, weight, targets, z_loss=0.03)
    torch.testing.assert_close(got, total)


def test_gradients_by_finite_differences(chunks_of):
    chunks_of(4, 8)
    hidden, weight, targets = make(n=9, dtype=torch.float64, ignored=2)
    grads = run(linear_cross_entropy, hidden, weight, targets, z_loss=0.01)[1:]
    for x, grad in zip((hidden, weight), grads):
        entries = x.detach().view(-1)  # the same memory
        for i in range(0, len(entries), 7):
            losses = []
            for step in (1e-5, -1e-5):
                entries[i] += step
                losses.append(linear_cross_entropy(hidden, weight, targets, z_loss=0.01).item())
                entries[i] -= step
            slope = (losses[0] - losses[1]) / 2e-5
            assert slope == pytest.approx(grad.view(-1)[i].item(), abs=1e-7)


@pytest.mark.parametrize("n_rows, fit, expected", [(37, 5, 5), (36, 35, 18), (1, 9, 1), (0, 3, 1)])
def test_chunks_are_even_and_fit(chunks_of, n_rows, fit, expected):
    chunks_of(fit)
    assert ce._chunk_rows(n_rows, V, torch.float32) == expected


def test_a_row_larger_than_a_chunk(monkeypatch):
    monkeypatch.setattr(ce, "CHUNK_BYTES", 1)
    assert ce._chunk_rows(10, V, torch.float32) == 1


def test_no_tensor_holds_more_logits_than_a_chunk(chunks_of):
    """The largest intermediate, seen from below the operators."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and V in result.shape and D not in result.shape:
                Largest.elements = max(Largest.elements, result.numel())
            return result

    chunks_of(5)
    inputs = make()
    with Largest():
        run(linear_cross_entropy, *inputs)
    assert Largest.elements == 5 * V


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_all_ignored(chunks_of, z_loss):
    chunks_of(5)
    hidden, weight, targets = make()
    loss, dhidden, dweight = run(
        linear_cross_entropy, hidden, weight, torch.full_like(targets, -100), z_loss=z_loss
    )
    assert loss == 0 and not dhidden.any() and not dweight.any()


@pytest.mark.parametrize("n", [0, 1])
def test_few_tokens(n):
    inputs = make(n=n, ignored=0)
    torch.testing.assert_close(
        run(linear_cross_entropy, *inputs), run(linear_cross_entropy_ref, *inputs)
    )


def test_another_ignore_index_and_int32():
    hidden, weight, targets = make()
    moved = targets.where(targets != -100, 7).int()
    got = run(linear_cross_entropy, hidden, weight, moved, ignore_index=7)
    expected = run(linear_cross_entropy_ref, hidden, weight, moved, ignore_index=7)
    torch.testing.assert_close(got, expected)
    assert not got[1][targets == -100].any() and got[1][moved != 7].any(-1).all()


def test_large_logits_stay_finite():
    hidden, weight, targets = make()
    big = [(hidden * 100).detach().requires_grad_(), weight]
    got = run(linear_cross_entropy, *big, targets, z_loss=1e-3)
    expected = run(linear_cross_entropy_ref, *big, targets, z_loss=1e-3)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)  # logits of 500 have 3e-5
    assert all(x.isfinite().all() for x in got)


def test_strided_hidden():
    _, weight, targets = make()
    hidden_DN = torch.randn(D, N).requires_grad_()
    got = run(lambda h, *args: linear_cross_entropy(h.T, *args), hidden_DN, weight, targets)
    expected = run(
        lambda h, *args: linear_cross_entropy_ref(h.T, *args), hidden_DN, weight, targets
    )
    torch.testing.assert_close(got, expected)


def test_micro_batches_add_up():
    """Micro-batches of 1 and 9 valid tokens, each over the 10 of both, equal the merged batch."""
    hidden, weight, targets = make(n=20, ignored=0)
    targets[1:10] = -100
    targets[19] = -100
    merged = run(linear_cross_entropy, hidden, weight, targets, factor=1 / 10)
    mean = F.cross_entropy(hidden @ weight.T, targets)  # torch's own mean over valid tokens
    torch.testing.assert_close(merged[0] / 10, mean.detach())
    torch.testing.assert_close(merged[1:], torch.autograd.grad(mean, [hidden, weight]))
    (loss1, dh1, dw1), (loss9, dh9, dw9) = (
        run(linear_cross_entropy, hidden.detach()[rows].requires_grad_(), weight, targets[rows],
            factor=1 / 10)
        for rows in (slice(0, 10), slice(10, 20))
    )  # fmt: skip
    torch.testing.assert_close((loss1 + loss9, torch.cat([dh1, dh9]), dw1 + dw9), merged)


def assert_no_worse_than_eager(hidden, weight, targets, floor, **options):
    """err(kernel, exact) <= 2 * err(eager bf16, exact) + floor: loss and both gradients."""

    def eager(hidden, weight, targets, z_loss=0.0):
        logits = (hidden @ weight.T).float()
        z = logits.logsumexp(-1)[targets != -100].square().sum()
        return F.cross_entropy(logits, targets, reduction="sum") + z_loss * z

    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    factor = 1 / max(1, (targets != -100).sum().item())
    exact = run(linear_cross_entropy_ref, *wide, targets, factor=factor, **options)
    got = run(linear_cross_entropy, hidden, weight, targets, factor=factor, **options)
    yardstick = run(eager, hidden, weight, targets, factor=factor, **options)
    for name, g, y, e in zip(["loss", "dhidden", "dweight"], got, yardstick, exact):
        err, limit = ((x.double() - e).norm() / e.norm() for x in (g, y))
        assert err <= 2 * limit + floor, f"{name}: {err} against {limit} of eager"


@pytest.mark.parametrize("rows", [3, 1000])
def test_bf16_is_no_worse_than_eager(chunks_of, rows):
    chunks_of(rows)
    assert_no_worse_than_eager(*make(dtype=torch.bfloat16), floor=1e-4, z_loss=1e-3)


def assert_fp32_weight_gradient(hidden, weight, targets):
    weight.main_grad = torch.full_like(weight, 1.0, dtype=torch.float32)
    (0.5 * linear_cross_entropy(hidden, weight, targets)).backward()
    assert weight.grad is None and hidden.grad.dtype == torch.bfloat16
    got = 2 * (weight.main_grad - 1)  # added to what was there, scaled by the loss's gradient
    assert not torch.equal(got, got.bfloat16().float())  # rounded nowhere
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact, eager = (run(linear_cross_entropy_ref, *x, targets)[2] for x in (wide, (hidden, weight)))
    error, limit = ((x - exact).norm() / exact.norm() for x in (got, eager.double()))
    assert error < max(3e-3, 1.1 * limit)  # eager bf16 logits, where those are rounded too


def test_weight_gradient_is_summed_in_fp32(chunks_of):
    """300 chunks of one row: a bf16 sum would lose the small shares."""
    chunks_of(1)
    assert_fp32_weight_gradient(*make(n=300, dtype=torch.bfloat16))


def test_gradient_dtypes():
    """Those of the inputs, also for a weight that is not a leaf; hidden may be wider."""
    hidden, weight, targets = make(dtype=torch.bfloat16)
    got = run(linear_cross_entropy, hidden, weight, targets)
    assert [x.dtype for x in got] == [torch.float32, torch.bfloat16, torch.bfloat16]
    inner = (hidden.float(), weight * 1)
    got = run(linear_cross_entropy, *inner, targets)
    assert [x.dtype for x in got] == [torch.float32, torch.float32, torch.bfloat16]


def test_only_what_is_wanted(monkeypatch):
    hidden, weight, targets = make()
    expected = run(linear_cross_entropy_ref, hidden, weight, targets)
    for i, inputs in enumerate([(hidden, weight.detach()), (hidden.detach(), weight)]):
        (grad,) = torch.autograd.grad(linear_cross_entropy(*inputs, targets), inputs[i])
        torch.testing.assert_close(grad, expected[1 + i])

    def refuse(*args):
        raise AssertionError("gradients are made though nobody wants them")

    monkeypatch.setattr(torch.Tensor, "scatter_add_", refuse)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets, z_loss=0.02)
    torch.testing.assert_close(
        loss, linear_cross_entropy_ref(hidden, weight, targets, z_loss=0.02).detach()
    )
    assert not linear_cross_entropy(hidden.detach(), weight.detach(), targets).requires_grad
    with pytest.raises(AssertionError, match="nobody"):
        linear_cross_entropy(hidden, weight, targets)


def test_second_backward_is_refused():
    hidden, weight, targets = make()
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "change, word",
    [
        (dict(hidden_ND=torch.zeros(3, D + 1)), "hidden"),
        (dict(hidden_ND=torch.zeros(1, 3, D)), "hidden"),
        (dict(targets_N=torch.zeros(4, dtype=torch.long)), r"\(3,\)"),
        (dict(targets_N=torch.zeros(3)), "float32"),
        (dict(weight_VD=torch.zeros(V, D, dtype=torch.int32)), "int32"),
        (dict(grad=torch.ones(1)), r"scalar tensor.*\(1,\)"),
        (dict(grad=torch.ones(()), weight_VD=torch.zeros(V, D).half()), "not float16"),
    ],
)
def test_mistakes_are_named(change, word):
    good = dict(
        hidden_ND=torch.zeros(3, D), weight_VD=torch.zeros(V, D),
        targets_N=torch.zeros(3, dtype=torch.long),
    )  # fmt: skip
    with pytest.raises(ValueError, match=word):
        linear_cross_entropy(**{**good, **change})


# ------------------------------------------------------------------ the gradient known before


@pytest.mark.parametrize("rows", [5, 1000])
def test_announced_gradient_goes_to_main_grad_in_the_forward(chunks_of, rows):
    chunks_of(rows, 8)
    hidden, weight, targets = make(dtype=torch.float64)
    expected = run(linear_cross_entropy_ref, hidden, weight, targets, factor=0.25, z_loss=0.03)
    grad = torch.tensor(0.25, dtype=torch.float64)
    weight.main_grad = torch.full_like(weight, 2.0)
    main_grad = weight.main_grad.detach()
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, targets, z_loss=0.03, grad=grad)
    assert (main_grad == 2).all()
    loss = linear_cross_entropy(hidden, weight, targets, z_loss=0.03, grad=grad)
    torch.testing.assert_close(loss.detach(), expected[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(main_grad - 2, expected[2], rtol=1e-12, atol=1e-12)
    before = main_grad.clone()
    loss.backward(grad)
    torch.testing.assert_close(hidden.grad, expected[1], rtol=1e-12, atol=1e-14)
    assert weight.grad is None and torch.equal(main_grad, before)


def test_announced_gradient_without_main_grad():
    hidden, weight, targets = make()
    expected = run(linear_cross_entropy_ref, hidden, weight, targets, factor=0.25)
    loss = linear_cross_entropy(hidden, weight, targets, grad=torch.tensor(0.25))
    got = torch.autograd.grad(loss * 0.25, [hidden, weight])
    torch.testing.assert_close(got, expected[1:])


def test_announced_gradient_of_frozen_weight_and_of_hidden_that_wants_none():
    hidden, weight, targets = make()
    grad = torch.tensor(0.5)
    expected = run(linear_cross_entropy_ref, hidden, weight, targets, factor=0.5)
    weight.main_grad = torch.zeros_like(weight)
    linear_cross_entropy(hidden.detach(), weight, targets, grad=grad).backward(grad)
    torch.testing.assert_close(weight.main_grad.detach(), expected[2])
    frozen = weight.detach().clone()
    frozen.main_grad = torch.zeros_like(frozen)
    linear_cross_entropy(hidden, frozen, targets, grad=grad).backward(grad)
    torch.testing.assert_close(hidden.grad, expected[1])
    assert not frozen.main_grad.any()


def test_another_gradient_than_announced_is_noticed():
    hidden, weight, targets = make()
    for wrong in (0.5, float("nan")):
        loss = linear_cross_entropy(hidden, weight, targets, grad=torch.tensor(0.25))
        with pytest.raises(RuntimeError, match="not the `grad` that was announced"):
            loss.backward(torch.tensor(wrong))
    loss = linear_cross_entropy(hidden, weight, targets, grad=torch.tensor(0.25))
    loss.backward(torch.tensor(0.25), retain_graph=True)
    with pytest.raises(AssertionError, match="second backward"):
        loss.backward(torch.tensor(0.25))


# ------------------------------------------------------------------ the kernel


@pytest.fixture
def kernel(monkeypatch):
    """The CUDA path, with blocks of 2 x 16 logits: interpreted where there is no GPU."""
    monkeypatch.setattr(ce, "_use_kernel", lambda weight: weight.dtype != torch.float64)
    for name, value in dict(ROWS=2, LANES=16, WARPS=1).items():
        monkeypatch.setattr(ce, name, value)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.triton
@pytest.mark.parametrize("z_loss", [0.0, 0.03])
@pytest.mark.parametrize("width", [1, 5, 32, 33, 64, 257])
def test_kernel_equals_reference(kernel, width, z_loss):
    """Less than a block, whole blocks and a ragged end; the first target and the last."""
    logits = 5 * torch.randn(7, width, device=DEVICE)
    logits[2] -= 200  # a row far below zero
    targets = torch.randint(0, width, (7,), device=DEVICE)
    targets[:3] = torch.tensor([0, width - 1, -100])
    grad = torch.tensor(0.3, device=DEVICE)
    results = []
    for function in (ce._softmax_ref, ce._softmax):
        losses = torch.full((7,), float("nan"), device=DEVICE)
        own = logits.clone()
        function(own, targets.int(), losses, None, -100, z_loss)
        assert torch.equal(own, logits)
        without = losses.clone()
        function(own, targets, losses.fill_(float("nan")), grad, -100, z_loss)
        torch.testing.assert_close(losses, without, rtol=1e-6, atol=1e-6)
        results.append((losses, own))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    assert not results[1][1][2].any() and results[1][0][2] == 0


@pytest.mark.triton
def test_kernel_rounds_bf16_once(kernel):
    """bf16 logits: every dlogit is the exact one of these logits, rounded to nearest."""
    logits = (4 * torch.randn(5, 100, device=DEVICE)).bfloat16()
    targets = torch.randint(0, 100, (5,), device=DEVICE)
    grad, losses = torch.tensor(0.01, device=DEVICE), torch.empty(5, device=DEVICE)
    wide = logits.double()
    ce._softmax_ref(wide, targets, losses.double(), grad.double(), -100, 0.0)
    ce._softmax(logits, targets, losses, grad, -100, 0.0)
    error = (logits.double() - wide).abs()
    assert (
        error <= 1.01 * 2**-8 * wide.abs() + 1e-12
    ).all()  # half an ulp, and the fp32 arithmetic
    assert ((logits.double() - wide) / wide).abs().mean() < 2**-9


@pytest.mark.triton
def test_kernel_shows_targets_and_logits_that_cannot_be(kernel):
    for row, column, value in ((0, 3, float("nan")), (1, 40, float("inf")), (2, None, None)):
        logits, targets = torch.randn(4, 50, device=DEVICE), torch.arange(4, device=DEVICE)
        if column is None:
            targets[row] = 50
        else:
            logits[row, column] = value
        losses = torch.empty(4, device=DEVICE)
        ce._softmax(logits, targets, losses, torch.tensor(1.0, device=DEVICE), -100, 0.0)
        assert losses.isnan().tolist() == [i == row for i in range(4)]


@pytest.mark.triton
@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
@pytest.mark.parametrize("rows", [3, 1000])
def test_kernel_path_is_no_worse_than_eager(kernel, chunks_of, rows, z_loss):
    chunks_of(rows, 2)
    inputs = make(dtype=torch.bfloat16, device=DEVICE)
    assert_no_worse_than_eager(*inputs, floor=1e-4, z_loss=z_loss)


@pytest.mark.triton
def test_kernel_path_in_fp32(kernel, chunks_of):
    """With an announced gradient, int32 targets, and without gradients at all."""
    chunks_of(5)
    hidden, weight, targets = make(device=DEVICE)
    expected = run(linear_cross_entropy_ref, hidden, weight, targets, factor=0.25)
    weight.main_grad, grad = torch.zeros_like(weight), torch.tensor(0.25, device=DEVICE)
    linear_cross_entropy(hidden, weight, targets.int(), grad=grad).backward(grad)
    got = hidden.grad, weight.main_grad.detach()
    torch.testing.assert_close(got, expected[1:], rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(loss, expected[0])


# ------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("z_loss", [0.0, 1e-4])
@pytest.mark.parametrize("megabytes", [8, 128])
def test_gpu(monkeypatch, megabytes, z_loss):
    monkeypatch.setattr(ce, "CHUNK_BYTES", megabytes * 2**20)
    inputs = make(n=512, d=256, vocab=32000, dtype=torch.bfloat16, ignored=50, device="cuda")
    assert_no_worse_than_eager(*inputs, floor=1e-3, z_loss=z_loss)


@pytest.mark.gpu
def test_gpu_weight_gradient_is_summed_in_fp32(monkeypatch):
    monkeypatch.setattr(ce, "CHUNK_BYTES", 2**20)  # 8 rows a chunk
    inputs = make(n=512, d=256, vocab=32000, dtype=torch.bfloat16, device="cuda")
    assert_fp32_weight_gradient(*inputs)


@pytest.mark.gpu
def test_gpu_memory():
    """Peak beyond inputs and gradients: a few chunks, far below the full logits."""
    hidden, weight, targets = make(n=131072, d=64, vocab=32000, dtype=torch.bfloat16, device="cuda")
    linear_cross_entropy(hidden[:64], weight, targets[:64]).backward()  # library workspaces
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(hidden, weight, targets).backward()
    extra = torch.cuda.max_memory_allocated() - before
    grads = 4 * weight.numel() + 2 * hidden.numel() + 2 * weight.numel()
    assert extra - grads < 4 * ce.CHUNK_BYTES < 131072 * 32000 * 4 / 3
