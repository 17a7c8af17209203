"""Bringing layers over: on the CPU the plain copy, whatever the thread. The streams are put to the test on GPUs."""

from __future__ import annotations

from threading import Thread

import torch

from blend.hf.transfer import Transfer


def test_on_a_cpu_it_copies_and_nothing_else():
    transfer = Transfer(torch.device("cpu"))
    source, target = torch.randn(2, 10, 4), torch.zeros(2, 20, 4)
    with transfer.filling(0):
        transfer.copy_(target[:, 5:10], source[:, 2:7])
    transfer.wait(0)
    transfer.close()
    assert torch.equal(target[:, 5:10], source[:, 2:7])
    assert not target[:, :5].any()
    assert not target[:, 10:].any()


def test_layers_filled_on_a_thread_are_there_when_waited_for():
    transfer = Transfer(torch.device("cpu"))
    layers, sources = torch.zeros(4, 2, 6, 4), torch.randn(4, 2, 6, 4, dtype=torch.float64)

    def fill():
        for index in range(4):
            with transfer.filling(index):
                transfer.copy_(layers[index], sources[index])  # and converts, as copy_ does

    thread = Thread(target=fill)
    thread.start()
    thread.join()
    for index in range(4):
        transfer.wait(index)
    assert torch.equal(layers, sources.float())


def test_waiting_for_a_layer_that_nobody_fills_on_a_stream_is_no_wait():
    Transfer(torch.device("cpu")).wait(7)
