"""Threads that compute on one core leave every other thread's setting alone."""

from __future__ import annotations

import threading

import torch
from torch import nn

from envgrad.cores import SMALL_BYTES, compute_alone, is_small
from envgrad.sampling.local import LocalSampler
from helpers.models import tiny_llama


def threads_in_a_new_thread(first: bool) -> int:
    found: list[int] = []

    def look() -> None:
        if first:
            compute_alone()
        found.append(torch.get_num_threads())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


def test_only_the_thread_that_asks_computes_alone():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert threads_in_a_new_thread(first=True) == 1
        assert threads_in_a_new_thread(first=False) == 3, "those to come begin with what was set"
        assert torch.get_num_threads() == 3
        many = [threading.Thread(target=compute_alone) for _ in range(8)]
        for one in many:
            one.start()
        for one in many:
            one.join()
        assert threads_in_a_new_thread(first=False) == 3 and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_small_is_by_bytes_and_on_a_cpu():
    assert is_small([nn.Parameter(torch.empty(SMALL_BYTES // 4))])
    assert not is_small([nn.Parameter(torch.empty(SMALL_BYTES // 4 + 1))])
    assert is_small([nn.Parameter(torch.empty(SMALL_BYTES // 4 + 1, dtype=torch.bfloat16))])
    assert not is_small([nn.Parameter(torch.empty(1, device="meta"))])


def test_a_sampler_computes_alone_where_its_model_is_small(monkeypatch):
    for small, threads, alone in ((True, None, True), (False, None, False), (True, 2, False), (False, 1, True)):
        monkeypatch.setattr("envgrad.sampling.local.is_small", lambda _, small=small: small)
        asked: list[str] = []
        monkeypatch.setattr(
            "envgrad.sampling.local.compute_alone", lambda asked=asked: asked.append(threading.current_thread().name)
        )
        sampler = LocalSampler(tiny_llama(), max_sessions=1, max_context=32, threads=threads)
        sampler.close()
        assert asked == (["envgrad-sampler"] if alone else [])
