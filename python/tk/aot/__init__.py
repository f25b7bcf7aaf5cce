"""Build time: from kernel records to packs. Nothing here is imported by a program that runs kernels.

``TK_NO_LIBRARY=1`` lets ``import tk`` go without the native library, which need not exist yet while packs are built.
"""
