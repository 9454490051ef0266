"""Context parallelism of attention: who holds which tokens, and how keys and values travel.

A sequence of T tokens is cut into 2·cp equal blocks of L tokens; rank r holds blocks r and
2·cp - 1 - r, in that order ("zigzag": under a causal mask every rank has the same work). Then no
pair of ranks needs a mask, except the causal one of a rank's own tokens, which are in order:

    from a source s < r   all of r's queries see the first half of s's keys, nothing of the second
    from a source s > r   the second half of r's queries sees all of s's keys, the first half none

Without a window there are cp - 1 hops. In hop h a rank gets the keys and values of rank r - h,
while it computes with those of hop h - 1, and only the half that it sees; the partial results
join by their log-sum-exp. A block's backward takes the joined out and lse; its dk and dv go back
to their owner behind the keys of the next hop. (Handing all keys on from neighbour to neighbour
would move a third more, and gradients in fp32 through every rank.)

With a window of W keys a rank gets only the halo, the W - 1 keys before each of its blocks, by
one all-to-all, and sends the halo's gradients back by another.

`block` is what computes, for queries and keys at given places of the sequence:
    block.forward(q, k, v, places) -> out, lse
    block.backward(dout, q, k, v, out, lse, places) -> dq, dk, dv
lse is -inf and out 0 for a query that sees nothing. k and v travel as rows (tokens, B, Hkv, Dqk +
Dv): a range of tokens is then one piece of memory. Saved for the backward: only local tensors.
What travels may be less than what is computed with: `block` can expand it (kernels/latent.py).
"""

from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist

# ------------------------------------------------------------------ who holds what


