"""The kernels in Triton, for tensors in a GPU's memory; what each means is told in `kernels.reference`."""
