"""A pack that needs no compiler: an op `name` of one [M, K] tensor with two configs, of which "wide" is the faster and
takes multiples of 16 rows alone. Its image is no cubin; nothing launches it."""

from __future__ import annotations

from pathlib import Path

from tk.aot.expr import tensors
from tk.aot.pack import IMAGE_CUBIN, PackWriter, Range

IMAGE = b"not a cubin, but whole"
COMPILER = "triton 0.0, ptxas 0.0"


def write(path: Path, name: str, arch: int = 90, compiler: str = COMPILER) -> Path:
    writer = PackWriter(arch, flags=0, compiler=compiler)
    (x,) = tensors("x")
    image = writer.image(IMAGE_CUBIN, f"{name}_kernel", IMAGE)
    configs = [
        dict(number=n, name=writer.string(c), params=writer.string("{}")) for n, c in enumerate(("wide", "narrow"))
    ]
    only_16 = dict(holds=writer.code(x.size(0) % 16 == 0), message=writer.string("M a multiple of 16"))
    variants = [
        _variant(writer, name, image, 0, 1_000_000, [only_16]),
        _variant(writer, name, image, 1, 2_000_000, []),
    ]
    candidates = writer.add("candidates", [dict(variant=0), dict(variant=1)])
    op = dict(
        name=writer.string(name),
        schema=writer.string(""),
        n_tensors=1,
        n_dims=2,
        locals=writer.add("locals", [dict(value=writer.code(x.size(d))) for d in (0, 1)]),
        key=writer.code(0),
        dims=[0, 1, 0, 0],
        configs=writer.add("configs", configs),
        buckets=writer.add("buckets", [dict(key=0, candidates=candidates)]),
        variants=writer.add("variants", variants, share=False),
    )
    writer.add("ops", [op])
    path.write_bytes(writer.finish())
    return path


def _variant(writer: PackWriter, name: str, image: int, config: int, cost: int, constraints: list[dict]) -> dict:
    one = writer.code(1)
    launch = dict(image=image, entry=writer.string("entry"), threads=128, cluster=1, when=one, grid=[one, one, one])
    return dict(
        kernel=writer.string(f"{name}_kernel"),
        config=config,
        constraints=writer.add("constraints", constraints) if constraints else Range(0, 0),
        cost=writer.code(cost),
        launches=writer.add("launches", [launch], share=False),
    )