def zigzag(T, cp, rank):
    """Positions in a sequence of T tokens that `rank` holds, in its order: int64 (T // cp,).

    Raises ValueError where T is no multiple of 2·cp. Llama 3 (arXiv 2407.21783), sec. 3.3.2.
    """
    if T % (2 * cp):
        raise ValueError(f"{T} tokens do not make 2·cp = {2 * cp} equal blocks: use a multiple")
    return positions(held(T // (2 * cp), cp, rank))


class Places(NamedTuple):
    """Where some queries and some keys lie: the spans (start, end) of each, in order."""

    queries: tuple
    keys: tuple

    @property
    def causal(self):
        """Whether some key lies after some query. The last key is then the last query's own."""
        return self.keys[-1][1] > self.queries[0][0]


def held(L, cp, rank):
    """The spans (start, end) that `rank` holds, of blocks of L tokens."""
    return tuple((block * L, block * L + L) for block in (rank, 2 * cp - 1 - rank))


def positions(spans, device=None):
    """The positions in `spans`, in order: int64."""
    return torch.cat([torch.arange(start, end, device=device) for start, end in spans])


def size(spans):
    """How many tokens lie in `spans`."""
    return sum(end - start for start, end in spans)


def before(position, spans):
    """How many tokens of `spans` lie before `position`, an int or a tensor of ints."""
    if isinstance(position, int):
        return sum(min(max(position - start, 0), end - start) for start, end in spans)
    return sum((position - start).clamp(0, end - start) for start, end in spans)


def lengths(cu_seqlens, T, spans):
    """cu_seqlens (n + 1,) of sequences of T tokens -> the same for their tokens in `spans`.

    A document keeps its place, empty or not, and its tokens in `spans` lie together.
    """
    return cu_seqlens // T * size(spans) + before(cu_seqlens % T, spans)


@cache
def wanted(L, cp, rank, window):
    """Spans of the keys that `rank` sees but does not hold, ascending: at most one a block."""
    mine, spans = held(L, cp, rank), []
    for start in range(0, 2 * cp * L, L):
        later = [s for s, _ in mine if s > start]  # of the rank's blocks that look back here
        first = max(start, min(later) - window + 1) if later else start + L
        if first < start + L and (start, start + L) not in mine:
            spans.append((first, start + L))
    return tuple(spans)


def _held_of(spans, L, cp, rank):
    """Those of `spans`, none of which crosses a block, that `rank` holds."""
    return [s for s in spans if s[0] // L in (rank, 2 * cp - 1 - rank)]


# ------------------------------------------------------------------ rows that travel


def pack(k, v):
    """k (B, Hkv, T, Dqk) and v (B, Hkv, T, Dv) -> rows (T, B, Hkv, Dqk + Dv), contiguous."""
    B, H, T, width = k.shape
    rows = k.new_empty(T, B, H, width + v.shape[-1])
    rows[..., :width] = k.permute(2, 0, 1, 3)
    rows[..., width:] = v.permute(2, 0, 1, 3)
    return rows


def unpack(rows, width):
    """The inverse of `pack`, as views; `width` is Dqk."""
    rows = rows.permute(1, 2, 0, 3)
    return rows[..., :width], rows[..., width:]


class Arrival(NamedTuple):
    """Rows under way to this rank, and those under way from it, which must live until then."""

    rows: torch.Tensor
    works: list
    sent: torch.Tensor

    def wait(self):
        for work in self.works:
            work.wait()
        return self.rows


def _swap(sent, to, count, source, group):
    """Start sending rows to rank `to` of the group and receiving `count` rows from `source`.

    Send and receive are posted as one batch: their order between two ranks cannot differ.
    """
    rows = sent.new_empty(count, *sent.shape[1:])
    send = dist.P2POp(dist.isend, sent, group=group, group_peer=to)
    receive = dist.P2POp(dist.irecv, rows, group=group, group_peer=source)
    return Arrival(rows, dist.batch_isend_irecv([send, receive]), sent)


def _seen(rank, source, L):
    """How many rows of `source`, from its first, the queries of `rank` see."""
    return L if source < rank else 2 * L


def _send_keys(rows, hop, group):
    """Start hop `hop`: own rows to the rank `hop` places on, as many as it sees."""
    cp, rank, L = group.size(), group.rank(), rows.shape[0] // 2
    to, source = (rank + hop) % cp, (rank - hop) % cp
    return _swap(rows[: _seen(to, rank, L)], to, _seen(rank, source, L), source, group)


def _send_home(grads, hop, group, L):
    """Start the way back of hop `hop`: gradients of what came, for those of what was sent."""
    cp, rank = group.size(), group.rank()
    to, source = (rank - hop) % cp, (rank + hop) % cp
    return _swap(grads, to, _seen(source, rank, L), source, group)


# ------------------------------------------------------------------ without a window


def _pair(hop, group, L):
    """The queries and keys that meet in hop `hop`; the queries are the last local ones."""
    cp, rank = group.size(), group.rank()
    source = (rank - hop) % cp
    mine, theirs = held(L, cp, rank), held(L, cp, source)
    return Places(mine[1:] if source > rank else mine, theirs[:1] if source < rank else theirs)


def merge(out, lse, part, lse_part):
    """Join a partial result to out (B, H, T, Dv) and lse (B, H, T), in place.

    out = sum_i exp(lse_i - lse) out_i, lse = log(sum_i exp(lse_i)). Blockwise attention (arXiv
    2305.19370), sec. 3.
    """
    both = torch.logaddexp(lse, lse_part)
    out.mul_((lse - both).exp().unsqueeze(-1)).add_(part * (lse_part - both).exp().unsqueeze(-1))
    lse.copy_(both)


def _hops_forward(block, q, k, v, group):
    rows, T = pack(k, v), q.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    arriving = _send_keys(rows, 1, group)
    out, lse = block.forward(q, k, v, _pair(0, group, T // 2))
    out, lse = out.to(wide), lse.contiguous()
    for hop in range(1, group.size()):
        k, v = unpack(arriving.wait(), k.shape[-1])
        if hop + 1 < group.size():
            arriving = _send_keys(rows, hop + 1, group)
        places = _pair(hop, group, T // 2)
        first = T - size(places.queries)
        part = block.forward(q[:, :, first:], k, v, places)
        merge(out[:, :, first:], lse[:, :, first:], *part)
    return out, lse


def _hops_backward(block, dout, q, k, v, out, lse, group):
    rows, T = pack(k, v), q.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    arriving, returning = _send_keys(rows, 1, group), None
    dq, dk, dv = block.backward(dout, q, k, v, out, lse, _pair(0, group, T // 2))
    dq, drows = dq.to(wide), pack(dk, dv).to(wide)
    for hop in range(1, group.size()):
        k, v = unpack(arriving.wait(), k.shape[-1])
        if hop + 1 < group.size():
            arriving = _send_keys(rows, hop + 1, group)
        places = _pair(hop, group, T // 2)
        first = T - size(places.queries)
        local = [x[:, :, first:] for x in (dout, q, out, lse)]
        part, dk, dv = block.backward(*local[:2], k, v, *local[2:], places)
        dq[:, :, first:] += part
        if returning is not None:
            drows[: len(returning.rows)] += returning.wait()
        returning = _send_home(pack(dk, dv), hop, group, T // 2)
    drows[: len(returning.rows)] += returning.wait()
    return dq, *unpack(drows, k.shape[-1])


# ------------------------------------------------------------------ with a window


class Halo:
    """The keys that a rank's queries see through a window: where they lie and who holds them."""

    def __init__(self, L, window, group):
        cp, rank = group.size(), group.rank()
        self.group, self.blocks = group, held(L, cp, rank)
        lack = wanted(L, cp, rank, window)
        self.spans = tuple(sorted(self.blocks + lack))
        self.get = [_held_of(lack, L, cp, source) for source in range(cp)]
        self.give = [_held_of(wanted(L, cp, to, window), L, cp, rank) for to in range(cp)]
        self.views = [Places(((a, b),), ((max(0, a - window + 1), b),)) for a, b in self.blocks]

    @staticmethod
    def take(rows, spans, within):
        """The slices of `rows`, which lie at the spans `within`, that lie at `spans`."""
        return [rows[before(start, within) : before(end, within)] for start, end in spans]

    def exchange(self, rows, give, get):
        """All-to-all: the slices give[r] of rows to rank r, for the size of get[r] from it."""
        sent = torch.cat([rows[:0], *(piece for pieces in give for piece in pieces)])
        came = rows.new_empty(sum(map(size, get)), *rows.shape[1:])
        counts = [sum(map(len, pieces)) for pieces in give]
        dist.all_to_all_single(came, sent, [size(s) for s in get], counts, group=self.group)
        return came.split([end - start for spans in get for start, end in spans])

    def gather(self, rows):
        """Local rows -> the rows of all `spans`."""
        give = [self.take(rows, spans, self.blocks) for spans in self.give]
        came = self.exchange(rows, give, self.get)
        lie_at = [*self.blocks, *(span for spans in self.get for span in spans)]
        pieces = dict(zip(lie_at, [*self.take(rows, self.blocks, self.blocks), *came]))
        return torch.cat([pieces[span] for span in self.spans])

    def scatter(self, grads):
        """Gradients of the rows of all `spans` -> of the local rows, those of others included."""
        give = [self.take(grads, spans, self.spans) for spans in self.get]
        came = self.exchange(grads, give, self.give)
        local = torch.cat(self.take(grads, self.blocks, self.spans))
        for piece, span in zip(came, [span for spans in self.give for span in spans]):
            self.take(local, [span], self.blocks)[0].add_(piece)
        return local


def _window_forward(block, q, k, v, window, group):
    L, width = q.shape[2] // 2, k.shape[-1]
    halo = Halo(L, window, group)
    rows = halo.gather(pack(k, v))
    parts = []
    for half, places in zip(q.split(L, dim=2), halo.views):
        (seen,) = halo.take(rows, places.keys, halo.spans)
        parts.append(block.forward(half, *unpack(seen, width), places))
    return tuple(torch.cat(halves, dim=2) for halves in zip(*parts))


def _window_backward(block, dout, q, k, v, out, lse, window, group):
    L, width = q.shape[2] // 2, k.shape[-1]
    halo = Halo(L, window, group)
    rows = halo.gather(pack(k, v))
    drows = torch.zeros_like(rows, dtype=torch.promote_types(q.dtype, torch.float32))
    dq = []
    for i, places in enumerate(halo.views):
        dout_i, q_i, out_i, lse_i = (x.split(L, dim=2)[i] for x in (dout, q, out, lse))
        seen, dseen = (halo.take(x, places.keys, halo.spans)[0] for x in (rows, drows))
        k, v = unpack(seen, width)
        part, dk, dv = block.backward(dout_i, q_i, k, v, out_i, lse_i, places)
        dq.append(part)
        dseen += pack(dk, dv)
    return torch.cat(dq, dim=2), *unpack(halo.scatter(drows), width)


# ------------------------------------------------------------------ public


def forward(block, q, k, v, window, group):
    """out (B, H, T, Dv), lse (B, H, T) of the local queries, in the dtypes that block returns
    or wider. window: keys that a query sees, itself included (None: all before it)."""
    if window is None:
        return _hops_forward(block, q, k, v, group)
    return _window_forward(block, q, k, v, window, group)


def backward(block, dout, q, k, v, out, lse, window, group):
    """dq, dk, dv of the local q, k, v, likewise; out and lse are the joined ones."""
    if window is None:
        return _hops_backward(block, dout, q, k, v, out, lse, group)
    return _window_backward(block, dout, q, k, v, out, lse, window, group)
