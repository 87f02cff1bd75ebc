"""Items through the device, the copies of some under the kernels of others."""
