"""What a training loop saves and when: checkpoints on disks, copies in memory."""
