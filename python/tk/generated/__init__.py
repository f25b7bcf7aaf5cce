"""Generated ops at run time: what their packs say of them becomes fakes, CPU kernels, gradients and batching rules."""
