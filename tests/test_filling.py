"""Layers that arrive while a pass runs: in order, waited for one by one, errors handed on."""

from __future__ import annotations

import threading

import pytest

from blend.filling import LayerFilling


def test_inline_fills_all_in_order():
    seen = []
    filling = LayerFilling(seen.append, 4)
    filling.run()
    assert seen == [0, 1, 2, 3]
    assert not filling.beside
    assert filling.waited == filling.busy > 0
    for index in range(4):
        filling.wait(index)
    filling.close()


def test_a_layer_is_waited_for_and_no_other():
    """Layer 0 can be used while layer 1 is still being read."""
    gate = threading.Event()
    seen = []

    def fill(index):
        if index == 1:
            assert gate.wait(60)
        seen.append(index)

    filling = LayerFilling(fill, 3)
    filling.start()
    filling.wait(0)
    assert seen == [0]
    threading.Timer(0.05, gate.set).start()
    filling.wait(2)
    assert seen == [0, 1, 2]
    assert filling.beside
    assert filling.waited > 0
    filling.close()


def test_what_goes_wrong_reaches_whoever_waits():
    def fill(index):
        if index == 2:
            raise ValueError("layer 2 is gone")

    filling = LayerFilling(fill, 5)
    filling.start()
    filling.wait(1)
    for index in (2, 4):
        with pytest.raises(ValueError, match="layer 2 is gone"):
            filling.wait(index)
    filling.wait(0)
    filling.close()


def test_what_goes_wrong_inline_is_raised_at_once():
    filling = LayerFilling([].__getitem__, 1)
    with pytest.raises(IndexError):
        filling.run()


def test_closing_stops_after_the_layer_at_hand():
    gate, entered, seen = threading.Event(), threading.Event(), []

    def fill(index):
        seen.append(index)
        entered.set()
        assert gate.wait(60)

    filling = LayerFilling(fill, 100)
    filling.start()
    assert entered.wait(60)
    closing = threading.Thread(target=filling.close)
    closing.start()
    while not filling._stopped:
        pass
    gate.set()
    closing.join(60)
    assert seen == [0]
    filling.wait(0)
    with pytest.raises(RuntimeError, match="closed after 1 of 100 layers"):
        filling.wait(1)
