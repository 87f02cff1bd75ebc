"""Host and device memory between the scheduler and the runtime."""
