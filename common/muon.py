"""Muon: an update along the nearest orthogonal matrix of the momentum.

    m = momentum · m + g          u = g + momentum · m          w -= lr · size · orthogonal(u)

Keller Jordan, https://kellerjordan.github.io/posts/muon; size as in Moonlight, arXiv 2502.16982.
It needs whole matrices, so it also says which ones a weight holds and who owns which.
"""

import math
from bisect import bisect_right

import torch
from torch import Tensor

MOMENTUM = 0.95


def split_matrices(name: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(count, rows, columns) of the equal matrices that a weight holds, one behind the other.

    A stack (E, D, F) holds E; a fused `gate_up` (E, 2F, D) or (2F, D) holds gate and up apart.
    """
    halves = 2 if "gate_up" in name else 1
    assert shape[-2] % halves == 0, f"{name} {shape} is not gate rows followed by up rows"
    return math.prod(shape[:-2]) * halves, shape[-2] // halves, shape[-1]


def deal(marks: list[int], owners: int) -> list[int]:
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
    momentum = g.add(m_NRC, alpha=MOMENTUM)
    m_NRC.copy_(momentum)
    update = newton_schulz(g.add_(momentum, alpha=MOMENTUM))
    size = 0.2 * math.sqrt(max(w_NRC.shape[-2:]))
    w_NRC.mul_(1 - lr * weight_decay).add_(update, alpha=-lr * size)
