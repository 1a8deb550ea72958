"""Several machines: expert hosts, what keeps them, and the coordinator's side of them."""
