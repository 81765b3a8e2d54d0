"""Places of samples: each once an epoch, another order in each, the same for the same seed."""

import numpy as np

from titans_pt.tasks.places import Places


def test_each_place_once_an_epoch_in_another_order():
    places = Places(7, seed=3)
    epochs = [[places[7 * epoch + i] for i in range(7)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs) and epochs[0] != epochs[1] != epochs[2]
    assert epochs[1] == np.random.default_rng([3, 1]).permutation(7).tolist(), "the order of earlier versions"
    assert [Places(7, seed=3)[i] for i in (20, 0, 13)] == [epochs[2][6], epochs[0][0], epochs[1][6]]


def test_fewer_places_are_drawn_or_evenly_spaced():
    drawn = Places(100, seed=0, count=5)
    assert len(drawn) == 5 and len({drawn[i] for i in range(5)}) == 5
    assert {drawn[i] for i in range(5)} != {drawn[i] for i in range(5, 10)}
    assert [Places(10, None, 4)[i] for i in range(5)] == [0, 2, 5, 7, 0]
    assert len(Places(3, None, 9)) == 3 and [Places(3, None)[i] for i in range(4)] == [0, 1, 2, 0]
