"""Saving in a training loop: checkpoints on disk, copies in memory."""
