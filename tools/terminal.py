"""Draws what commands print, as a terminal shows it: docs/terminal/NAME.svg.

    python tools/terminal.py [NAME ...] [--check]
    python tools/terminal.py demo --printed FILE

The commands run here, without a GPU. What they print is drawn unchanged, but for the folders of packs, which are not
the same everywhere. The kernels are those that are installed: of `make wheel`, in the pictures that are committed.
--check writes nothing and fails where a picture shows what its command does not print. It passes over kernels that are
not installed. A command that needs a GPU is not run: FILE has what it printed where there is one.
"""

from __future__ import annotations

import argparse
import html
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "terminal"

COMMANDS = {
    "explain": (
        "tk explain linear 8x4096 14336x4096 --activation gelu --arch 90 | head -n 14",
        "tk explain softmax 8192x4096 dim=-1 --arch 90 | head -n 10",
    ),
}

ON_A_GPU = {"demo": "tk demo"}

# rich's own has fonts from a server, which a picture in a page does not load.
SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">
<title>{title}</title>
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width;
}}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    named = ", ".join((*COMMANDS, *ON_A_GPU))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {named} (those that need no GPU)")
    parser.add_argument("--printed", type=Path, help="what the one command NAME printed on a GPU")
    parser.add_argument("--check", action="store_true", help="fail instead of writing where a picture is wrong")
    args = parser.parse_args(argv)
    if args.printed:
        (name,) = args.names
        (FOLDER / f"{name}.svg").write_text(draw([(ON_A_GPU[name], args.printed.read_text())]))
        return 0
    status = 0
    for name in args.names or COMMANDS:
        path = FOLDER / f"{name}.svg"
        if not args.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(draw([(c, printed(c)) for c in COMMANDS[name]]))
            continue
        for line in differences(path.read_text(), [(c, printed(whole(c))) for c in COMMANDS[name]]):
            print(f"{path.relative_to(ROOT)}: {line}", file=sys.stderr)
            status = 1
    return status


def whole(command: str) -> str:
    """A command without what cuts off the last lines of its output."""
    return command.partition(" | ")[0]


def printed(command: str) -> str:
    """What a command prints on a machine without a GPU."""
    variables = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    line = ["bash", "-c", re.sub(r"^tk ", f"{sys.executable} -m tk ", command)]
    done = subprocess.run(line, env=variables, check=True, capture_output=True, text=True)
    return re.sub(r"/\S*/(\w+\.tkpack)", r"…/tk/packs/\1", done.stdout)


def draw(commands: Sequence[tuple[str, str]]) -> str:
    from rich.console import Console
    from rich.text import Text

    shown = [("$ ", command, output) for command, output in commands]
    width = max(len(line) for prompt, command, output in shown for line in (prompt + command, *output.splitlines()))
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=width + 1, file=nowhere, force_terminal=True, color_system="truecolor")
        for i, (prompt, command, output) in enumerate(shown):
            text = (
                Text("\n" if i else "").append(prompt, "green").append(command, "bold").append(f"\n{output}".rstrip())
            )
            console.print(text, highlight=False, soft_wrap=True)
        console.print()  # rich cuts off what hangs below the last line
        title = html.escape("; ".join(command for command, _ in commands))
        return console.export_svg(title="", code_format=SVG.replace("{title}", title), unique_id="tk")


def lines(svg: str) -> list[list[str]]:
    """The words of each line of a picture. rich draws a piece of one style at a time, at its y."""
    found: dict[float, list[tuple[float, str]]] = {}
    for x, y, text in re.findall(r'<text class="\S+" x="([\d.]+)" y="([\d.]+)"[^>]*>(.*?)</text>', svg):
        found.setdefault(float(y), []).append((float(x), html.unescape(text)))
    texts = ("".join(text for _, text in sorted(pieces)) for _, pieces in sorted(found.items()))
    return [words for words in (text.replace("\xa0", " ").split() for text in texts) if words]


def differences(svg: str, commands: Sequence[tuple[str, str]]) -> list[str]:
    """What a picture shows otherwise than the commands print it. A row of a kernel's config is compared where that is
    installed here; of each command one at least must be."""
    wrong: list[str] = []
    there = lines(svg)
    for command, output in commands:
        here = [line.split() for line in output.splitlines() if line]
        at = next(
            (i for i, words in enumerate(there) if words[0] == "$" and " ".join(words[1:]).startswith(command)), None
        )
        if at is None:
            wrong.append(f"{command} is not in the picture")
            continue
        end = next((i for i in range(at + 1, len(there)) if there[i][0] == "$"), len(there))
        said, header, _, *rows = there[at + 1 : end]
        now_said, now_header, _, *now_rows = here
        # The kernel that is chosen follows from what is installed: what is said about it does not.
        for then, now in ((said[:1] + said[3:], now_said[:1] + now_said[3:]), (header, now_header)):
            if then != now:
                wrong.append(f"{command}: {' '.join(then)!r} is now {' '.join(now)!r}")
        current = {tuple(row[:3]): row for row in now_rows}
        known = [(row, current[tuple(row[:3])]) for row in rows if tuple(row[:3]) in current]
        wrong += [f"{command}: {' '.join(then)!r} is now {' '.join(now)!r}" for then, now in known if then != now]
        if not known:
            wrong.append(f"{command}: none of the picture's kernels is installed here")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
