"""A local web page over run folders, live while runs train: what `askew watch` serves. It reads, and never writes."""
