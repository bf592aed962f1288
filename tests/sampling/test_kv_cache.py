from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from envgrad.attention import AttentionCall
from envgrad.sampling.decode_layout import DecodeLayout
from envgrad.sampling.kv_cache import KVCache, StepRow
from envgrad.sampling.requests import SharedPrefix

CPU = torch.device("cpu")


def plain(query: Tensor, key: Tensor, value: Tensor, window: int | None, scaling: float) -> Tensor:
    """Attention of one row's every token, (Hq, n, D) over (Hkv, n, D), in float64 -> (n, Hq, D)."""
    groups = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(groups, 0).double(), value.repeat_interleave(groups, 0).double()
    scores = query.double() @ key.transpose(1, 2) * scaling
    place = torch.arange(query.shape[1])
    hidden = place[None, :] > place[:, None]
    if window is not None:
        hidden |= place[None, :] <= place[:, None] - window
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize(("heads", "kv_heads", "value_dim"), [(4, 2, 8), (2, 2, 8), (4, 1, 6)])
def test_random_schedules_equal_plain_attention(window: int | None, heads: int, kv_heads: int, value_dim: int) -> None:
    """Rows grow in random pieces, in random slots, with holes, resizing and copies in between."""
    chance = random.Random(heads * 10 + kv_heads)
    torch.manual_seed(0)
    lengths = [random.Random(index).randint(3, 40) for index in range(7)]
    query = [torch.randn(heads, length, 8) for length in lengths]
    key = [torch.randn(kv_heads, length, 8) for length in lengths]
    value = [torch.randn(kv_heads, length, value_dim) for length in lengths]
    got: list[list[Tensor]] = [[] for _ in lengths]
    cache = KVCache()
    cache.resize(9, 16)
    slots = chance.sample(range(9), 7)
    done = [0] * 7
    call = AttentionCall(layer=3, scaling=0.4, dropout=0.0, window=window)
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        open_rows = [index for index in range(7) if done[index] < lengths[index]]
        chosen = chance.sample(open_rows, chance.randint(1, len(open_rows)))
        sizes = [min(lengths[i] - done[i], chance.choice([1, 1, 1, 2, 3, 8, 20])) for i in chosen]
        need = max(done[i] + size for i, size in zip(chosen, sizes, strict=True))
        if need > cache.length:
            order = chance.sample(range(9), 9)
            cache.resize(9, need + 3, keep=order)
            slots = [order.index(slot) for slot in slots]
        rows = [StepRow(slots[i], done[i], size) for i, size in zip(chosen, sizes, strict=True)]
        layout = DecodeLayout(cache, rows, CPU)
        parts = [(i, slice(done[i], done[i] + size)) for i, size in zip(chosen, sizes, strict=True)]
        out = layout.attend(
            call,
            torch.cat([query[i][:, part] for i, part in parts], 1).unsqueeze(0),
            torch.cat([key[i][:, part] for i, part in parts], 1).unsqueeze(0),
            torch.cat([value[i][:, part] for i, part in parts], 1).unsqueeze(0),
        )
        assert layout.positions.tolist() == [at for _, part in parts for at in range(part.start, part.stop)]
        assert layout.layers_seen == {3}
        for (i, part), piece in zip(parts, torch.split(out[0], sizes), strict=True):
            got[i].append(piece)
            done[i] = part.stop
    for i in range(7):
        want = plain(query[i], key[i], value[i], window, 0.4)
        assert torch.allclose(torch.cat(got[i]).double(), want, atol=1e-5)


def test_a_decoding_layout_advances_as_if_built_anew() -> None:
    torch.manual_seed(0)
    caches = [KVCache(), KVCache()]
    rows = [StepRow(0, 4, 1), StepRow(2, 1, 1), StepRow(3, 6, 1)]
    call = AttentionCall(layer=0, scaling=None, dropout=0.0, window=4)
    for cache in caches:
        cache.resize(4, 12)
    past = torch.randn(1, 2, 12, 8)
    for cache in caches:
        first = DecodeLayout(cache, [StepRow(0, 0, 4), StepRow(2, 0, 1), StepRow(3, 0, 6)], CPU)
        first.attend(call, torch.zeros(1, 4, 11, 8), past[:, :, :11], past[:, :, :11])
        assert not first.followed_by(rows, [None] * 3)
    layout = DecodeLayout(caches[0], rows, CPU)
    for step in range(4):
        q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
        now = [StepRow(slot, start + step, 1) for slot, start, _ in rows]
        if step:
            assert layout.followed_by(now, [None] * 3) and not layout.followed_by(now[:2], [None] * 2)
            layout.advance()
        anew = DecodeLayout(caches[1], now, CPU)
        assert torch.equal(layout.positions, anew.positions)
        assert torch.equal(layout.attend(call, q, k, v), anew.attend(call, q, k, v))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 2), (4, 1)])
