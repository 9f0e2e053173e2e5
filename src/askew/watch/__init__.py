"""A server of the page over run folders, live while runs train, for `askew watch`. It reads, and never writes."""
