#!/usr/bin/env python3
"""Which cubins are in a pack, by kernel and config, and which of them are others in a second pack.

    python tools/cubins.py sm90.tkpack                  # op, kernel, config, number of variants, hashes of their images
    python tools/cubins.py before.tkpack after.tkpack   # only what differs; the exit status is 1 where anything does

A variant's images are the same in two packs where its source, its constants and the compiler are. So where one function
became slower and its cubins are the same, it is the choice, the host or the machine that differs.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from tk.aot.pack import Pack, read_pack

Name = tuple[str, str, str]  # op, kernel, config


def cubins(pack: Pack) -> dict[Name, list[str]]:
    """For each variant, the hashes of its launches' images, joined, in order; sorted, for a config may have several."""
    found: defaultdict[Name, list[str]] = defaultdict(list)
    for op in pack.ops:
        configs = {c.number: pack.string(c.name) for c in pack.slice("configs", op.configs)}
        for variant in pack.slice("variants", op.variants):
            images = [pack.images[launch.image].hash.hex()[:12] for launch in pack.slice("launches", variant.launches)]
            name = pack.string(op.name), pack.string(variant.kernel), configs[variant.config]
            found[name].append("+".join(images))
    return {name: sorted(hashes) for name, hashes in found.items()}


def differences(before: Mapping[Name, Sequence[str]], after: Mapping[Name, Sequence[str]]) -> list[str]:
    lines = []
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        if old is None or new is None:
            what = f"only {'before' if new is None else 'after'}: {len(old or new or ())} variants"
        else:
            gone, come = (sorted((Counter(x) - Counter(y)).elements()) for x, y in ((old, new), (new, old)))
            what = f"{len(old)} variants, then {len(new)}"
            what += f"; gone {', '.join(gone) or 'none'}; new {', '.join(come) or 'none'}"
        lines.append(f"{' '.join(name)}: {what}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packs", nargs="+", type=Path, metavar="PACK", help="one to list, two to compare")
    args = parser.parse_args(argv)
    if len(args.packs) > 2:
        parser.error("give one pack or two")
    found = [cubins(read_pack(path.read_bytes())) for path in args.packs]
    if len(found) == 1:
        for name, hashes in sorted(found[0].items()):
            print(*name, len(hashes), *hashes)
        return 0
    lines = differences(*found)
    print("\n".join(lines) or "the same cubins")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
