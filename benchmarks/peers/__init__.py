"""One runner per group of peers; each runs inside its own environment (see ``protocol``)."""
