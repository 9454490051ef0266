"""The router's scores and their gradients: bf16 operands on the matrix units, as exact as fp32."""

import pytest
import torch

from kernels.router import router_logits, router_logits_ref, split
from tests.oracle import relative


def test_two_bf16_numbers_make_an_fp32_one():
    g = torch.randn(10_000) * torch.logspace(-20, 10, 10_000)
    high, low = split(g)
    assert ((high.double() + low.double() - g.double()).abs() <= 2**-16 * g.double().abs()).all()
    assert not torch.equal(high.float(), g)  # one number would not do


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_accumulates_in_fp32_at_least(dtype):
    x, weight = torch.randn(5, 16).to(dtype), torch.randn(3, 16).to(dtype)
    logits = router_logits(x, weight)
    assert logits.dtype == torch.promote_types(dtype, torch.float32)
    assert relative(logits, x.double() @ weight.double().T) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("N,D,E", [(4096, 2048, 128), (1, 2048, 64), (77, 2880, 32)])
def test_gpu_within_the_error_of_fp32(N, D, E):
    x = torch.randn(N, D, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(E, D, device="cuda") / D**0.5).bfloat16().requires_grad_()
    grad = torch.randn(N, E, device="cuda")
    results = []
    for function, dtype in [(router_logits, None), (router_logits_ref, torch.float64)]:
        a, b = (t.detach().to(dtype or t.dtype).requires_grad_() for t in (x, weight))
        logits = function(a, b)
        results.append(
            [logits.detach(), *torch.autograd.grad(logits, [a, b], grad.to(logits.dtype))]
        )
    (logits, dx, dw), (logits_64, dx_64, dw_64) = results
    assert relative(logits, logits_64) < 4 * D**0.5 * 2**-24  # of sums in fp32; bf16's is 4e-3
    assert relative(dx, dx_64) < 2e-3 and relative(dw, dw_64) < 2e-3  # rounded to bf16 at the end
    rounded = relative(dx_64.bfloat16(), dx_64)
    assert relative(dx, dx_64) < 1.05 * rounded + 1e-5
    compiled = torch.compile(router_logits, fullgraph=True)(x, weight)
    assert torch.equal(compiled.detach(), logits)
