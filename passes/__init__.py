"""Pure graph passes: they read ``torch.fx`` graphs and know nothing of the runtime."""
