"""What is in tk's packs (csrc/python/module.cpp). Needs no GPU and no torch; built for one Python version."""

class Config:
    """A named setting of a kernel; ``params`` is a JSON object."""

    number: int
    name: str
    params: str

class Launch:
    """One launch of a variant; sizes in bytes."""

    image: str
    entry: str
    threads: int
    shared: int
    cluster: int
    size: int
    compressed_size: int

class Variant:
    """A kernel at one point of its grid. constraints: each completes "this variant needs …"."""

    number: int
    kernel: str
    config: int
    config_name: str
    general: bool
    deterministic: bool
    constraints: list[str]
    launches: list[Launch]

class Op:
    """An op of a pack. schema: "" where a library registers it."""

    name: str
    schema: str
    n_buckets: int
    n_variants: int
    n_pins: int
    configs: list[Config]

class Pack:
    """problem: why it cannot be used, "" when it can; then the rest is empty. hash: SHA-256 of the index."""

    path: str
    builtin: bool
    problem: str
    arch: int
    ptx: bool
    compiler: str
    hash: str
    file_size: int
    n_images: int
    ops: list[Op]

def packs() -> list[Pack]:
    """All packs that are loaded or belong to the library, whatever GPUs there are."""

def variants(pack: str, op: str) -> list[Variant]:
    """The variants of an op in the pack at a path. Raises IndexError when there is none."""

def verify(path: str) -> str:
    """Holds every image of a pack against its hash; "" or what is wrong."""

def describe_device(sm_count: int, arch: int, shared_optin: int, l2_bytes: int) -> int:
    """A device number for choosing as on a GPU that this machine may not have. arch: 90 for 9.0. Raises RuntimeError
    after 64 of them."""