def test_siblings_that_attend_to_their_prompts_together_attend_as_each_alone(
    heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three families with prompts of different lengths, a row that shares nothing, and one that is still prefilling;
    slots with holes between them, gathered and in a span; the cache grows in the middle."""
    monkeypatch.setattr("envgrad.sampling.decode_layout._WORTH_SPLITTING", 1)
    torch.manual_seed(0)
    prompts = {1: 9, 2: 14, 3: 5}
    call = AttentionCall(layer=0, scaling=0.4, dropout=0.0, window=None)
    for slots in ([3, 4, 5, 7, 8, 9, 10, 12], [0, 31, 8, 3, 20, 9, 28, 1]):
        family = [1, 2, 1, 3, 3, 2, 2, 0]
        heads_of = {number: torch.randn(3, heads, length, 8) for number, length in prompts.items()}
        rows = [torch.cat((heads_of[one], torch.randn(3, heads, 8, 8)), 2) if one else torch.randn(3, heads, 20, 8)
                for one in family]  # fmt: skip
        start = [prompts[one] + index % 3 if one else 4 for index, one in enumerate(family)]
        cache = KVCache()
        cache.resize(32, 24)
        filled = [StepRow(slot, 0, at) for slot, at in zip(slots, start, strict=True)]
        q, k, v = (torch.cat([row[part, :, :at] for row, at in zip(rows, start, strict=True)], 1) for part in range(3))
        DecodeLayout(cache, filled, CPU).attend(call, q[None], k[None, :kv_heads], v[None, :kv_heads])
        shares = [SharedPrefix(one, prompts[one]) if one else None for one in family]
        layout: DecodeLayout | None = None
        for step in range(4):
            if step == 2:
                cache.resize(32, 40)
            now = [StepRow(slot, at + step, 1) for slot, at in zip(slots, start, strict=True)]
            if layout is not None and layout.followed_by(now, shares):
                layout.advance()
            else:
                assert layout is None
                layout = DecodeLayout(cache, now, CPU, shares)
            q, k, v = (
                torch.stack([row[part, :, at + step] for row, at in zip(rows, start, strict=True)], 1)
                for part in range(3)
            )
            out = layout.attend(call, q[None], k[None, :kv_heads], v[None, :kv_heads])
            halves = [bucket.shared for bucket in layout._buckets(True)]
            assert halves[0] is not None and [one.length for one in halves[0].prefixes] == [9, 14, 5]
            for index, row in enumerate(rows):
                seen = row[:, :, : start[index] + step + 1]
                want = plain(seen[0], seen[1, :kv_heads], seen[2, :kv_heads], None, 0.4)[-1]
                assert torch.allclose(out[0, index].double(), want, atol=1e-5)


def test_copied_rows_go_on_as_their_source() -> None:
    torch.manual_seed(0)
    cache = KVCache()
    cache.resize(4, 8)
    call = AttentionCall(layer=0, scaling=None, dropout=0.0, window=None)
    q, k, v = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
    DecodeLayout(cache, [StepRow(2, 0, 5)], CPU).attend(call, q, k, v)
    cache.copy(2, [0, 3], 5)
    q, k, v = (torch.randn(1, 2, 1, 4).expand(1, 2, 3, 4) for _ in range(3))
    out = DecodeLayout(cache, [StepRow(slot, 5, 1) for slot in (0, 2, 3)], CPU).attend(call, q, k, v)
    assert torch.equal(out[0, 0], out[0, 1]) and torch.equal(out[0, 0], out[0, 2])


def test_memory_is_counted_freed_and_reused() -> None:
    cache = KVCache()
    cache.resize(2, 8)
    call = AttentionCall(layer=0, scaling=None, dropout=0.0, window=None)
    one = torch.ones(1, 2, 3, 4)
    DecodeLayout(cache, [StepRow(0, 0, 3)], CPU).attend(call, one, one, one)
    assert cache.num_bytes == 2 * (2 * 2 * 8 * 4) * 4
    cache.drop()
    assert (cache.num_bytes, cache.slots, cache.length) == (0, 0, 0)
    for slots, length in ((1, 4), (3, 16)):
        cache.resize(slots, length)
        out = DecodeLayout(cache, [StepRow(0, 0, 3)], CPU).attend(call, one, one, 2 * one)
        assert torch.equal(out, torch.full((1, 3, 2, 4), 2.0))
        cache.drop()
