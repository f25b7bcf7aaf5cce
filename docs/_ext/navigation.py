"""The order of the pages, by caption. It stands here so that docs/index.md has no word of Sphinx's in it."""

from __future__ import annotations

from typing import Any

PAGES: dict[str, tuple[str, ...]] = {
    "Begin": ("install", "first-steps", "tk.use <use>", "Several GPUs <parallel>", "Determinism <determinism>"),
    "Functions": ("products", "conv", "attention", "What is supported <supported>"),
    "Of your own": (
        "Ops of your own <ops-of-your-own>",
        "add-a-kernel",
        "Torch ops in a function <torch-ops>",
        "packs",
        "cpp",
    ),
    "Reference": ("api", "Glossary <glossary>"),
    "Performance": ("Performance <performance>", "Figures <benchmarks>", "/benchmarks/log"),
    "How it works": ("Design <design>", "Generated kernels <codegen>", "attention-kernels"),
    "The project": ("README </README>", "/CHANGELOG", "/CONTRIBUTING"),
}


def toctrees() -> str:
    return "\n\n".join(
        "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```"])
        for caption, pages in PAGES.items()
    )


def add_toctrees(app: Any, docname: str, source: list[str]) -> None:
    if docname == app.config.root_doc:
        source[0] += "\n\n" + toctrees() + "\n"


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", add_toctrees)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
