"""The count of bytes that docs/notebook.md gives is what the interpreted kernel moves."""

from collections import Counter

import pytest
from triton.runtime.interpreter import InterpreterBuilder

from tests.kernels.memory.fused.cases import DEVICE, Case, arguments
from titans_pt.kernels.memory import NetworkShape, neural_memory
from titans_pt.kernels.memory.fused import operators, scan
from titans_pt.kernels.memory.fused.traffic import scan_bytes


@pytest.mark.skipif(DEVICE == "cuda", reason="counts in Triton's interpreter")
@pytest.mark.parametrize("forget_to", ["start", "zero"])
@pytest.mark.parametrize("C", [16, 128])
def test_bytes_of_the_scan(C, forget_to, monkeypatch):
    case = Case(T=512, C=C, H=1, forget_to=forget_to)
    places, moved = {}, Counter()

    def launch(call, kernel, number, *tensors, **options):
        if kernel is scan.scan:
            named = dict(zip(kernel.arg_names, tensors, strict=False))
            kinds = {"W": "state", "S": "state", "weights": "copies", "momenta": "copies", "base": "base"}
            places.update({kind: named[kind] for kind in kinds})
        plain(call, kernel, number, *tensors, **options)
        places.clear()

    def count(kind):
        original = getattr(InterpreterBuilder, kind)

        def counted(builder, pointers, *rest):
            mask = rest[0] if kind == "create_masked_load" else rest[1]
            for name, tensor in places.items():
                begin = tensor.data_ptr()
                here = (pointers.data >= begin) & (pointers.data < begin + tensor.nbytes)
                moved[kind[14:], name] += int((here & mask.data).sum()) * tensor.element_size()
            return original(builder, pointers, *rest)

        monkeypatch.setattr(InterpreterBuilder, kind, counted)

    plain = operators.Call.launch
    monkeypatch.setattr(operators.Call, "launch", launch)
    for kind in ("create_masked_load", "create_masked_store"):
        count(kind)
    given, options = arguments(case)
    neural_memory(*given, **options, backend="triton")
    expected = scan_bytes(NetworkShape(case.D, 2 * case.D), C, 4, forget_to == "start")
    found = {
        "state": sum(n for (_, name), n in moved.items() if name in ("W", "S")),
        "copies": moved["store", "weights"] + moved["store", "momenta"],
        "frozen": moved["load", "weights"] + moved["load", "momenta"] + moved["load", "base"],
    }
    for kind, count in expected.items():
        # The set-up of a group of blocks moves a set more.
        assert found[kind] / case.T == pytest.approx(count, rel=0.25), kind
