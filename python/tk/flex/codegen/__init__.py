"""Build side: from a pair's graphs to kernels. At run time only tk.flex.registry asks here, where the build extra is
installed: whether a kernel can have an op.

family.py    a pair -> the families of its ops
lowering.py  a graph, or its derivative -> values of tk.codegen's IR
printing.py  these -> the device functions that attention's kernels call
"""
