"""Whatever a product's strides, something runs: for each kind of product a variant that assumes nothing of them."""

import itertools
from collections import defaultdict

import pytest

from tk.aot.grid import enumerate_grid
from tk.kernels.bmm.family import FAMILY as BMM
from tk.kernels.gemm.problem import ORDER_AXIS
from tk.kernels.grouped_mm.family import FAMILIES as GROUPED
from tk.kernels.mm.family import FAMILY as MM
from tk.kernels.mm_plus_mm.family import FAMILY as MM_PLUS_MM


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("family", [MM, BMM, MM_PLUS_MM, *GROUPED], ids=lambda f: f.op.name)
def test_every_order_has_a_general_variant(family, arch):
    kinds, general = set(), defaultdict(set)  # of dtype, output, epilogue …: the orders with a general variant
    for variant in enumerate_grid(family, arch).variants:
        serves = variant.plan.serves
        rest = [axis for axis in serves if axis != "order"]
        for kind in itertools.product(*(serves[axis] for axis in rest)):
            kinds.add(kind)
            if variant.plan.general:
                general[kind] |= set(serves["order"])
    assert len(kinds) > 1
    for kind in kinds:
        assert general[kind] == set(range(len(ORDER_AXIS))), kind
