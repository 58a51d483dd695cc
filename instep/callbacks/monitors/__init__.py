"""Callbacks that watch: device, throughput, gradients, learning rate, replicas, spikes of the loss."""
