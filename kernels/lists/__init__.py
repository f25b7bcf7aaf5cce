"""What ops over lists of tensors need besides their own kernels."""
