"""Code shared by all packages: files, units, signals, untrusted text and documents."""
