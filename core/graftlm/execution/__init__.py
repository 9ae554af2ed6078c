"""What happens on the device: batch, model, sampler. Host state is the scheduler's."""
