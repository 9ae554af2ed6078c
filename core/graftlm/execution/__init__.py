"""Runs steps on the device: batch, model, sampler. The scheduler owns the state on the host."""
