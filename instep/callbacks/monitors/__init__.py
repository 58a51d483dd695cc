"""Callbacks that watch: device, throughput, gradients, learning rate, spikes of the loss."""
