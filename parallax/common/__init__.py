"""What every room uses: files, units, signals, the words of others."""
