"""A simulated node: its cards, kubelet and API server are made up, everything else is real."""
