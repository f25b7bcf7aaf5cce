"""Enumeration: which variants there are, in what order, under which numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

import unit_kernels
from tk.aot.errors import GridError
from tk.aot.expr import Problem, TensorValue
from tk.aot.grid import NO_PLAN, bucket_expr, bucket_key, buckets, config_numbers, enumerate_grid
from tk.aot.spec import Config, Family, Kernel, require
from unit_kernels import FAMILY, KERNELS, OP

SCALE_ADD = KERNELS[0]


def family(*kernels: Kernel) -> Family:
    return Family(OP, kernels, lambda kernel, point: True)


def changed_plan(**changes) -> Kernel:
    return replace(SCALE_ADD, plan=lambda point: replace(SCALE_ADD.plan(point), **changes))


def test_order_is_that_of_the_declaration():
    names = [v.name for v in enumerate_grid(FAMILY, 90).variants]
    assert names[:4] == [
        "scale_add[dtype=fp32, even=True] block256 sm_90",
        "scale_add[dtype=fp32, even=True] block1024 sm_90",
        "scale_add[dtype=fp32, even=False] block256 sm_90",
        "scale_add[dtype=fp32, even=False] block1024 sm_90",
    ]
    assert names == [v.name for v in enumerate_grid(FAMILY, 90).variants]
    assert len(set(names)) == len(names) == 14


def test_false_constraints_drop_the_point_and_true_ones_vanish():
    grid = enumerate_grid(FAMILY, 90)
    assert grid.considered == Counter(scale_add=8, reduce=2, copy_triton=2, copy_gluon=2, copy_device=2)
    assert dict(grid.dropped) == {"scale_add": Counter({"fp16 with at most 512 elements a program": 2})}
    messages = {c.message for v in grid.variants for c in v.plan.constraints}
    assert "fp16 with at most 512 elements a program" not in messages
    assert "n a multiple of 16" in messages


def test_an_architecture_without_configs_has_no_variants():
    assert {v.kernel.name for v in enumerate_grid(FAMILY, 80).variants} == {"scale_add", "reduce"}
    assert enumerate_grid(FAMILY, 75).variants == []


def test_no_plan_is_counted():
    grid = enumerate_grid(family(replace(SCALE_ADD, plan=lambda point: None)), 80)
    assert grid.variants == []
    assert grid.dropped["scale_add"] == Counter({NO_PLAN: 8})


def test_sample_touches_every_axis():
    grid = enumerate_grid(FAMILY, 90, sample=True)
    assert {v.point.config.name for v in grid.variants if v.kernel is SCALE_ADD} == {"block256"}
    poor = replace(FAMILY, sample=lambda kernel, point: point.dtype == "fp32")
    with pytest.raises(GridError, match=r"has: scale_add: dtype=fp16$"):  # what is newer has the others, too
        enumerate_grid(poor, 90, sample=True)
    with pytest.raises(GridError, match=r"has: copy_device: dtype=fp16; .*reduce: dtype=fp16$"):
        enumerate_grid(poor, 100, sample=True)
    enumerate_grid(poor, 80, sample=True)


def test_ptx_keeps_what_is_portable():
    modest = replace(FAMILY, portable=lambda kernel, point: point.config.name == "block256")
    assert len(enumerate_grid(modest, 80).variants) == 8
    assert {v.point.config.name for v in enumerate_grid(modest, 80, portable=True).variants} == {"block256"}


def test_config_numbers_are_the_same_on_every_architecture():
    names = ["block256", "block1024", "sum2048", "triton_64x32", "gluon_64x32", "device_64x32"]
    for arch in (80, 90, 100):
        assert [(c.number, c.config.name) for c in config_numbers(FAMILY, arch)] == list(enumerate(names))


def test_config_params_are_those_of_the_architecture():
    one, other = Config("c", {"block": 1}), Config("c", {"block": 2})
    kernel = replace(SCALE_ADD, configs={80: (one,), 90: (other,)})
    assert config_numbers(family(kernel), 90)[0].config.block == 2
    assert config_numbers(family(kernel), 80)[0].config.block == 1


def test_one_name_for_two_settings_is_refused():
    clash = replace(SCALE_ADD, name="other", configs={90: (Config("block256", {"block": 128}),)})
    with pytest.raises(GridError, match=r"config block256 stands for \{'block': 256\} and, in kernel other"):
        config_numbers(family(SCALE_ADD, clash), 90)


def test_one_config_of_two_kernels_in_one_bucket_is_refused():
    twin = replace(SCALE_ADD, name="twin")
    with pytest.raises(GridError, match="config block256 of one bucket belongs to two kernels"):
        enumerate_grid(family(SCALE_ADD, twin), 90)


@pytest.mark.parametrize(
    ("serves", "message"),
    [
        ({"dtype": (0,)}, r"serves names \['dtype'\], op unit_test_op selects by \['dtype', 'way'\]"),
        ({"dtype": (0, 2), "way": (0,)}, r"serves dtype \[2\]; dtype is one of range\(2\)"),
        ({"dtype": (), "way": (0,)}, "serves no dtype"),
    ],
)
def test_serves_is_checked(serves, message):
    with pytest.raises(GridError, match=message):
        enumerate_grid(family(changed_plan(serves=serves)), 90)


def test_kernels_belong_to_the_familys_op():
    stranger = replace(SCALE_ADD, op=replace(OP, name="another"))
    with pytest.raises(GridError, match="kernel scale_add is for op another"):
        enumerate_grid(family(stranger), 90)


def test_buckets_list_their_variants():
    variants = enumerate_grid(FAMILY, 90).variants
    table = buckets(OP, variants)
    assert list(table) == sorted(table) == [0, 1, 2, 3, 4, 5]
    for key, candidates in table.items():
        dtype, way = divmod(key, 3)
        kernels = {"0": {"scale_add"}, "1": {"reduce"}, "2": {"copy_triton", "copy_gluon", "copy_device"}}[str(way)]
        assert {variants[i].kernel.name for i in candidates} == kernels
        assert {variants[i].point.dtype for i in candidates} == {unit_kernels.DTYPE_AXIS[dtype]}


def test_a_plan_may_serve_several_buckets():
    both = changed_plan(serves={"dtype": (0, 1), "way": (0, 2)}, constraints=())
    assert set(buckets(OP, enumerate_grid(family(both), 90).variants)) == {0, 2, 3, 5}


@pytest.mark.parametrize(("dtype", "dtype_number"), [(6, 0), (5, 1)])
@pytest.mark.parametrize("way", [0, 1, 2])
def test_the_bucket_of_a_problem(dtype, dtype_number, way):
    problem = Problem((TensorValue((4, 4), (4, 1), dtype), None, None), ints=(way,))
    assert bucket_expr(OP).evaluate(problem) == bucket_key(OP, {"dtype": dtype_number, "way": way})


@pytest.mark.parametrize("way", [-1, 3])
def test_a_selector_out_of_range_has_no_bucket(way):
    problem = Problem((TensorValue((4, 4), (4, 1), 6), None, None), ints=(way,))
    assert bucket_expr(OP).evaluate(problem) == -1


def test_an_op_without_selectors_has_one_bucket():
    assert bucket_key(replace(OP, selectors={}), {}) == 0
    assert bucket_expr(replace(OP, selectors={})) == 0


def test_a_constraint_that_folds_to_false_names_itself():
    grid = enumerate_grid(family(changed_plan(constraints=(require(False, "the moon"),))), 90)
    assert grid.dropped["scale_add"] == Counter({"the moon": 8})
