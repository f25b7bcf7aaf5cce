"""``store_table``: 64-bit words into memory, in the order of the stream. They are parameters of the launch, so that a
captured graph holds them. csrc/ops/lists.h calls it, to tell kernels over lists of tensors where the tensors lie."""

from tk.aot.expr import as_expr, const, tensors
from tk.aot.spec import Config, Family, Kernel, Launch, Op, Plan, Point, Pointer, Selector
from tk.codegen import source

WORDS = 448  # with the address and Triton's two pointers below the 4096 bytes that parameters may have

(TABLE,) = tensors("table")
NAMES = tuple(f"w{i}" for i in range(WORDS))

OP = Op(
    name="store_table",
    tensors=(TABLE,),
    ints=(),
    floats=NAMES,
    locals={},
    selectors={"only": Selector(const(0), 1)},
    dims=(),
)


def _text() -> str:
    stores = [f"    tl.store(table + {i}, {name}.to(tl.int64, bitcast=True))" for i, name in enumerate(NAMES)]
    lines = [", ".join(NAMES[i : i + 16]) for i in range(0, WORDS, 16)]
    params = "\n".join(["    table,", *(f"    {line}," for line in lines)])
    return source.module_text(OP.name, "\n".join([f"@triton.jit\ndef {OP.name}(\n{params}\n):", *stores]) + "\n")


def plan(point: Point) -> Plan:
    args = {"table": Pointer(TABLE, "i64", aligned=False), **{name: OP.float(name, "fp64") for name in NAMES}}
    launch = Launch(source.function(OP.name, _text()), args, (as_expr(1), 1, 1), num_warps=1, num_stages=1)
    return Plan((), {"only": (0,)}, (launch,), const(2_000_000))


_CONFIGS = (Config("words", {"words": WORDS}),)
FAMILY = Family(
    OP,
    (Kernel(OP.name, OP, {}, {80: _CONFIGS, 90: _CONFIGS}, plan),),
    sample=lambda kernel, point: True,
)
