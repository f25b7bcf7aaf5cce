"""``tk build``: the families of kernel files, of functions under ``@tk.op`` and of attention's mods are collected here,
and :mod:`tk.aot` compiles them and writes their packs.

``TK_NO_LIBRARY=1`` lets ``import tk`` go without the native library, which need not exist yet while packs are built.
"""
