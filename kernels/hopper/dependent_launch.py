"""Programmatic dependent launch: a kernel begins while those ahead of it in the stream still run."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def launch_dependents():
    """From here on the next kernel in the stream may begin."""
    gl.inline_asm("griddepcontrol.launch_dependents;")


@gluon.jit
def wait_for_prerequisites():
    """Until the kernels ahead have ended: before anything that they may have written is read, and before anything is
    written that they may still read. In a launch that is not dependent it does nothing."""
    gl.inline_asm("griddepcontrol.wait;")
