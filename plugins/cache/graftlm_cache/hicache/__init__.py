"""The hierarchical prefix cache: pages on the device, blocks in host memory and in storage."""
